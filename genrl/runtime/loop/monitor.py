"""The end of a run whose held-out scorer falls: reward hacking, looked for in every evaluation.

    evaluation: {monitor: {reward: shapes, tolerance: 0.05, patience: 2, action: roll_back}}

The scores and the decision are in the loop's memory, the weights of the best evaluation are a snapshot, and so is
what is trained beside the model (a reward, a rewriter): all are part of a checkpoint. All processes have the same
scores, and so decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from genrl.objectives.hacking import fallen_since
from genrl.runtime.loop.state import State
from genrl.runtime.weights.weights import AVERAGE

BEST = "best"


@dataclass
class Best:
    """What trainers keep beside the model, as it was at the best evaluation."""

    states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.states

    def load_state_dict(self, states: dict[str, Any], /) -> None:
        self.states = states


def prepare(loop: State) -> None:
    """Before the first evaluation, and after a trainer has said what it keeps."""
    settings = loop.config.evaluation.monitor
    if settings is not None and settings.action == "roll_back" and loop.kept.changing:
        loop.keep(BEST, Best())


def watch(loop: State, metrics: Mapping[str, float]) -> dict[str, float]:
    """Remember this evaluation, and decide whether it is to be the last; returns what to log of it.

    For `roll_back` a new best is kept as a snapshot of the evaluated weights. Where training is to end, `ended_at` says
    so from here on, and with `roll_back` the weights, their average, and what is kept beside them are those of the best
    evaluation.
    """
    settings = loop.config.evaluation.monitor
    if settings is None:
        return {}
    seen: dict[str, float] = loop.memory.get("monitor", {}).get("scores", {})
    seen = seen | {str(loop.iteration): metrics[f"eval/{settings.reward}_mean"]}  # after a resume it is made again
    score, *earlier = reversed(seen.values())
    best = max((s for s in seen.values() if not math.isnan(s)), default=math.nan)
    if settings.action == "roll_back" and score == best and score not in earlier:
        with loop.averaged():
            loop.weights.snapshot(BEST)
        if BEST in loop.kept.things:
            kept = {name: thing.state_dict() for name, thing in loop.kept.changing.items() if name != BEST}
            loop.kept.things[BEST].load_state_dict(deepcopy(kept))
    back = fallen_since(list(seen.values()), tolerance=settings.tolerance, patience=settings.patience)
    ended = None if back is None else int(list(seen)[back])
    loop.memory["monitor"] = {"scores": seen, "ended": ended}
    if ended is not None:
        what = f"{settings.reward} fell from {best:.4g} (iteration {ended}) to {score:.4g}: training ends"
        if settings.action == "roll_back":
            loop.weights.take(BEST)
            if loop.config.ema is not None:
                loop.weights.snapshot(AVERAGE)
            if BEST in loop.kept.things:
                for name, kept in loop.kept.things[BEST].state_dict().items():
                    loop.kept.things[name].load_state_dict(kept)
            what += f" with the weights of iteration {ended}"
        if loop.is_main:
            loop.process.progress.say(what)
    return {"eval/monitor_drop": best - score}


def ended_at(loop: State) -> int | None:
    """The iteration of the best evaluation, where the monitor has ended the run; else None."""
    if loop.config.evaluation.monitor is None:
        return None
    found: int | None = loop.memory.get("monitor", {}).get("ended")
    return found
