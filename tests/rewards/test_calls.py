"""Cutting and remembering calls changes no score, and asks for nothing twice."""

import math
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import genrl_rewards
from genrl_rewards.background import Background
from genrl_rewards.calls import Calls, digest
from tests.rewards import plain_rewards

IMAGES = torch.rand(6, 3, 5, 4, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "b", "a", "b", "a", "b"]


class Counting:
    """Remembers the sizes of its calls; prompt "b" has a part of its own, "none" has no score."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.moved: list[str] = []

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> Any:
        self.sizes.append(len(prompts))
        scores = [None if p == "none" else float(i.double().mean()) for i, p in zip(images, prompts, strict=True)]
        return scores, {"b": [1.0 if p == "b" else math.nan for p in prompts]} if "b" in prompts else {}

    def to(self, device: str) -> None:
        self.moved.append(device)

    def close(self) -> None:
        self.moved.append("closed")


def same(a: genrl_rewards.Scores, b: genrl_rewards.Scores) -> bool:
    return repr((a.values, a.parts)) == repr((b.values, b.parts))  # NaN equals NaN in print


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 4))
def test_scores_are_those_of_the_plain_reward(rows: list[int], batch_size: int, cache: int) -> None:
    images, prompts = IMAGES[rows], [PROMPTS[r] for r in rows]
    plain = genrl_rewards.score(Counting(), images=images, prompts=prompts)
    inner = Counting()
    calls = Calls(inner, batch_size=batch_size, cache=cache)
    for _ in range(3):
        assert same(genrl_rewards.score(calls, images=images, prompts=prompts), plain)
    assert max(inner.sizes) <= batch_size
    if cache >= len(set(rows)):
        assert sum(inner.sizes) == len(set(rows)) == calls.misses and calls.hits == 3 * len(rows) - calls.misses


def test_the_oldest_sample_is_forgotten_first_and_no_score_is_never_kept() -> None:
    inner = Counting()
    calls = Calls(inner, cache=2)

    def ask(row: int, prompt: str = "a") -> None:
        genrl_rewards.score(calls, images=IMAGES[row : row + 1], prompts=[prompt])

    for row in (0, 1, 0, 2, 0):  # 2 puts 1 out, not 0, which was used since
        ask(row)
    assert calls.misses == 3 and calls.hits == 2
    ask(1)
    assert calls.misses == 4
    for _ in range(2):
        ask(5, "none")
    assert calls.misses == 6


@pytest.mark.parametrize(
    "other",
    [
        {"images": torch.zeros(3, 8, 4)},  # the same bytes in another shape
        {"images": torch.full((3, 4, 8), -0.0)},
        {"prompts": "b"},
        {"style": {"x": 1}},
        {"pil_images": Image.new("RGB", (4, 8))},
    ],
)
def test_samples_that_differ_have_other_digests(other: dict[str, Any]) -> None:
    sample: dict[str, Any] = {"images": torch.zeros(3, 4, 8), "prompts": "a", "style": {"x": 2}}
    assert digest(sample) == digest(dict(reversed(sample.items()))) != digest(sample | other)
    a, b = ({"pil_images": Image.new("L", size)} for size in ((4, 8), (8, 4)))
    assert digest(a) != digest(b)


def test_what_cannot_be_digested_or_cut_is_refused_and_all_else_reaches_the_reward() -> None:
    with pytest.raises(ValueError, match="cache: the column 'style' holds a object"):
        digest({"style": object()})
    for reward in (plain_rewards.wins, plain_rewards.spread):
        with pytest.raises(ValueError, match="compares samples with each other"):
            Calls(reward, batch_size=2)
    inner = Counting()
    calls = Calls(inner, batch_size=2)
    genrl_rewards.move(calls, "meta")
    genrl_rewards.close(calls)
    assert inner.moved == ["meta", "closed"] and genrl_rewards.needs(calls) == genrl_rewards.needs(inner)
    calls, one = Calls(plain_rewards.Moody(), cache=10), {"images": IMAGES[:1]}
    assert [genrl_rewards.score(calls, **one, prompts=[mood]).failed for mood in ("raise", "fine")] == [1, 0]


# -- Scoring in a second thread: the same calls in the same order with the same results, and a clean end


@pytest.mark.parametrize("enabled", [True, False])
def test_results_come_in_the_order_of_the_calls(enabled: bool) -> None:
    order: list[int] = []

    def call(k: int) -> int:
        time.sleep(0.02 * (3 - k))
        order.append(k)
        return 1 // k  # of the last one it raises

    with pytest.raises(ZeroDivisionError), Background[int](enabled) as background:
        for k in (3, 2, 1):
            background.submit(lambda k=k: call(k))
        assert background.results() == [0, 0, 1] and order == [3, 2, 1]
        background.submit(lambda: 7)
        assert background.results() == [7]
        background.submit(lambda: call(0))
        background.results()


def test_it_runs_beside_the_caller_with_the_same_number_of_threads() -> None:
    started, go_on = threading.Event(), threading.Event()

    def call() -> tuple[int, str]:
        started.set()
        assert go_on.wait(10)
        return torch.get_num_threads(), threading.current_thread().name

    with Background[tuple[int, str]]() as background:
        background.submit(call)
        assert started.wait(10)  # it runs while this thread goes on
        go_on.set()
        ((threads, name),) = background.results()
    assert threads == torch.get_num_threads() and name.startswith("scoring")


def test_leaving_early_drops_what_has_not_begun_and_waits_for_the_rest() -> None:
    done: list[int] = []

    def slow(k: int) -> None:
        time.sleep(0.2)
        done.append(k)

    with pytest.raises(KeyboardInterrupt), Background[None]() as background:
        for k in range(50):
            background.submit(lambda k=k: slow(k))
        raise KeyboardInterrupt
    assert len(done) <= 2 and not any(t.name.startswith("scoring") for t in threading.enumerate())
