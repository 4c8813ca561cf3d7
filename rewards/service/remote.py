"""Use a reward that `rewards.service.serve` serves, here or on another machine, as if it were local.

Every call has a deadline. Until then an attempt that fails (no connection, too slow, a reply cut off, 502 to 504) is
made again after a pause that is drawn at random and grows to four seconds. What happens at the deadline is the policy:

    stop    the run stops (RewardFailed, in all processes together)
    drop    the samples have no score (NaN), which leaves them out of training; the next call makes one attempt only
    pause   the log says so, and the call waits `pause_s` longer for the server to come back; then the run stops

A reward that raises on the server raises here, too, and counts as a failed reward; it is not asked again.
"""

from __future__ import annotations

import http.client
import inspect
import json
import logging
import math
import random
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rewards.contract import FROM_SAMPLER, IMAGE_COLUMNS, RewardFailed
from rewards.service import wire

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Policy = Literal["stop", "drop", "pause"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 4.0
POLL_S = 0.2
MAX_REPLY = 2**26
RETRIED = (408, 429, 502, 503, 504)
_jitter = random.SystemRandom()  # not the seeded global generator: an outage must not change what is sampled next


@dataclass(frozen=True)
class Outage:
    """How long to try, and what to do then."""

    timeout_s: float = 60.0
    """Of one attempt, from connecting to the last byte of the reply."""
    deadline_s: float = 180.0
    """Of one call, with all its attempts."""
    policy: Policy = "stop"
    pause_s: float = 300.0
    """How much longer `pause` waits after the deadline."""


class Unavailable(Exception):
    """An attempt that got no usable reply."""


class ServerRaised(RuntimeError):
    """The server took the request and says that it cannot score it."""


class Remote:
    """A reward that is scored by a server.

    name: the reward that is expected there; empty: any. token: sent as `Authorization: Bearer TOKEN`.
    stopped: asked several times a second during a call; once it is true, the call ends with "no score", for a run that
    is to end and will not use it.
    Raises ValueError where no server answers before the deadline, or it serves another reward.
    """

    def __init__(
        self,
        url: str,
        name: str = "",
        *,
        token: str = "",
        outage: Outage | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ):
        if not token.isascii() or not token.isprintable():
            raise ValueError("the token of a reward server must be printable ASCII text")
        self._url, self.name, self.token, self.outage = url, name, token, outage or Outage()
        self._is_down, self._stopped = False, stopped
        _split(self.url())
        try:
            info = json.loads(self._retry("GET", "/info", b"", {}, self.outage.deadline_s))
        except ServerRaised as error:
            raise ValueError(str(error)) from error
        except Unavailable as error:
            start = f"start it there by `genrl serve {name or 'REWARD'}`"
            raise ValueError(f"no {self._who()}: {error}; {start}") from error
        if info.get("protocol") != wire.PROTOCOL or (name and info["name"] != name):
            found = f"reward {info.get('name')!r}, protocol {info.get('protocol')}"
            raise ValueError(f"{self._who()} serves {found}; wanted {name!r}, protocol {wire.PROTOCOL}")
        takes = info["takes"]
        self._max_images = int(info["limits"]["images"])
        self._eight_bit = "images" not in takes
        self._grouped = "group" in takes or "pairs" in takes
        # Pictures travel as one tensor, and pairs are formed on the server; what is declared here follows from that.
        kept = [name for name in takes if name not in ("images", "pil_images", "group", "pairs")]
        names = ["images", *kept, *(["group"] if self._grouped else [])]
        self.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])

    def url(self) -> str:
        """Where the server is, before every attempt."""
        return self._url

    def __call__(self, images: torch.Tensor, **rest: Sequence[Any]) -> Any:
        step = (
            len(images) if self._grouped else max(1, self._max_images // (images.shape[1] if images.ndim == 5 else 1))
        )
        scores: list[Any] = []
        parts: dict[str, list[Any]] = {}
        for start in range(0, len(images), step):
            rows = {name: values[start : start + step] for name, values in rest.items()}
            found, of_parts = self._ask(images[start : start + step], rows)
            for part, numbers in of_parts.items():
                parts.setdefault(part, [math.nan] * len(scores)).extend(numbers)
            scores += found
            for numbers in parts.values():
                numbers += [math.nan] * (len(scores) - len(numbers))
        return scores, parts

    def _ask(self, images: torch.Tensor, rows: Mapping[str, Sequence[Any]]) -> tuple[list[Any], Mapping[str, Any]]:
        pictures = {name: values for name, values in rows.items() if name in IMAGE_COLUMNS}
        columns = {name: values for name, values in rows.items() if name not in FROM_SAMPLER}
        group = rows.get("group")
        prompts = rows.get("prompts", [""] * len(images))
        body = wire.encode(images, prompts, columns, group, pictures, eight_bit=self._eight_bit)
        headers = {"Content-Type": wire.SAFETENSORS, "X-Request-Id": uuid.uuid4().hex}
        return self._by_policy(body, headers, len(images))

    def _by_policy(self, body: bytes, headers: Mapping[str, str], count: int) -> tuple[list[Any], Mapping[str, Any]]:
        outage = self.outage
        try:
            patience = 0.0 if self._is_down else outage.deadline_s  # 0: one attempt
            try:
                return self._scores(body, headers, count, patience)
            except Unavailable as error:
                if outage.policy != "pause" or self._stopped():
                    raise
                logger.warning("%s: %s; waiting up to %g s for it", self._who(), error, outage.pause_s)
                return self._scores(body, headers, count, outage.pause_s)
        except Unavailable as error:
            if self._stopped():
                return [math.nan] * count, {}
            if outage.policy != "drop":
                raise RewardFailed(f"{self._who()} is not available: {error}") from error
            logger.warning("%s: %s; %d samples have no score", self._who(), error, count)
            self._is_down = True
            return [math.nan] * count, {}

    def _scores(
        self, body: bytes, headers: Mapping[str, str], count: int, patience: float
    ) -> tuple[list[Any], Mapping[str, Any]]:
        reply = self._retry("POST", "/score", body, headers, patience)
        try:
            scores, parts = wire.decode_reply(reply)
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"its reply cannot be read: {error}") from error
        for what, row in (("scores", scores), *parts.items()):
            if not isinstance(row, list) or len(row) != count:
                raise Unavailable(f"it returned {_length(row)} {what} for {count} samples")
            if not all(value is None or type(value) in (int, float) for value in row):
                raise Unavailable(f"its {what} are not all numbers")
        self._is_down = False
        return scores, parts

    def _retry(self, method: str, path: str, body: bytes, headers: Mapping[str, str], patience: float) -> bytes:
        """Attempts until one has a reply, at most `patience` seconds; at least one attempt is made."""
        end = time.monotonic() + patience
        pause = FIRST_PAUSE_S
        while True:
            left = end - time.monotonic()
            limit = self.outage.timeout_s if patience == 0 else min(self.outage.timeout_s, max(left, 0.01))
            try:
                return self._attempt(method, path, body, headers, limit)
            except Unavailable:
                wake = time.monotonic() + _jitter.uniform(0.5, 1) * pause
                if wake >= end or self._stopped():
                    raise
                while (left := wake - time.monotonic()) > 0 and not self._stopped():
                    time.sleep(min(left, POLL_S))
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _attempt(self, method: str, path: str, body: bytes, headers: Mapping[str, str], limit: float) -> bytes:
        scheme, host, port, prefix = _split(self.url())
        connection = (
            http.client.HTTPSConnection(host, port, timeout=limit, context=ssl.create_default_context())
            if scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=limit)
        )
        token = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        started = time.monotonic()
        done = threading.Event()
        opened: list[socket.socket] = []  # the connection forgets its socket once the header of a reply has come
        # A socket's own timeout starts anew with every byte, so a second thread keeps the time of the whole attempt.
        threading.Thread(target=self._watch, args=(connection, opened, done, started + limit), daemon=True).start()
        try:
            connection.connect()
            opened.append(connection.sock)
            if time.monotonic() - started >= limit:  # several addresses, each tried that long
                raise TimeoutError
            connection.request(method, prefix + path, body or None, {**headers, **token, "Connection": "close"})
            response = connection.getresponse()
            reply = _read(response)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() - started >= limit:
                raise Unavailable(f"no reply within {limit:.3g} s") from error
            raise Unavailable(str(error) or type(error).__name__) from error
        finally:
            done.set()
            connection.close()
        if response.status == 200:
            return reply
        why = f"status {response.status}: {_error_of(reply)}"
        if response.status in RETRIED:
            raise Unavailable(why)
        raise ServerRaised(f"{self._who()}: {why}")

    def _watch(
        self, connection: http.client.HTTPConnection, opened: list[socket.socket], done: threading.Event, end: float
    ) -> None:
        """Cut the connection at `end`, or when the run is to stop; whatever waits for it then gets an error."""
        while not done.wait(min(POLL_S, max(0.01, end - time.monotonic()))):
            late = time.monotonic() >= end
            bound = opened[0] if opened else connection.sock
            if bound is not None and (late or self._stopped()):
                with suppress(OSError):  # it was closed in this moment
                    bound.shutdown(socket.SHUT_RDWR)
                return
            if late:  # still connecting, which the socket's own timeout ends
                return

    def _who(self) -> str:
        return f"reward server {self._url}"


def _split(url: str) -> tuple[str, str, int | None, str]:
    """(scheme, host, port, path without a slash at its end) of an URL. Raises ValueError for what is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not an URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url!r} is not the URL of a reward server: write http://HOST:PORT or https://HOST")
    return parts.scheme, host, port, parts.path.rstrip("/")


def _read(response: http.client.HTTPResponse) -> bytes:
    reply = response.read(MAX_REPLY + 1)
    if len(reply) > MAX_REPLY:
        raise http.client.HTTPException(f"a reply of more than {MAX_REPLY} bytes")
    if response.length:
        raise http.client.HTTPException("the reply was cut off")
    return reply


def _error_of(reply: bytes) -> str:
    try:
        return str(json.loads(reply)["error"])[:500]
    except (ValueError, KeyError, TypeError):
        return "no message"


def _length(row: Any) -> str:
    return str(len(row)) if isinstance(row, list) else "no"
