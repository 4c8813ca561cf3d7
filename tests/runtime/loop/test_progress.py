"""A live line on a terminal, few plain lines elsewhere, nothing on other processes."""

from __future__ import annotations

import io

from rich.console import Console

from genrl.runtime.loop.progress import Progress, duration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(clock: Clock, *, terminal: bool, enabled: bool = True, start: int = 0) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with Progress(10, start=start, enabled=enabled, console=console, clock=clock) as progress:
        for step in range(start, 10):
            progress.phase("sampling", 64)
            clock.now += 1
            progress.advance(32)
            clock.now += 1
            progress.finish_iteration(step + 1, {"reward/total_mean": step / 10, "kl": None, "images_per_s": 32.0})
    return out.getvalue()


def test_plain_lines_are_few_and_the_last_is_always_there() -> None:
    """The time left counts only this process; others are quiet."""
    assert run(Clock(), terminal=False).splitlines() == [
        "iteration 1/10  reward 0  images/s 32  18 s left",
        "iteration 4/10  reward 0.3  images/s 32  12 s left",
        "iteration 7/10  reward 0.6  images/s 32  6 s left",
        "iteration 10/10  reward 0.9  images/s 32  took 20 s",
    ]
    assert "iteration 7/10  reward 0.6  images/s 32  6 s left" in run(Clock(), terminal=False, start=6)
    assert run(Clock(), terminal=False, enabled=False) == run(Clock(), terminal=True, enabled=False) == ""


def test_a_terminal_gets_every_iteration_and_a_live_line() -> None:
    out = run(Clock(), terminal=True)
    assert all(f"iteration {step}/10  reward" in out for step in range(1, 11))
    assert "\x1b[2K" in out  # the live line is wiped


def test_what_goes_before_the_first_iteration_is_not_in_the_time_left() -> None:
    clock = Clock()
    progress = Progress(10, console=Console(file=io.StringIO()), clock=clock)
    clock.now += 30  # loading, and an evaluation
    for seconds, left in ((4, 36), (2, 16), (2, 14)):
        progress.begin_iteration()
        clock.now += seconds
        progress.finish_iteration(progress.done + 1, {})
        assert progress.seconds_left() == left


def test_the_live_line() -> None:
    clock = Clock()
    progress = Progress(10, console=Console(file=io.StringIO()), clock=clock)
    progress.phase("scoring", 64)
    assert progress._line().plain.split() == "scoring iteration 1/10 0/64 0 s so far".split()
    clock.now += 2
    progress.advance(32)
    assert progress._line().plain.split() == "scoring iteration 1/10 32/64 16 images/s 2 s so far".split()
    progress.finish_iteration(1, {})
    progress.phase("training")
    assert progress._line().plain.split() == "training iteration 2/10 18 s left".split()


def test_parts_of_images_add_up_to_the_total() -> None:
    progress = Progress(1, console=Console(file=io.StringIO()), clock=Clock())
    progress.phase("training", 7)
    for _ in range(2 * 7):
        progress.advance(1 / 3)
    assert progress._line().plain.split() == "training iteration 1/1 5/7 0 s so far".split()
    for _ in range(7):
        progress.advance(1 / 3)
    assert "7/7" in progress._line().plain


def test_markup_in_what_is_said_stays_text() -> None:
    out = io.StringIO()
    Progress(1, console=Console(file=out)).say("[red]prompt[/red] 3")
    assert out.getvalue() == "[red]prompt[/red] 3\n"


def test_durations() -> None:
    told = {0.4: "0 s", 59: "59 s", 61: "1 min 01 s", 3599.6: "1 h 00 min", 7500: "2 h 05 min"}
    assert {seconds: duration(seconds) for seconds in told} == told
