"""One number from several rewards: weights and schedules, gates, normalisation; nothing turns into a silent zero."""

import math
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import genrl_rewards
from genrl_rewards import compose
from genrl_rewards.background import Background
from genrl_rewards.calls import Calls, digest
from genrl_rewards.compose import Component, Gate, Running
from tests.rewards import plain_rewards

NAN = math.nan
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
scores_of_two_groups = st.lists(
    st.one_of(st.floats(-100, 100), st.just(NAN)), min_size=len(GROUP), max_size=len(GROUP)
).map(lambda row: torch.tensor(row, dtype=torch.float64))


def same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True))


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_schedule_is_linear_between_its_points_and_constant_outside() -> None:
    schedule = ((10, 0.0), (20, 1.0), (40, 0.5))
    result = [compose.factor(schedule, k) for k in (0, 10, 15, 20, 30, 40, 1000)]
    assert result == [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.5]
    assert compose.factor((), 7) == 1.0 and compose.factor(((5, 2.0),), 7) == 2.0
    components = {"a": Component(2.0), "b": Component(1.0, schedule=((0, 0.0), (10, 1.0)))}
    scores = {"a": values(1, 2), "b": values(NAN, 4)}
    group = torch.zeros(2)
    assert compose.combine(scores, components, group, iteration=0).total.tolist() == [2.0, 4.0]
    late = compose.combine(scores, components, group, iteration=5)
    assert math.isnan(late.total[0]) and late.total[1] == 6.0 and late.weights["b"] == 0.5
    none = compose.combine(scores, {k: Component(1, ((0, 0.0),)) for k in scores}, group, iteration=0)
    assert none.total.tolist() == [0.0, 0.0]


def test_a_closed_gate_replaces_the_score_and_is_counted() -> None:
    rule = Gate("quality", at_least=0.5, otherwise=-1.0)
    components = {"text": Component(2.0, gate=rule), "quality": Component(0.0)}
    scores = {"text": values(0.9, 0.8, NAN, 0.7, NAN), "quality": values(0.5, 0.4, 0.1, NAN, 0.9)}
    result = compose.combine(scores, components, torch.zeros(5), iteration=0)
    assert result.total[:2].tolist() == [1.8, -2.0]
    assert result.total[2:].isnan().all()  # no score of its own, or no score to judge it by
    assert result.gated["text"].tolist() == [False, True, True, False, False]
    logged = compose.metrics(result, components)
    assert logged["used/text_gated"] == 0.4 and logged["used/text_mean"] == pytest.approx(-0.1)
    components = {"text": Component(normalize="group", gate=Gate("quality", at_least=0.5)), "quality": Component(0.0)}
    scores = {"text": values(1.0, 1.0), "quality": values(0.9, 0.1)}
    result = compose.combine(scores, components, torch.zeros(2), iteration=0)
    assert result.total.tolist() == [1.0, -1.0]  # gated before it is normalised


@example(values(NAN, NAN, 0.0, 5e-324, NAN, 0.0))
@given(scores_of_two_groups)
def test_group_normalisation_has_mean_0_and_spread_1_or_is_0(scores: Tensor) -> None:
    result = compose.normalize_in_groups(scores, GROUP)
    assert torch.equal(result.isnan(), scores.isnan())
    for number in (0, 1):
        rows = (number == GROUP) & ~scores.isnan()
        before, after = scores[rows], result[rows]
        if len(before) > 1 and before.max() - before.min() > 1e-3:
            assert abs(after.mean()) < 1e-6 and abs(after.std(correction=0) - 1) < 1e-6
        elif len(before) < 2 or before.max() == before.min():
            assert (after == 0).all()
    noisy = torch.tensor([0.81, 0.81, 0.81]) + torch.tensor([0, 6e-8, -6e-8])  # rounding noise is no spread
    assert (
        noisy.max() > noisy.min() and compose.normalize_in_groups(noisy.double(), torch.zeros(3)).tolist() == [0.0] * 3
    )


@given(st.lists(scores_of_two_groups, min_size=1, max_size=5))
def test_running_statistics_are_those_of_all_scores(rows: list[Tensor]) -> None:
    running = Running()
    assert running.std == 0.0
    for row in rows:
        running = compose.update(running, row)
    everything = torch.cat(rows)
    kept = everything[~everything.isnan()]
    assert running.count == len(kept)
    if len(kept):
        assert running.mean == pytest.approx(float(kept.mean()), abs=1e-9)
        assert running.std == pytest.approx(float(kept.std(correction=0)), rel=1e-6, abs=1e-6)


def test_running_normalisation_goes_in_and_comes_out_evaluation_has_none_and_what_is_logged() -> None:
    components = {"a": Component(normalize="running")}
    first = compose.combine({"a": values(1, 3)}, components, torch.zeros(2), iteration=0)
    assert first.running == {"a": Running(2, 2.0, 2.0)} and first.total.tolist() == [-1.0, 1.0]
    second = compose.combine({"a": values(5, NAN)}, components, torch.zeros(2), iteration=1, running=first.running)
    assert second.running["a"].count == 3 and second.running["a"].mean == pytest.approx(3)
    assert float(second.total[0]) == pytest.approx((5 - 3) / math.sqrt(8 / 3)) and math.isnan(second.total[1])
    flat = compose.combine({"a": values(2, NAN)}, components, torch.zeros(2), iteration=0)
    assert flat.total[0] == 0 and math.isnan(flat.total[1])
    components = {"a": Component(2.0, ((0, 0.0), (9, 1.0)), "group", Gate("b", 0.5))}
    components["b"] = Component(1.0, normalize="running")
    total = compose.evaluate({"a": values(1, 1), "b": values(0.5, 0.25)}, components)
    assert total.tolist() == [2.5, 0.25]
    components = {"a": Component(3.0), "b": Component(1.0, ((0, 0.5),)), "c": Component()}
    scores = {"a": values(1, 3), "b": values(NAN, NAN), "c": values(1, 2)}
    result = compose.combine(scores, components, torch.zeros(2), iteration=0)
    logged = compose.metrics(result, components)
    assert logged["used/a_mean"] == 6.0 and logged["used/a_std"] == 3.0
    assert math.isnan(logged["used/b_mean"]) and logged["used/b_weight"] == 0.5
    assert set(logged) == {f"used/{k}_{s}" for k in "ab" for s in ("mean", "std")} | {"used/b_weight"}


def test_a_gate_on_a_reward_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'clipscor'.*Did you mean 'clipscore'.*others are: clipscore"):
        compose.check_gate("ocr", Gate("clipscor", 0.2), ["ocr", "clipscore"])
    with pytest.raises(ValueError, match="no other reward"):
        compose.check_gate("ocr", Gate("ocr", 0.2), ["ocr"])
    with pytest.raises(ValueError, match=r"\['a'\].*\['b'\]"):
        compose.combine({"a": values(1)}, {"b": Component()}, torch.zeros(1), iteration=0)


# -- Cutting and remembering calls changes no score, and asks for nothing twice
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


def same_scores(a: genrl_rewards.Scores, b: genrl_rewards.Scores) -> bool:
    return repr((a.values, a.parts)) == repr((b.values, b.parts))  # NaN equals NaN in print


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 4))
def test_scores_are_those_of_the_plain_reward(rows: list[int], batch_size: int, cache: int) -> None:
    images, prompts = IMAGES[rows], [PROMPTS[r] for r in rows]
    plain = genrl_rewards.score(Counting(), images=images, prompts=prompts)
    inner = Counting()
    calls = Calls(inner, batch_size=batch_size, cache=cache)
    for _ in range(3):
        assert same_scores(genrl_rewards.score(calls, images=images, prompts=prompts), plain)
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


def test_samples_that_differ_have_other_digests() -> None:
    for other in (
        {"images": torch.zeros(3, 8, 4)},  # the same bytes in another shape
        {"images": torch.full((3, 4, 8), -0.0)},
        {"prompts": "b"},
        {"style": {"x": 1}},
        {"pil_images": Image.new("RGB", (4, 8))},
    ):
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
