"""The client of OpenAI-compatible judges, against a real server on loopback."""

from __future__ import annotations

import base64
import io
import time

import numpy as np
import pytest
from PIL import Image

from genrl_rewards.scorers.judges.chat import ChatServer, Server, ServerFailed
from tests.rewards import chat_server

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))


def client(url: str, timeout_s: float = 5.0, deadline_s: float = 10.0, key_env: str = "") -> ChatServer:
    return ChatServer("judge-7b", Server(url, key_env, timeout_s, deadline_s))


def test_a_question_is_sent_as_asked_with_the_very_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with chat_server.serve(lambda body, n: chat_server.text("fine")) as (url, requests):
        assert client(url, key_env="MY_KEY").answers([[PICTURE, "How?"]], 7) == ["fine"]
    (request,) = requests
    assert request["path"] == "/v1/chat/completions" and request["headers"]["Authorization"] == "Bearer secret"
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge-7b", 0, 7)
    shown, asked = request["messages"][0]["content"]
    assert asked == {"type": "text", "text": "How?"}
    kind, _, coded = shown["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert np.array_equal(np.array(Image.open(io.BytesIO(base64.b64decode(coded)))), np.array(PICTURE))


def test_yes_and_no_come_from_the_first_token() -> None:
    with chat_server.serve(lambda body, n: chat_server.next_token(Yes=-0.5, No=-1.5, Well=-3.0)) as (url, requests):
        (answer,) = client(url).yes_no([[PICTURE, "?"]])
    assert answer.yes == pytest.approx(1 / (1 + np.exp(-1))) and answer.mass == pytest.approx(
        np.exp([-0.5, -1.5]).sum()
    )
    assert (requests[0]["max_tokens"], requests[0]["logprobs"], requests[0]["top_logprobs"]) == (1, True, 20)


def test_answers_keep_the_order_of_the_questions_though_they_come_as_they_please() -> None:
    def slow_first(body: dict, number: int) -> tuple[int, bytes]:
        asked = body["messages"][0]["content"][0]["text"]
        time.sleep(0.02 * (9 - int(asked)))
        return chat_server.text(asked)

    with chat_server.serve(slow_first) as (url, _):
        judge = client(url)
        for _ in range(2):  # a client that is tied to its first call would fail at the second
            assert judge.answers([[str(i)] for i in range(10)], 1) == [str(i) for i in range(10)]


def test_a_busy_or_broken_reply_is_asked_for_again() -> None:
    broken = [b'{"choices": [', b'{"choices": []}', b'{"choices": [{"message": {"content": [1]}}]}', b"[" * 100_000]
    replies = [(503, b"busy"), (302, b""), *((200, body) for body in broken), chat_server.text("at last")]
    with chat_server.serve(lambda body, n: replies[n]) as (url, requests):
        assert client(url, deadline_s=30).answers([["?"]], 1) == ["at last"]
    assert len(requests) == 7


@pytest.mark.parametrize(
    ("reply", "ask", "words"),
    [
        ((404, b"no such model"), "answers", "refuses: status 404, no such model"),
        (chat_server.text("Yes"), "yes_no", "gives no log-probabilities"),
    ],
)
def test_a_refusal_is_not_asked_again(reply: tuple[int, bytes], ask: str, words: str) -> None:
    with chat_server.serve(lambda body, n: reply) as (url, requests):
        with pytest.raises(ServerFailed, match=words):
            getattr(client(url), ask)([["?"]], *([1] if ask == "answers" else []))
        assert len(requests) == 1
    with chat_server.serve(lambda body, n: (200, b'{"choices": [{"message": {"content": null}}]}')) as (url, _):
        assert client(url).answers([["?"]], 1) == [""]  # cut before its first word


def test_a_server_that_stays_away_raises_at_the_deadline_and_gives_no_score() -> None:
    with chat_server.serve(lambda body, n: (503, b"")) as (url, _):
        start = time.monotonic()
        with pytest.raises(ServerFailed, match="does not answer: (status 503|no reply)"):
            client(url, deadline_s=0.6).answers([["?"]], 1)
        assert time.monotonic() - start < 3
    with pytest.raises(ServerFailed, match="does not answer"):
        client(url, deadline_s=0.3).yes_no([["?"]])


def test_a_reply_that_drips_is_cut_off_at_the_time_limit() -> None:
    with chat_server.serve(lambda body, n: chat_server.text("x" * 400), drip_s=0.05) as (url, _):
        start = time.monotonic()
        with pytest.raises(ServerFailed, match=r"no reply within 0\.\d+ s"):
            client(url, timeout_s=0.4, deadline_s=0.4).answers([["?"]], 1)
        assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "judge: server needs a url. It takes: url, key_env"),
        ({"url": "http://x/v1", "timeout": 3}, "has no 'timeout'. Did you mean 'timeout_s'"),
        ({"url": "127.0.0.1:8000"}, "should look like http://127.0.0.1:8000/v1"),
        ({"url": "http://x/v1", "key_env": "NOT_SET_HERE"}, "the environment has no NOT_SET_HERE"),
    ],
)
def test_wrong_settings_are_refused(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Server.of(given, "judge")
