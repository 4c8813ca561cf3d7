"""An OpenAI-compatible chat server as a judge: vLLM, SGLang, llama.cpp, or a hosted one.

Pictures are sent as PNG, so that the judge sees exactly the pixels that were generated. Every attempt has a time limit
from connecting to the last byte, every question a deadline; a server that does not answer makes the call raise, and
never becomes a score.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from genrl_rewards.contract import nearest
from genrl_rewards.service.http_client import Unavailable, check_url, exchange, retry

if TYPE_CHECKING:
    from genrl_rewards.scorers.judges.vlm import Answer, Question

T = TypeVar("T")
TOP = 20  # most alternatives that servers give for a token
MAX_REPLY = 2**22
BUSY = (408, 409, 425, 429)  # those statuses from 400 to 499 that are not a refusal


@dataclass(frozen=True)
class Server:
    """Where a judge answers, and how long to wait for it."""

    url: str
    """Without `/chat/completions` at its end, such as http://127.0.0.1:8000/v1."""
    key_env: str = ""
    """The environment variable that holds the key; empty: no key is sent."""
    timeout_s: float = 60.0
    """Of one attempt."""
    deadline_s: float = 300.0
    """Of one question with all its attempts."""
    concurrency: int = 8
    """The most questions under way at a time."""

    @classmethod
    def of(cls, given: Mapping[str, Any], reward: str) -> Server:
        """Make one of a mapping of the configuration. Raises ValueError for unknown or missing keys and for a bad
        URL."""
        names = [field.name for field in fields(cls)]
        wrong = [key for key in given if key not in names]
        if wrong or "url" not in given:
            what = f"has no {wrong[0]!r}.{nearest(wrong[0], names)}" if wrong else "needs a url."
            raise ValueError(f"{reward}: server {what} It takes: {', '.join(names)}")
        server = cls(**given)
        try:
            check_url(server.url)
        except ValueError as error:
            example = "http://127.0.0.1:8000/v1"
            raise ValueError(f"{reward}: server url {server.url!r} should look like {example}") from error
        if server.key_env and server.key_env not in os.environ:
            raise ValueError(f"{reward}: the environment has no {server.key_env} with the key of {server.url}")
        return server


class ServerFailed(RuntimeError):
    """A question that the server did not answer."""


class ChatServer:
    """A model of an OpenAI-compatible server as a judge. See `genrl_rewards.scorers.judges.vlm.VLM`."""

    def __init__(self, model: str, server: Server):
        self.model, self.server = model, server

    def to(self, device: str) -> None:
        """Nothing to move."""

    def yes_no(self, questions: Sequence[Question]) -> list[Answer]:
        """How likely "yes" is compared with "no" as the first word, of the 20 likeliest tokens; NaN if neither is."""
        from genrl_rewards.scorers.judges.vlm import yes_or_no

        return [yes_or_no(row) for row in self._first_tokens(questions)]

    def first_words(self, questions: Sequence[Question], words: Sequence[str]) -> list[float]:
        """How likely each answer is to begin with its word; 0 where that is not among the 20 likeliest tokens."""
        from genrl_rewards.scorers.judges.vlm import chance

        rows = self._first_tokens(questions)
        return [chance(row, word) for row, word in zip(rows, words, strict=True)]

    def check_words(self, words: Sequence[str]) -> None:
        """Nothing: a server's tokens are not known."""

    def _first_tokens(self, questions: Sequence[Question]) -> list[list[tuple[str, float]]]:
        return self._ask_all(questions, {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}, _alternatives)

    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """Answers at temperature 0."""
        return self._ask_all(questions, {"max_tokens": max_tokens}, _content)

    def _ask_all(self, questions: Sequence[Question], options: Mapping[str, Any], read: Callable[[Any], T]) -> list[T]:
        # Servers batch what arrives together: one question after the other would leave most of a GPU idle.
        with ThreadPoolExecutor(max(1, min(self.server.concurrency, len(questions)))) as threads:
            return list(threads.map(lambda question: self._ask(question, options, read), questions))

    def _ask(self, question: Question, options: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        turn = {"role": "user", "content": [_part(part) for part in question]}
        # A seed beside temperature 0: some servers draw among equals.
        request = {"model": self.model, "messages": [turn], "temperature": 0, "seed": 0, **options}
        body, server = json.dumps(request).encode(), self.server
        try:
            return retry(
                lambda limit: self._attempt(body, limit, read), timeout_s=server.timeout_s, patience_s=server.deadline_s
            )
        except Unavailable as error:
            raise ServerFailed(f"the judge at {server.url} does not answer: {error}") from error

    def _attempt(self, body: bytes, limit: float, read: Callable[[Any], T]) -> T:
        headers = {"Content-Type": "application/json"}
        if self.server.key_env:
            headers["Authorization"] = f"Bearer {os.environ[self.server.key_env]}"
        url = f"{self.server.url.rstrip('/')}/chat/completions"
        status, reply = exchange("POST", url, body, headers, limit=limit, most=MAX_REPLY)
        if 400 <= status < 500 and status not in BUSY:
            text = reply[:300].decode("utf-8", "replace")
            raise ServerFailed(f"the judge at {self.server.url} refuses: status {status}, {text}")
        if status != 200:
            raise Unavailable(f"status {status}")
        try:
            return read(json.loads(reply)["choices"][0])
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise Unavailable(f"its reply cannot be read: {error!r:.300}") from error


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    buffer = io.BytesIO()
    part.save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _alternatives(choice: Any) -> list[tuple[str, float]]:
    """The likeliest first tokens with their log-probabilities."""
    try:
        first = choice["logprobs"]["content"][0]["top_logprobs"]
        return [(str(row["token"]), float(row["logprob"])) for row in first]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerFailed(
            "the judge's server gives no log-probabilities of its first token (`logprobs`, `top_logprobs`), which "
            "this score needs: ask for a written score instead, or use a server that gives them"
        ) from error


def _content(choice: Any) -> str:
    content = choice["message"]["content"]
    if not isinstance(content, str | None):
        raise ValueError("an answer that is no text")
    return content or ""  # a server gives null where the answer was cut before its first word
