"""An OpenAI-compatible chat server as a judge: vLLM, SGLang, llama.cpp, or a hosted one.

Pictures travel as PNG, so that the judge sees the pixels that were made. Every attempt has a time limit from connecting
to the last byte, every question a deadline; a server that stays away raises, and never becomes a score.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rewards.contract import nearest

if TYPE_CHECKING:
    from rewards.scorers.judges.vlm import Answer, Question

logger = logging.getLogger(__name__)

TOP = 20  # most alternatives that servers give for a token
MAX_REPLY = 2**22
RETRIED = (408, 409, 429, 500, 502, 503, 504)
LONGEST_PAUSE_S = 8.0
_jitter = random.SystemRandom()  # not the seeded global generator: an outage must not change what is sampled next


@dataclass(frozen=True)
class Server:
    """Where a judge answers, and how long it is waited for."""

    url: str
    """Up to and without `/chat/completions`, such as http://127.0.0.1:8000/v1."""
    key_env: str = ""
    """The environment variable that holds the key; empty: no key is sent."""
    timeout_s: float = 60.0
    """Of one attempt."""
    deadline_s: float = 300.0
    """Of one question with all its attempts."""
    concurrency: int = 8
    """Questions under way at a time."""

    @classmethod
    def of(cls, given: Mapping[str, Any], reward: str) -> Server:
        """From a configuration's mapping; ValueError for unknown or missing keys, and for a URL that is none."""
        known = [field.name for field in fields(cls)]
        wrong = [key for key in given if key not in known]
        if wrong or "url" not in given:
            what = f"has no {wrong[0]!r}.{nearest(wrong[0], known)}" if wrong else "needs a url."
            raise ValueError(f"{reward}: server {what} It takes: {', '.join(known)}")
        server = cls(**given)
        parts = urlsplit(server.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{reward}: server url {server.url!r} should look like http://127.0.0.1:8000/v1")
        if server.key_env and server.key_env not in os.environ:
            raise ValueError(f"{reward}: the environment has no {server.key_env} with the key of {server.url}")
        return server


class ServerFailed(RuntimeError):
    """A question that the server did not answer."""


class ChatServer:
    """A model of an OpenAI-compatible server as a judge. See `rewards.scorers.judges.vlm.VLM`."""

    def __init__(self, model: str, server: Server):
        self.model, self.server = model, server

    def to(self, device: str) -> None:
        """Nothing to move."""

    def yes_no(self, questions: Sequence[Question]) -> list[Answer]:
        """How likely "yes" is beside "no" as the first word, among the 20 likeliest tokens; NaN if neither is there."""
        from rewards.scorers.judges.vlm import yes_or_no

        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        return [yes_or_no(_alternatives(choice)) for choice in self._ask_all(questions, options)]

    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """Answers at temperature 0."""
        return [_content(choice) for choice in self._ask_all(questions, {"max_tokens": max_tokens})]

    def _ask_all(self, questions: Sequence[Question], options: Mapping[str, Any]) -> list[Any]:
        with ThreadPoolExecutor(max(1, min(self.server.concurrency, len(questions)))) as threads:
            return list(threads.map(lambda question: self._ask(question, options), questions))

    def _ask(self, question: Question, options: Mapping[str, Any]) -> Any:
        turn = {"role": "user", "content": [_part(part) for part in question]}
        request = {"model": self.model, "messages": [turn], "temperature": 0, "seed": 0, **options}
        body = json.dumps(request).encode()
        end = time.monotonic() + self.server.deadline_s
        pause = 0.25
        while True:
            try:
                return self._attempt(body, min(self.server.timeout_s, max(end - time.monotonic(), 0.01)))
            except _TryAgain as error:
                wait = _jitter.uniform(0.5, 1) * pause
                if time.monotonic() + wait >= end:
                    raise ServerFailed(f"the judge at {self.server.url} does not answer: {error}") from error
                logger.info("the judge at %s: %s; again in %.1f s", self.server.url, error, wait)
                time.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _attempt(self, body: bytes, limit: float) -> Any:
        url = urlsplit(self.server.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=limit)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.server.key_env:
            headers["Authorization"] = f"Bearer {os.environ[self.server.key_env]}"
        started = time.monotonic()
        cut = None
        try:
            connection.connect()
            # A socket's own timeout starts anew with every byte. The socket is kept: the connection forgets it.
            cut = threading.Timer(max(limit - (time.monotonic() - started), 0.01), _cut, [connection.sock])
            cut.start()
            connection.request("POST", f"{url.path.rstrip('/')}/chat/completions", body, headers)
            response = connection.getresponse()
            reply = response.read(MAX_REPLY + 1)
            if time.monotonic() - started >= limit:
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            late = time.monotonic() - started >= limit
            raise _TryAgain(f"no reply within {limit:.3g} s" if late else str(error) or type(error).__name__) from error
        finally:
            if cut is not None:
                cut.cancel()
            connection.close()
        if response.status in RETRIED:
            raise _TryAgain(f"status {response.status}")
        if response.status != 200:
            told = reply[:300].decode("utf-8", "replace")
            raise ServerFailed(f"the judge at {self.server.url} refuses: status {response.status}, {told}")
        try:
            if len(reply) > MAX_REPLY:
                raise ValueError("it is too long")
            return json.loads(reply)["choices"][0]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise _TryAgain(f"its reply cannot be read: {error!r}") from error


class _TryAgain(Exception):
    """An attempt that may succeed next time."""


def _cut(connected: socket.socket) -> None:
    with suppress(OSError):  # it may have ended in the meantime
        connected.shutdown(socket.SHUT_RDWR)


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    buffer = io.BytesIO()
    part.save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _alternatives(choice: Any) -> list[tuple[str, float]]:
    try:
        first = choice["logprobs"]["content"][0]["top_logprobs"]
        return [(str(row["token"]), float(row["logprob"])) for row in first]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerFailed(
            "the judge's server gives no log-probabilities of its first token (`logprobs`, `top_logprobs`), which a "
            "yes-or-no score needs: ask for a parsed score instead, or use a server that gives them"
        ) from error


def _content(choice: Any) -> str:
    try:
        return str(choice["message"]["content"])
    except (KeyError, TypeError) as error:
        raise ServerFailed("the judge's server gives an answer without text") from error
