"""HTTP requests with a time limit on the whole exchange, and retries, for rewards and judges on servers."""

from __future__ import annotations

import http.client
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 4.0
POLL_S = 0.2
_jitter = random.SystemRandom()  # not the seeded global generator: an outage must not change what is sampled next


class Unavailable(Exception):
    """An attempt that got no usable reply; another one may."""


def split_url(url: str) -> SplitResult:
    """The parts of a URL. Raises ValueError if it is not one, or has a query, a fragment or a user name."""
    with suppress(ValueError):  # of a port or an address that is not one
        parts = urlsplit(url)
        extra = parts.query or parts.fragment or parts.username
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not extra:
            return parts
    raise ValueError(f"{url!r} is not the URL of a reward server: write http://HOST:PORT or https://HOST")


def exchange(
    method: str,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    limit: float,
    most: int,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[int, bytes]:
    """Send one request; the status and body of its reply.

    limit: seconds from connecting to the last byte. most: bytes that a reply may have. stopped: asked several times a
    second; once it is true, the exchange ends.
    Raises Unavailable without a connection, after `limit` or `stopped`, and for a reply that is cut off or too long.
    """
    address = split_url(url)
    host = address.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, address.port, timeout=limit, context=ssl.create_default_context())
        if address.scheme == "https"
        else http.client.HTTPConnection(host, address.port, timeout=limit)
    )
    end = time.monotonic() + limit
    done = threading.Event()
    opened: list[socket.socket] = []  # the connection forgets its socket once the header of a reply has come
    # A socket's own timeout starts again with every byte, so a second thread watches the whole exchange.
    threading.Thread(target=_watch, args=(connection, opened, done, end, stopped), daemon=True).start()
    try:
        connection.connect()
        opened.append(connection.sock)
        if time.monotonic() >= end:  # several addresses, each tried for that long
            raise TimeoutError
        connection.request(method, address.path.rstrip("/"), body or None, {**headers, "Connection": "close"})
        response = connection.getresponse()
        return response.status, _read(response, most)
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= end:
            raise Unavailable(f"no reply within {limit:.3g} s") from error
        raise Unavailable(str(error) or type(error).__name__) from error
    finally:
        done.set()
        connection.close()


def _watch(
    connection: http.client.HTTPConnection,
    opened: list[socket.socket],
    done: threading.Event,
    end: float,
    stopped: Callable[[], bool],
) -> None:
    """Shut the connection down at `end`, or once the run is to stop; whoever waits for it then gets an error."""
    while not done.wait(min(POLL_S, max(0.01, end - time.monotonic()))):
        late = time.monotonic() >= end
        bound = opened[0] if opened else connection.sock
        if bound is not None and (late or stopped()):
            with suppress(OSError):  # it was closed in this moment
                bound.shutdown(socket.SHUT_RDWR)
            return
        if late:  # still connecting, which the socket's own timeout ends
            return


def _read(response: http.client.HTTPResponse, most: int) -> bytes:
    reply = response.read(most + 1)
    if len(reply) > most:
        raise http.client.HTTPException(f"a reply of more than {most} bytes")
    if response.length:
        raise http.client.HTTPException("the reply was cut off")
    return reply


def retry(
    attempt: Callable[[float], T],
    *,
    timeout_s: float,
    patience_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> T:
    """Make attempts until one succeeds, for `patience_s` seconds; at least one is made.

    `attempt` is given its time limit in seconds, at most `timeout_s`, and raises Unavailable to be repeated, after a
    random pause that grows to four seconds. Raises the last Unavailable.
    """
    end = time.monotonic() + patience_s
    pause = FIRST_PAUSE_S
    while True:
        try:
            return attempt(min(timeout_s, max(end - time.monotonic(), 0.01)) if patience_s else timeout_s)
        except Unavailable as error:
            wake = time.monotonic() + _jitter.uniform(0.5, 1) * pause
            if wake >= end or stopped():
                raise
            logger.info("%s; trying again", error)
            while (left := wake - time.monotonic()) > 0 and not stopped():
                time.sleep(min(left, POLL_S))
            pause = min(2 * pause, LONGEST_PAUSE_S)
