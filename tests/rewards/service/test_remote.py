"""A remote reward scores as the local one, and an outage ends as the policy says: never in a zero, never in a hang."""

import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tenacity
import torch
from PIL import Image

import genrl_rewards
from genrl_rewards.service import http_client
from genrl_rewards.service.remote import Outage, Remote
from genrl_rewards.service.wire import Limits
from tests import servers
from tests.ports import free_port
from tests.rewards import plain_rewards
from tests.rewards.faults import FAULTS

IMAGES = torch.rand(6, 3, 9, 7, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "bb", "ccc", "a", "e", "f"]
GROUP = [0, 0, 1, 1, 1, 0]
ONCE = Outage(deadline_s=0.0)
"""One attempt."""


class Clock:
    """The time that pauses between attempts take: none on this machine, however busy it is."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    for module in (http_client, tenacity):
        monkeypatch.setattr(module, "time", made)
    yield made


def score(reward: genrl_rewards.Reward, prompts: list[str] = PROMPTS, **more: Any) -> genrl_rewards.Scores:
    return genrl_rewards.score(reward, **{"images": IMAGES[: len(prompts)]} | more, prompts=prompts, name="mine")


def assert_no_zero(scores: genrl_rewards.Scores) -> None:
    assert all(map(math.isnan, scores.values))


@pytest.mark.parametrize("name", ["mean", "eight_bit", "like", "wins", "spread"])
def test_scores_are_the_local_ones_bit_for_bit(name: str) -> None:
    reward = vars(plain_rewards)[name]
    columns = {"style": PROMPTS, "reference_image": [Image.new("RGB", (3, 2 + k), (k, 9, 9)) for k in range(6)]}
    columns["more"] = [0.25 * k for k in range(6)]  # of a parameter with a default
    local = score(reward, columns=columns, group=GROUP)
    whole = name in ("mean", "eight_bit")
    with servers.live(reward, limits=Limits(images=4 if whole else 100)) as url:
        remote = Remote(url, "mine")
        assert score(remote, columns=columns, group=GROUP) == local and local.unscored == 0
        needs = genrl_rewards.needs(remote)
        if whole:
            videos = torch.rand(3, 1, 3, 6, 5).expand(-1, 4, -1, -1, -1)
            assert score(remote, PROMPTS[:3], images=videos) == score(reward, PROMPTS[:3], images=videos)
    if name == "like":
        assert needs.columns == ("style", "reference_image") and needs.names[0] == "images"
    assert needs.kind == ("groupwise" if name in ("wins", "spread") else "pointwise")  # pairs are formed there


def test_the_name_the_token_and_the_address_are_checked_at_the_start(clock: Clock) -> None:
    with servers.live(plain_rewards.mean, token="right") as url:
        with pytest.raises(ValueError, match="reward server .* status 401: the token is missing"):
            Remote(url, "mine")
        with pytest.raises(ValueError, match="serves reward 'mine', protocol 1; wanted 'ours'"):
            Remote(url, "ours", token="right")
        assert score(Remote(url + "/", "mine", token="right")).failed == 0
    for wrong in ("ftp://a", "127.0.0.1:80", "http://", "http://a:b", "http://u@a", "http://a?x=1"):
        with pytest.raises(ValueError, match="URL"):
            Remote(wrong)
    with pytest.raises(ValueError, match="printable ASCII"):
        Remote("http://127.0.0.1:1", token="a\nb")
    with pytest.raises(ValueError, match=r"no reward server http://127.0.0.1:1: .*genrl serve mine"):
        Remote("http://127.0.0.1:1", "mine", outage=Outage(deadline_s=20.0))
    assert 15 < clock.now < 20


def test_a_reward_that_raises_there_fails_here_and_is_not_asked_again(tmp_path: Any) -> None:
    log = tmp_path / "log"
    with servers.live(plain_rewards.Moody(log=str(log))) as url:
        remote = Remote(url)
        for mood in ("raise", "short", "text"):
            scores = score(remote, [mood, ""])
            assert scores.failed == 2 and "status 500" in scores.failures[0].error and not scores.failures[0].fatal
            assert_no_zero(scores)
        assert len(log.read_text().splitlines()) == 3
        assert_no_zero(score(remote, ["nan", ""]))
        assert score(remote, ["fine", ""]).failed == 0

    def full(images: torch.Tensor) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with servers.live(full) as url:
        scores = score(Remote(url))
    assert scores.failed == len(PROMPTS) and "raised OutOfMemoryError" in scores.failures[0].error


def test_a_slow_reply_is_waited_for_by_asking_again(tmp_path: Any) -> None:
    log = tmp_path / "log"
    with servers.live(plain_rewards.Moody(log=str(log))) as url:
        remote = Remote(url, outage=Outage(timeout_s=1.0))
        assert score(remote, ["sleep", ""]) == score(plain_rewards.Moody(), ["sleep", ""])
    assert len(log.read_text().splitlines()) == 1  # scored once, though asked twice


LASTING = ("hang", "dripped header", "dripped body")
POLICIES = [(name, "drop") for name in ("refuses", "hang", "status 503")]


@pytest.mark.parametrize(("name", "policy"), [*((name, "stop") for name in FAULTS), *POLICIES])
def test_every_fault_ends_by_the_policy(name: str, policy: Any, clock: Clock) -> None:
    fault, calls = FAULTS[name], []

    def reply(connection: socket.socket, number: int) -> None:
        calls.append(number)
        assert fault.reply is not None
        fault.reply(connection, number)

    with servers.scripted(fault.reply and reply) as url:
        remote = Remote(url, "mine")
        if fault.meaning == "outage":
            remote.outage = Outage(timeout_s=0.1, deadline_s=1.0, policy=policy)
        random.seed(0)
        torch.manual_seed(0)
        state = random.getstate(), torch.get_rng_state()
        scores = score(remote, PROMPTS[:2])
        assert clock.now < 1.0
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])  # pauses are drawn elsewhere
    assert_no_zero(scores)
    fatal = [failure.fatal for failure in scores.failures]
    if fault.meaning == "outage":
        assert fatal == ([] if policy == "drop" else [True])
        assert fault.reply is None or len(calls) >= 2  # tried again all along
        assert name not in LASTING or policy == "drop" or "no reply within" in scores.failures[0].error
    else:
        assert fatal == ([False] if fault.meaning == "failure" else []) and len(calls) == 1
        messages = {"status 401": "status 401: no", "raised": "status 500: raised KeyError"}
        assert messages.get(name, "") in "".join(failure.error for failure in scores.failures)


def test_a_redirect_takes_no_token_along_and_a_malformed_description_is_an_outage() -> None:
    asked: list[int] = []
    with servers.scripted(lambda c, k: asked.append(k)) as other:
        head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {other}/score\r\nContent-Length: 0\r\n\r\n"
        with servers.scripted(lambda c, k: c.sendall(head.encode())) as url:
            (failure,) = score(Remote(url, token="secret", outage=ONCE), PROMPTS[:2]).failures
    assert not asked and failure.fatal and f"status 307: it redirects to '{other}/score'" in failure.error
    for body in (b"[]", b"{}", b"[" * 100_000, b'{"protocol": 1, "name": "mine", "takes": 3, "limits": {}}'):
        with servers.scripted(lambda c, k: None, info=body) as url, pytest.raises(ValueError, match="cannot be read"):
            Remote(url, outage=ONCE)


def test_what_is_too_much_for_one_request_travels_in_several() -> None:
    columns = {"style": PROMPTS, "reference_image": [Image.new("RGB", (9, 7), (k, 9, 9)) for k in range(6)]}
    local = score(plain_rewards.like, columns=columns)
    one = 9 * 7 * 2
    for limits in (Limits(pixels=2 * one), Limits(images=5), Limits(bytes=2500)):
        with servers.live(plain_rewards.like, limits=limits) as url:
            assert score(Remote(url), columns=columns) == local


def test_an_attempt_that_fails_is_made_again_with_growing_pauses(clock: Clock) -> None:
    times: list[float] = []

    def fourth(connection: socket.socket, number: int) -> None:
        times.append(clock.now)
        for fault in ("reset", "half a body", "not JSON")[number : number + 1]:  # which cost no score when they pass
            FAULTS[fault].reply(connection, number)
        if number >= 3:
            connection.sendall(servers.http(b'{"scores": [0.25, null]}'))

    with servers.scripted(fourth) as url:
        scores = score(Remote(url), PROMPTS[:2])
    assert scores.values[0] == 0.25 and len(times) == 4
    pauses = [(b - a) / 0.1 / 2**k for k, (a, b) in enumerate(zip(times, times[1:], strict=False))]
    assert all(0.5 <= part <= 1.0 + 1e-9 for part in pauses), pauses


def test_after_a_drop_one_attempt_is_made_until_the_server_is_back(clock: Clock) -> None:
    port = free_port()
    with servers.live(plain_rewards.mean, port=port) as url:
        remote = Remote(url, outage=Outage(deadline_s=20.0, policy="drop"))
    assert_no_zero(score(remote))
    waited = clock.now
    assert 15 < waited < 20
    for _ in range(3):
        assert_no_zero(score(remote))
    assert clock.now == waited  # none of them paused
    with servers.live(plain_rewards.mean, port=port):
        assert score(remote) == score(plain_rewards.mean)


@pytest.mark.parametrize(("kind", "policy"), [("hang", "stop"), ("status 503", "drop")])
def test_a_run_that_is_to_end_waits_for_no_server(policy: Any, kind: str, clock: Clock) -> None:
    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) > 6

    with servers.scripted(FAULTS[kind].reply) as url:
        remote = Remote(url, outage=Outage(policy=policy), stopped=stopped)
        asked.clear()
        started = time.monotonic()
        scores = score(remote, PROMPTS[:2])
        assert time.monotonic() - started < 30  # of 60 that one attempt may take
        assert clock.now < 5  # of 180
    assert_no_zero(scores)
    assert not scores.failures


def test_several_servers_share_the_calls() -> None:
    """Calls of several threads go to those with the fewest; one that is gone is left alone until all have failed."""

    def brightness(images: torch.Tensor) -> Any:
        return images.mean((1, 2, 3))

    seen: list[int] = []
    both = threading.Barrier(2, timeout=60)

    def counted(number: int) -> Any:
        def counting(images: torch.Tensor) -> Any:
            seen.append(number)
            if both.n_waiting < 2 and not both.broken:
                both.wait()  # until the other server is asked, too
            return brightness(images)

        return counting

    with servers.live(counted(1)) as one:
        with servers.live(counted(2)) as two:
            remote = Remote([one, two], "mine")
            result: list[genrl_rewards.Scores] = []
            threads = [threading.Thread(target=lambda: result.append(score(remote))) for _ in range(2)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert result == [score(brightness)] * 2 and sorted(seen) == [1, 2]
            both.abort()
        seen.clear()
        remote.servers[0].busy = 1  # so that the one that is gone comes first
        assert [score(remote), score(remote)] == [score(brightness)] * 2
        assert remote.servers[1].rests_until > time.monotonic() and remote.servers[0].busy == 1
    (failure,) = score(remote).failures
    assert failure.fatal and one in failure.error and two in failure.error


def test_several_servers_must_hold_the_same() -> None:
    with servers.live(plain_rewards.mean) as one, servers.live(plain_rewards.like) as two:
        with pytest.raises(ValueError, match=r"takes \['images', 'reference_images', 'style', 'more'\], and .* takes"):
            Remote([one, two])


def test_the_reply_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genrl_rewards.service.remote.MAX_REPLY", 1000)
    body = json.dumps({"scores": [0.0] * 1000}).encode()
    with servers.scripted(lambda c, k: c.sendall(servers.http(body))) as url:
        scores = score(Remote(url, outage=ONCE), PROMPTS[:2])
    assert_no_zero(scores)
    assert "more than 1000 bytes" in scores.failures[0].error
