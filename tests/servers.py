"""Reward servers on loopback for the tests: real ones, in a thread or in a process, and ones that misbehave."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import genrl_rewards
from genrl_rewards.service import http_app, serve, wire
from genrl_rewards.service.http_app import app
from genrl_rewards.service.wire import Limits

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def live(
    reward: genrl_rewards.Reward, name: str = "mine", *, port: int = 0, token: str = "", limits: Limits | None = None
) -> Iterator[str]:
    """A real server in a thread of this process; yields its URL."""
    bound = serve.listen("127.0.0.1", port)
    bound.listen()
    server = http_app.server(app(reward, name, token=token, limits=limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        bound.close()


def spawn(reward: str, port: int, token: str = "") -> subprocess.Popen[bytes]:
    """`genrl serve` in a process of its own; ready when this returns."""
    environment = os.environ | {serve.TOKEN_VARIABLE: token}
    process = subprocess.Popen(
        [sys.executable, "-m", "genrl", "serve", reward, "--port", str(port)], cwd=ROOT, env=environment
    )
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    process.kill()
    raise RuntimeError("the server was not ready within 60 s")


INFO = {"protocol": wire.PROTOCOL, "name": "mine", "takes": ["images", "prompts"], "limits": vars(Limits())}


def http(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    """A reply as it goes over the wire."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def scripted(reply: Callable[[socket.socket, int], object] | None, info: bytes = b"") -> Iterator[str]:
    """A server that answers /info as it should, or by `info`, and every call of /score by `reply(connection, number)`;
    without one, it refuses connections from then on."""
    bound = socket.create_server(("127.0.0.1", 0))
    calls = iter(range(10**9))
    ended = threading.Event()

    def serve_one(connection: socket.socket) -> None:
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                piece = connection.recv(65536)
                if not piece:
                    return
                head += piece
            head, _, body = head.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            missing = int(lengths[0].split(b":")[1]) - len(body) if lengths else 0
            while missing > 0:
                missing -= len(connection.recv(65536))
            if head.startswith(b"GET /info"):
                if reply is None:
                    stop()
                connection.sendall(http(info or json.dumps(INFO).encode()))
            elif reply is not None:
                reply(connection, next(calls))

    def stop() -> None:
        ended.set()
        with suppress(OSError):  # it has stopped already
            bound.shutdown(socket.SHUT_RDWR)
        bound.close()

    def accept() -> None:
        while not ended.is_set():
            try:
                connection, _ = bound.accept()
            except OSError:
                return
            threading.Thread(target=_quietly, args=(serve_one, connection), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        stop()
        thread.join(5)


def _quietly(call: Callable[[socket.socket], None], connection: socket.socket) -> None:
    try:
        call(connection)
    except OSError:
        return  # the client has gone, which is what some tests are about
