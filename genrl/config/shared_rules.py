"""Rules of the sections that runs of all kinds have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from genrl.config.method import Finding

if TYPE_CHECKING:
    from genrl.config import AnyConfig


def shard_problems(config: AnyConfig) -> Iterator[Finding]:
    """Why weights cannot be shared out so."""
    if config.distributed.shard != "all" and not config.distributed.fsdp:
        yield ("distributed.shard", "distributed.fsdp"), "nothing is sharded; write fsdp: true, or leave it out"


def staleness_problems(config: AnyConfig, at: str, staleness: int) -> Iterator[Finding]:
    """Why samples cannot be so old. at: the key that says how old."""
    if staleness >= config.iterations:
        text = f"samples of all {config.iterations} iterations would be of the first weights; write less"
        yield (at, "iterations"), text


def monitor_problems(config: AnyConfig, names: Sequence[str], what: str) -> Iterator[Finding]:
    """Why the monitor cannot watch: not one of the names of what is evaluated, or too few evaluations."""
    evaluation, at = config.evaluation, "evaluation.monitor"
    monitor = evaluation.monitor
    if monitor is None:
        return
    if monitor.reward not in names:
        hint = difflib.get_close_matches(monitor.reward, names, n=1, cutoff=0.5)
        meant = f"did you mean {hint[0]!r}? " if hint else ""
        yield (f"{at}.reward",), f"no {what} is called {monitor.reward!r}; {meant}they are: {', '.join(names)}"
    if evaluation.every == 0:
        yield (at, "evaluation.every"), "nothing is evaluated, so nothing can be watched; evaluate every 20 iterations"
        return
    after = -(-config.iterations // evaluation.every)  # besides the first, before training
    if monitor.patience > after:
        text = f"only {after} evaluations follow the first, so {monitor.patience} cannot lie lower; use {after}"
        yield (f"{at}.patience", "evaluation.every", "iterations"), text + " or less"
