"""What the benchmarks share: the clock by parts, and loops that take turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import common
from benchmarks.common import Parts, Seconds, Turns, save


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part within another is not counted twice, and a part that ends by an error is counted."""
    now = [0.0]
    monkeypatch.setattr(common, "clock", lambda: Seconds(now[0], now[0] / 2))
    parts = Parts()
    parts.enter("one")
    with parts.part("outer"):
        now[0] += 2.0
        with pytest.raises(KeyError), parts.part("inner"):
            now[0] += 1.0
            raise KeyError
    parts.enter("two")
    clock = SimpleNamespace(wait=lambda seconds: now.__setitem__(0, now[0] + seconds))
    parts.wrap(clock, "wait", "waiting")
    clock.wait(4.0)
    found = {key: spent for key, spent in parts.take().items() if spent.wall}
    assert found == {
        ("one", "outer"): Seconds(2.0, 1.0),
        ("one", "inner"): Seconds(1.0, 0.5),
        ("two", "waiting"): Seconds(4.0, 2.0),
    }
    assert not any(spent.wall for spent in parts.take().values())


def counting(name: str, seen: list[str], count: int) -> Turns:
    def loop(wait: Callable[[], None]) -> None:
        for k in range(count):
            seen.append(f"{name}{k}")
            wait()

    return Turns(loop)


def test_loops_take_turns() -> None:
    seen: list[str] = []
    counting("never begun", seen, 1).close()
    loops = [counting(name, seen, 5) for name in "ab"]
    for _ in range(2):
        for loop in loops:
            loop.next()
    for loop in loops:
        loop.close()
    assert seen == ["a0", "b0", "a1", "b1"]


def test_an_error_in_a_loop_is_raised_where_it_is_told_to_go_on() -> None:
    def loop(wait: Callable[[], None]) -> None:
        wait()
        raise ValueError("broken")

    turns = Turns(loop)
    turns.next()
    with pytest.raises(ValueError, match="broken"):
        turns.next()
    with pytest.raises(RuntimeError, match="has ended"):
        turns.next()
    turns.close()


def test_results_say_how_they_were_made(tmp_path: Path) -> None:
    save(tmp_path, "overhead", {"ratio": 1.0})
    written = json.loads((tmp_path / "overhead.json").read_text())
    assert written["found"] == {"ratio": 1.0}
    assert written["about"]["command"].startswith("python -m benchmarks.overhead")
    assert written["about"]["packages"]["torch"] and written["about"]["threads"]["torch_threads"]
