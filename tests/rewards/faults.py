"""A reward server's faults, each as what happens to one connection: for tests and for drills of whole runs.

with servers.scripted(FAULTS["hang"].reply) as url: ...
"""

import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tests.servers import http

GOOD = b'{"scores": [0.25, 0.75], "parts": {}}'
"""The reply about two samples."""


@dataclass(frozen=True)
class Fault:
    """What a server does with a request about two samples, and what that means."""

    reply: Callable[[socket.socket, int], object] | None
    """Given the connection and how many came before; None: it refuses connections."""
    meaning: Literal["outage", "failure", "no score"] = "outage"
    """Retried until the deadline, and then the policy's; or a call that raises; or that reply's own verdict."""


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_SIZE = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
_PIXELS = _chunk(b"IDAT", zlib.compress(b""))
PNG_BOMB = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", _SIZE) + _PIXELS + _chunk(b"IEND", b"")
"""A PNG of 60,000 x 60,000 pixels in a hundred bytes."""


def _send(*pieces: bytes, pause_s: float = 0.0) -> Callable[[socket.socket, int], None]:
    return lambda connection, _: _drip(connection, pieces, pause_s)


def _drip(connection: socket.socket, pieces: Iterable[bytes], pause_s: float) -> None:
    for piece in pieces:
        connection.sendall(piece)
        time.sleep(pause_s)


def _reset(connection: socket.socket, _: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _status(status: str, more: str = "", body: bytes = b'{"error": "no"}') -> Fault:
    head, _, rest = http(body, status).partition(b"\r\n")
    return Fault(_send(head + b"\r\n" + more.encode() + rest))


def _endless(connection: socket.socket, _: int) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b" " * 2**16 + b"\r\n")


def _bytes(text: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in text]


_REPLY = http(GOOD)
_HEAD, _BODY = _REPLY[: -len(GOOD)], GOOD

FAULTS: dict[str, Fault] = {
    "refuses": Fault(None),
    "reset": Fault(_reset),
    "closed at once": Fault(_send()),
    "hang": Fault(lambda connection, _: connection.recv(1)),  # until the client has gone
    "half a header": Fault(_send(b"HTTP/1.1 200 OK\r\nContent-Le")),
    "half a body": Fault(_send(_REPLY[:-9])),
    "dripped header": Fault(_send(_REPLY[:30], *_bytes(_REPLY[30:]), pause_s=0.2)),
    "dripped body": Fault(_send(_HEAD, *_bytes(_BODY), pause_s=0.2)),
    "garbage": Fault(_send(b"\x00\x01\x02" * 1000)),
    "huge body": Fault(_endless),
    "status 500": _status("500 Internal Server Error", body=b"oops"),
    "status 503": _status("503 Service Unavailable"),
    "status 302": _status("302 Found", "Location: http://127.0.0.1:1/login\r\n"),
    "status 401": Fault(_status("401 Unauthorized").reply, "failure"),
    "raised": Fault(_status("500 Error", body=b'{"error": "raised KeyError", "final": true}').reply, "failure"),
    "not JSON": Fault(_send(http(b"<html>busy</html>"))),
    "another JSON": Fault(_send(http(b'{"result": 0}'))),
    "deep JSON": Fault(_send(http(b"[" * 100_000))),
    "too few": Fault(_send(http(b'{"scores": [0.0], "parts": {}}'))),
    "wrong parts": Fault(_send(http(b'{"scores": [0.0, 0.0], "parts": {"a": [1.0]}}'))),
    "texts": Fault(_send(http(b'{"scores": ["0", "0"]}'))),
    "too large": Fault(_send(http(b'{"scores": [0.0, 1' + b"0" * 400 + b"]}"))),
    "NaN": Fault(_send(http(b'{"scores": [NaN, null]}')), "no score"),
}
"""By name."""
