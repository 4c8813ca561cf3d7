"""The inner loop: passes of an optimiser step; things dealt to steps, the same however many processes share them."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from genrl.runtime.loop import running
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.running import Advance, Ahead
from genrl.runtime.loop.updating import Meter, deal, descend, require_on_policy
from tests.runtime.loop.loops import METHOD, loop, model


def square(settings: Any, two: Any, given: Recorded) -> dict[str, Tensor]:
    return {"loss": given["scale"] * two.policy.square().sum(), "size": given["scale"]}


def scaled(by: float) -> Recorded | None:
    """A part; None of 0."""
    return Recorded(None, {"scale": torch.tensor(by)}) if by else None


class TestDescend:
    def test_the_gradients_of_all_parts_are_one_step(self, tmp_path: Path) -> None:
        one, seen = loop(tmp_path), []
        one.phase("training", 30, 3)

        def measure(part: float, results: Any, recorded: Recorded) -> None:
            seen.append((part, float(results["size"])))

        norms = descend(one, METHOD, model(one), [1.0, 0.0, 3.0], scaled, square, divisor=2.0, measure=measure)
        # of (1 + 3) / 2 |p|^2: 4 p
        assert norms["policy"] == pytest.approx(4 * math.sqrt(14)) and norms["critic"] == 0.0
        assert seen == [(1.0, 1.0), (3.0, 3.0)] and one.process.progress.count == 30

    def test_where_weights_are_in_shards_a_part_without_samples_is_a_pass_too(self, tmp_path: Path) -> None:
        one, passes = loop(tmp_path), []

        def idle() -> Tensor:
            passes.append(1)
            return 0.0 * model(one).policy.sum()

        descend(one, METHOD, model(one), [1.0, 0.0], scaled, square, idle=idle)
        assert not passes
        one.weights.in_step = True
        descend(one, METHOD, model(one), [1.0, 0.0, 0.0], scaled, square, idle=idle)
        assert len(passes) == 2

    def test_a_step_that_is_not_wanted_leaves_no_gradient(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        before = model(one).policy.detach().clone()
        assert descend(one, METHOD, model(one), [1.0], scaled, square, before_step=lambda: False) == {}
        assert model(one).policy.grad is None and torch.equal(model(one).policy, before) and one.updates == 0


@settings(max_examples=60)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=5), parts=st.integers(1, 50), seed=st.integers(0, 9))
def test_every_thing_is_dealt_once_whoever_has_it(counts: list[int], parts: int, seed: int) -> None:
    """All processes know the same of a part. Numbered over all processes, first the first one's, it is the set that one
    process with all things gets."""
    parts = min(parts, max(1, sum(counts)))
    dealt = [list(deal(counts, process, parts, seed)) for process in range(len(counts))]
    for process, batches in enumerate(dealt):
        assert sorted(number for batch in batches for number in batch.mine.tolist()) == list(range(counts[process]))
    starts, shared = torch.tensor([0, *counts]).cumsum(0).tolist(), []
    for batch in zip(*dealt, strict=True):
        sizes = [len(own.mine) for own in batch]
        assert {len(own.every) for own in batch} == {sum(sizes)} and {own.most for own in batch} == {max(sizes)}
        assert sum(sizes) > 0
        owned = zip(starts, batch, strict=False)
        shared.append({start + number for start, own in owned for number in own.mine.tolist()})
        assert shared[-1] == set(batch[0].every.tolist())
    assert shared == [set(batch.mine.tolist()) for batch in deal([sum(counts)], 0, parts, seed)]


def test_the_order_is_that_of_the_keys_and_notes_are_means() -> None:
    def order(*keys: int | str) -> list[int]:
        return [number for batch in deal([50], 0, 6, *keys) for number in batch.mine.tolist()]

    assert order(1, "minibatches", 2, 3) == order(1, "minibatches", 2, 3)
    assert len({tuple(order(1, "minibatches", 2, epoch)) for epoch in range(4)}) == 4
    assert order(0) != list(range(50)) and not list(deal([0, 0], 0, 1, 1))
    meter = Meter()
    for value in (1.0, 3.0):
        meter.note({"a": value})
    meter.note({"b": 5.0})
    meter.add("c", torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]))
    assert meter.result() == {"a": 2.0, "b": 5.0, "c": 1.25}


@pytest.mark.parametrize("off", [2e-3, math.nan])
def test_what_is_not_on_policy_stops_before_the_first_update(off: float) -> None:
    require_on_policy(1e-3, 1e-3, "the ratio", causes="")
    with pytest.raises(RuntimeError, match=r"the ratio is off by .*, more than 0.001: .* Why\."):
        require_on_policy(off, 1e-3, "the ratio", causes="Why.")


# -- Samples that a second thread makes: in their order, told of here, raised here, and ended
def test_in_their_order_and_told_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "POLL_S", 0.001)
    coming: Ahead[int] = Ahead()
    heard, order = threading.Event(), []
    calls: list[tuple[int, str]] = []

    def work(number: int, advance: Advance) -> int:
        order.append(number)
        advance(2)
        advance(1)
        assert number or heard.wait(10)  # the first goes on once it was heard of
        return number * number

    def advance(count: int) -> None:
        calls.append((count, threading.current_thread().name))
        heard.set()

    for number in (0, 3):
        coming.begin(number, lambda tell, number=number: work(number, tell))
    assert coming.take(0, advance) == 0 and [name for _, name in calls] == ["MainThread"] * len(calls)
    assert 1 <= sum(count for count, _ in calls) <= 3
    assert (coming.take(3, advance), order, coming.underway) == (9, [0, 3], {})
    coming.close()


def test_what_is_raised_there_is_raised_here() -> None:
    """When the iteration is asked for: those before it are not disturbed."""
    coming: Ahead[int] = Ahead()
    coming.begin(1, lambda tell: 1)
    coming.begin(2, lambda tell: 1 // 0)
    assert coming.take(1, lambda count: None) == 1
    with pytest.raises(ZeroDivisionError):
        coming.take(2, lambda count: None)
    coming.close()


def test_closing_ends_what_is_on_its_way() -> None:
    coming: Ahead[None] = Ahead()
    begun = threading.Event()

    def endless(tell: Advance) -> None:
        while True:
            tell(1)
            begun.set()

    coming.begin(0, endless)
    coming.begin(1, endless)
    assert begun.wait(10)
    first, second = coming.underway[0].work, coming.underway[1].work
    coming.close()
    assert first is not None and isinstance(first.exception(), running.Closed)
    assert second is not None and second.cancelled()
