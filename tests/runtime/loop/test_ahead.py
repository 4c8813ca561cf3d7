"""Samples that a second thread makes: in their order, told of here, raised here, and ended."""

from __future__ import annotations

import threading

import pytest

from genrl.runtime.loop import ahead
from genrl.runtime.loop.ahead import Advance, Ahead


def test_in_their_order_and_told_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "POLL_S", 0.001)
    coming: Ahead[int] = Ahead()
    heard, order = threading.Event(), []
    told: list[tuple[int, str]] = []

    def work(number: int, advance: Advance) -> int:
        order.append(number)
        advance(2)
        advance(1)
        assert number or heard.wait(10)  # the first goes on once it was heard of
        return number * number

    def advance(count: int) -> None:
        told.append((count, threading.current_thread().name))
        heard.set()

    for number in (0, 3):
        coming.begin(number, lambda tell, number=number: work(number, tell))
    assert coming.take(0, advance) == 0 and [name for _, name in told] == ["MainThread"] * len(told)
    assert 1 <= sum(count for count, _ in told) <= 3
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
    assert first is not None and isinstance(first.exception(), ahead.Closed)
    assert second is not None and second.cancelled()
