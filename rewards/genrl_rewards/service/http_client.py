"""HTTP requests with a time limit on the whole exchange, and retries, for rewards and judges on servers."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tenacity

logger = logging.getLogger(__name__)

T = TypeVar("T")
Reply = tuple[int, bytes]
"""Status and body."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 4.0
POLL_S = 0.2
_jitter = random.SystemRandom()  # not the seeded global generator: an outage must not change what is sampled next


class Unavailable(Exception):
    """An attempt that got no usable reply; another one may."""


def check_url(url: str) -> None:
    """Raise ValueError if it is no URL of a server, or has a query, a fragment or a user name."""
    import httpx  # .2 s, which runs without a server need not spend

    with suppress(httpx.InvalidURL):
        parts = httpx.URL(url)
        extra = parts.query or parts.fragment or parts.userinfo
        if parts.scheme in ("http", "https") and parts.host and parts.port != 0 and not extra:
            return
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
) -> Reply:
    """Send one request; the status and body of its reply. Redirects are not followed, and proxies not asked.

    limit: seconds from connecting to the last byte. most: bytes that a reply may have. stopped: asked several times a
    second; once it is true, the exchange ends.
    Raises Unavailable without a connection, after `limit` or `stopped`, for a redirect, and for a reply that is cut off
    or too long.
    """
    reply: Future[Reply] = Future()

    async def run() -> None:
        try:
            reply.set_result(await _within(limit, stopped, lambda: _send(method, url, body, headers, most)))
        except Exception as error:  # noqa: BLE001  raised in the caller's thread
            reply.set_exception(error)

    # A thread, since the caller's may run a loop already, and since looking up a name may hang in spite of all limits.
    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    return reply.result()


async def _within(
    limit: float, stopped: Callable[[], bool], send: Callable[[], asyncio._CoroutineLike[Reply]]
) -> Reply:
    """httpx limits single reads, which a reply that drips in never exceeds: the clock is watched from outside."""

    async def until_stopped() -> None:
        while not stopped():
            await asyncio.sleep(POLL_S)

    sending, stopping = asyncio.create_task(send()), asyncio.create_task(until_stopped())
    await asyncio.wait((sending, stopping), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    if sending.done():
        return sending.result()
    raise Unavailable("the run is to end" if stopping.done() else f"no reply within {limit:.3g} s")


async def _send(method: str, url: str, body: bytes, headers: Mapping[str, str], most: int) -> Reply:
    import httpx

    # Not compressed: the bound on a reply is of the bytes that arrive. Closed: every call of a thread has a loop of its
    # own, which no connection survives.
    headers = {**headers, "Accept-Encoding": "identity", "Connection": "close"}
    reply = bytearray()
    try:
        async with (
            httpx.AsyncClient(
                # Proxies of the environment are not asked: a token for a server in the house must not travel through
                # them.
                trust_env=False,
                timeout=None,
                verify=_tls() if url.startswith("https") else False,
            ) as client,
            client.stream(method, url, content=body or None, headers=headers) as response,
        ):
            if response.is_redirect:
                to = response.headers.get("location", "nowhere")[:200]
                raise Unavailable(f"status {response.status_code}: it redirects to {to!r}, which is not followed")
            async for piece in response.aiter_raw():
                reply += piece
                if len(reply) > most:
                    raise Unavailable(f"a reply of more than {most} bytes")
            return response.status_code, bytes(reply)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise Unavailable(str(error) or type(error).__name__) from error


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


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
    import tenacity

    end, late = time.monotonic() + patience_s, tenacity.stop_before_delay(patience_s)

    def pause(state: tenacity.RetryCallState) -> float:
        # Random, so that the processes of a run do not come back all at once to the server that they overloaded.
        return _jitter.uniform(0.5, 1) * min(FIRST_PAUSE_S * 2.0 ** (state.attempt_number - 1), LONGEST_PAUSE_S)

    def sleep(seconds: float) -> None:
        wake = time.monotonic() + seconds
        while (left := wake - time.monotonic()) > 0 and not stopped():
            time.sleep(min(left, POLL_S))

    def log(state: tenacity.RetryCallState) -> None:
        logger.info("%s; trying again", state.outcome and state.outcome.exception())

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Unavailable),
        stop=lambda state: stopped() or late(state),
        wait=pause,
        sleep=sleep,
        before_sleep=log,
        reraise=True,
    )
    return attempts(lambda: attempt(min(timeout_s, max(end - time.monotonic(), 0.01)) if patience_s else timeout_s))
