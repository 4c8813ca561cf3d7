"""Use a reward that `genrl_rewards.service.serve` serves, on this machine or another, as if it were local.

Every call has a deadline. Until then an attempt that brings no well-formed list of scores (no connection, too slow, a
reply cut off, any other status, a redirect, texts for numbers) is repeated after a random pause that grows to four
seconds. The policy says what happens at the deadline:

    stop    the run stops (RewardFailed, in all processes together)
    drop    the samples have no score (NaN) and are left out of training; the next call makes one attempt only

If the reward raises on the server, or the server refuses the request or the token, the call raises here, too, and
counts as a failed reward; it is not repeated.

Of several servers of one reward, each attempt goes to the one with the fewest requests under way. One that failed is
asked again after half a minute, or where all others failed, too.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from genrl_rewards.calls import Row, columns, rows
from genrl_rewards.contract import FROM_SAMPLER, IMAGE_COLUMNS, Scored, Scores, declare
from genrl_rewards.failures import RewardFailed
from genrl_rewards.service import wire
from genrl_rewards.service.http_client import Unavailable, check_url, exchange, retry

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_REPLY = 2**26
RESTS_S = 30.0
"""How long a server that failed is left alone while others answer."""


@dataclass(frozen=True)
class Outage:
    """How long to try to reach a server, and what to do then."""

    timeout_s: float = 60.0
    """Of one attempt, from connecting to the last byte of the reply."""
    deadline_s: float = 180.0
    """Of one call, with all its attempts."""
    policy: Literal["stop", "drop"] = "stop"


class ServerRaised(RuntimeError):
    """The server's answer is that it does not score this: its reward raised, or it refuses the request or the token."""


@dataclass
class Server:
    """One of those that hold a reward."""

    url: str
    busy: int = 0
    """Requests under way."""
    rests_until: float = 0.0
    """By the monotonic clock, since it failed."""


class Info(NamedTuple):
    """What a server says of itself."""

    takes: list[str]
    """What the reward must have."""
    options: list[str]
    """Columns that it takes where they are there."""
    limits: wire.Limits


class Remote:
    """A reward that is scored by a server, or by several that hold the same; threads may call it at once.

    urls: of the servers, or of the one. name: the reward that is expected there; empty: any. token: sent as
    `Authorization: Bearer TOKEN`.
    stopped: asked several times a second during a call; once it is true, the call ends with "no score", for a run that
    is about to end and will not use it.
    Raises ValueError if one of the servers does not answer before the deadline, or serves another reward.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        name: str = "",
        *,
        token: str = "",
        outage: Outage | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ):
        if not token.isascii() or not token.isprintable():
            raise ValueError("the token of a reward server must be printable ASCII text")
        self.name, self.token, self.outage = name, token, outage or Outage()
        self._is_down, self._stopped, self._lock = False, stopped, threading.Lock()
        self.servers = [Server(url) for url in ([urls] if isinstance(urls, str) else urls)]
        infos = [self._info(server) for server in self.servers]
        takes, options, _ = infos[0]
        for server, info in zip(self.servers, infos, strict=True):
            if info[:2] != (takes, options):
                first = f"{self.servers[0].url} takes {takes + options}"
                raise ValueError(f"reward server {server.url} takes {info.takes + info.options}, and {first}")
        self._limits = wire.Limits(
            **{key: min(getattr(info.limits, key) for info in infos) for key in vars(wire.Limits())}
        )
        self._eight_bit = "images" not in takes
        self._grouped = "group" in takes or "pairs" in takes
        # Pictures travel as one tensor, and pairs are formed on the server; what is declared here follows from that.
        plain = [name for name in takes if name not in ("images", "pil_images", "group", "pairs")]
        self.__signature__ = declare(["images", *plain, *(["group"] if self._grouped else [])], options)

    @contextmanager
    def asked(self, among: Sequence[Server]) -> Iterator[str]:
        """The URL to send an attempt to, which is sent within the block."""
        with self._lock:
            now = time.monotonic()
            server = min(among, key=lambda server: (server.rests_until > now, server.busy, server.rests_until))
            server.busy += 1
        try:
            yield server.url
        except Unavailable as error:
            server.rests_until = time.monotonic() + RESTS_S
            raise Unavailable(f"{server.url}: {error}" if len(among) > 1 else str(error)) from error
        finally:
            with self._lock:
                server.busy -= 1

    def __call__(self, images: torch.Tensor, **rest: Sequence[Any]) -> Scored:
        # Groups must arrive whole: what is too large for the server then is refused there, with the limit's name.
        step = len(images) if self._grouped else self._fitting(images, rest)
        scored: list[Row] = []
        for start in range(0, len(images), step):
            chosen = {name: values[start : start + step] for name, values in rest.items()}
            scored += rows(Scores(*self._score(images[start : start + step], chosen)))
        return columns(scored)

    def _fitting(self, images: torch.Tensor, rest: Mapping[str, Sequence[Any]]) -> int:
        """How many samples fit into a request."""
        references = [row for name, row in rest.items() if name in IMAGE_COLUMNS]
        own_pixels, others = (
            images[0].numel() // 3,
            sum(max(int(p.width * p.height) for p in row) for row in references),
        )
        pictures = (images.shape[1] if images.ndim == 5 else 1) + len(references)
        size = own_pixels * (3 if self._eight_bit else 12) + 3 * others
        limits = self._limits
        fitting = (limits.images // pictures, limits.pixels // (own_pixels + others), limits.bytes * 9 // 10 // size)
        return max(1, min(fitting))  # a tenth of the bytes is left for texts

    def _score(self, images: torch.Tensor, rest: Mapping[str, Sequence[Any]]) -> Scored:
        pictures = {name: values for name, values in rest.items() if name in IMAGE_COLUMNS}
        plain = {name: values for name, values in rest.items() if name not in FROM_SAMPLER}
        prompts = rest.get("prompts", [""] * len(images))
        body = wire.encode(images, prompts, plain, rest.get("group"), pictures, eight_bit=self._eight_bit)
        # The same in every attempt of this call: a server that has scored it meanwhile answers from memory.
        headers = {"Content-Type": wire.SAFETENSORS, "X-Request-Id": uuid.uuid4().hex}
        return self._by_policy(body, headers, len(images))

    def _by_policy(self, body: bytes, headers: Mapping[str, str], count: int) -> Scored:
        def read(reply: bytes) -> Scored:
            return wire.decode_reply(reply, count)

        try:
            patience = 0.0 if self._is_down else self.outage.deadline_s  # 0: one attempt
            return self._request("POST", "/score", body, headers, patience, read)
        except Unavailable as error:
            if self._stopped():
                return [math.nan] * count, {}
            if self.outage.policy != "drop":
                raise RewardFailed(f"{self._who()} is not available: {error}") from error
            logger.warning("%s: %s; %d samples have no score", self._who(), error, count)
            self._is_down = True
            return [math.nan] * count, {}

    def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        patience_s: float,
        read: Callable[[bytes], T],
        among: Sequence[Server] = (),
    ) -> T:
        """What `read` makes of a reply with status 200. among: who may be asked; empty = all.

        Raises Unavailable, and ServerRaised for a refusal.
        """
        token = {"Authorization": f"Bearer {self.token}"} if self.token else {}

        def attempt(limit: float) -> T:
            with self.asked(among or self.servers) as url:
                status, reply = exchange(
                    method,
                    f"{url.rstrip('/')}{path}",
                    body,
                    {**headers, **token},
                    limit=limit,
                    most=MAX_REPLY,
                    stopped=self._stopped,
                )
                if status != 200:
                    error, final = _error_of(reply)
                    why = f"status {status}: {error}"
                    # 401 is final without saying so: the token does not become right by waiting.
                    if not final and status != 401:
                        raise Unavailable(why)
                    self._is_down = False
                    raise ServerRaised(f"reward server {url}: {why}")
                try:
                    result = read(reply)
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise Unavailable(f"its reply cannot be read: {error!r:.300}") from error
            self._is_down = False
            return result

        return retry(attempt, timeout_s=self.outage.timeout_s, patience_s=patience_s, stopped=self._stopped)

    def _info(self, server: Server) -> Info:
        check_url(server.url)

        def read(reply: bytes) -> Info:
            info = json.loads(reply)
            protocol, name = info["protocol"], info["name"]
            if protocol != wire.PROTOCOL or (self.name and name != self.name):
                served = f"serves reward {name!r}, protocol {protocol}"
                raise ServerRaised(
                    f"reward server {server.url} {served}; wanted {self.name!r}, protocol {wire.PROTOCOL}"
                )
            limits = {key: int(info["limits"][key]) for key in vars(wire.Limits())}
            takes, options = ([str(name) for name in names] for names in (info["takes"], info.get("options", [])))
            return Info(takes, options, wire.Limits(**limits))

        try:
            return self._request("GET", "/info", b"", {}, self.outage.deadline_s, read, [server])
        except ServerRaised as error:
            raise ValueError(str(error)) from error
        except Unavailable as error:
            start = f"start it there with `genrl serve {self.name or 'REWARD'}`"
            raise ValueError(f"no reward server {server.url}: {error}; {start}") from error

    def _who(self) -> str:
        return f"reward server {' or '.join(server.url for server in self.servers)}"


def _error_of(reply: bytes) -> tuple[str, bool]:
    """The message of an error, and whether it is the reward server's last word on the request."""
    try:
        content = json.loads(reply)
        return str(content["error"])[:500], content.get("final") is True
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "no message", False
