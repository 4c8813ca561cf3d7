"""Windows and plans in words, for `genrl plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from genrl.diffusion.steps.layout import Layout, Round
from genrl.mdp.plan import describe


def window_text(layout: Layout, steps: int, *, moves: bool) -> Iterator[str]:
    """Where the noise is, in words."""
    window = layout.window
    if window is None:
        yield f"{steps} steps, all but the last with noise"
        return
    place = {
        "random": "sampled in each iteration, all places equally likely",
        "geometric": f"sampled in each iteration, each place {window.ratio:g} times as likely as the one before",
        "progressive": f"moving by {window.stride} every {window.every} iterations",
        "decaying": f"moving by {window.stride} every {window.every} iterations, faster after step {window.decay_from}",
        "backward": f"the last {window.shortest or window.size} steps before step {{}} at first, {window.size} at last",
    }[window.schedule].format(steps - 1 if window.high is None else window.high)
    yield f"{steps} steps, with noise in a window of {window.size}, {place if moves else 'which stays'}"
    if layout.noise_outside_window:
        yield "the steps outside the window also have noise, and are not trained"


def rounds_text(rounds: Sequence[Round], random: bool, guidance: int, replays: int) -> Iterator[str]:
    """The first and the last shape, and all of them in a table. random: whether their order is."""
    for one in dict.fromkeys((rounds[0], rounds[-1])):
        if len(rounds) > 1:
            place = "of the iterations (expected)" if random else f"of the iterations, first in {one.first}"
            yield from ("", f"steps {_steps(one.trained)} trained, in {one.share:.1%} {place}")
        yield describe(one.plan, one.trained, calls_per_state=guidance, replays_per_state=replays)
    if len(rounds) > 1:
        yield from ("", *_table(rounds, guidance, replays))


def _table(rounds: Sequence[Round], guidance: int, replays: int) -> Iterator[str]:
    yield f"{'share':>6}  {'trained':>9}  {'calls':>7}  {'per image':>9}  {'ratio':>5}  {'training':>8}"
    for one in rounds:
        calls, training = one.plan.calls * guidance, one.plan.training_calls(one.trained) * replays
        yield (
            f"{one.share:>6.1%}  {_steps(one.trained):>9}  {calls:>7}  {calls / one.plan.leaves:>9.2f}  "
            f"{one.plan.calls / one.plan.independent_calls:>5.3f}  {training:>8}"
        )


def _steps(steps: Sequence[int]) -> str:
    """0-2,5 and the like."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
