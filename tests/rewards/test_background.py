"""Scoring in a second thread: the same calls in the same order with the same results, and a clean end."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from genrl_rewards.background import Background


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


def test_random_numbers_of_a_reward_are_the_same_with_it_on_and_off() -> None:
    def run(enabled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with Background[torch.Tensor](enabled) as background:
            for _ in range(5):
                torch.randn(100, generator=torch.Generator().manual_seed(1))  # the sampler's own generator
                background.submit(lambda: torch.randn(3))
            return background.results()

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


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
