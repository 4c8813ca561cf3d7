"""Runs that train nothing: a warning at each iteration of this kind, and an end with the reason after some."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from genrl.runtime.loop.guards import StoppedTogether
from genrl.runtime.loop.state import State

KEY = "idle"
"""In the loop's memory: iterations in a row, up to now, that changed no weight."""
logger = logging.getLogger(__name__)


def note(loop: State, row: Mapping[str, float]) -> None:
    """Count the iteration that ends, before its updates are forgotten."""
    stepped = loop.optimization.updates or loop.optimization.other_updates
    # A step along a gradient of 0 moves weights by decay and momentum alone.
    still = not stepped or row.get("grad_norm") == 0.0
    if loop.is_main and (still or math.isnan(row.get("reward/total_mean", 0.0))):
        logger.warning("iteration %d taught nothing: %s", loop.iteration, reason(row))
    if stepped:
        loop.memory.pop(KEY, None)
    else:
        loop.memory[KEY] = loop.memory.get(KEY, 0) + 1


def check(loop: State, row: Mapping[str, float]) -> None:
    """Raise StoppedTogether after `idle_iterations` of them."""
    most, count = loop.config.idle_iterations, loop.memory.get(KEY, 0)
    if most is not None and count >= most:
        raise StoppedTogether(
            f"stopped: the last {count} iterations changed no weight: {reason(row)}. Where that may happen for a while "
            f"(rare success, a critic that is trained elsewhere), go on by `genrl resume {loop.process.run.folder} "
            "idle_iterations=null`, or with a larger number."
        )


def reason(row: Mapping[str, float]) -> str:
    """Why nothing was learnt, as far as the figures of an iteration tell."""
    failed = [
        name.removeprefix("reward/").removesuffix("_failed")
        for name, n in row.items()
        if name.endswith("_failed") and n
    ]
    if math.isnan(row.get("reward/total_mean", 0.0)):
        return f"no sample had a score; {', '.join(failed) or 'a reward'} gave none, and the log says why"
    if row.get("zero_std_ratio") == 1.0:
        some = f", and {', '.join(failed)} gave some no score" if failed else ""
        same = f"in every group all samples have the same reward (zero_std_ratio 1){some}"
        return f"{same}; try easier or harder prompts, or larger groups"
    if not row.get("updates", 1.0):
        return "its method made no optimiser step"
    if row.get("grad_norm") == 0.0:
        return "the gradient was 0"
    return "look at the metrics of advantages, loss and gradient"
