"""How processes share out the micro-batches of an optimiser step, and what it costs where some of them wait. No torch.

Which samples are run together decides their bits, so micro-batches are the same for any number of processes: work is
equal only where that number divides those of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.combinations import ImpossibleConfig, refuse_impossible

if TYPE_CHECKING:
    from genrl.config.schema import Config

WORTH_SAYING = 0.95
"""Of what so many processes can do, the share below which the rest is worth a word."""


def processes_problem(config: Config, num_processes: int) -> str | None:
    """Why `num_processes` are more than this run can use, in words; None if it can use them."""
    context = config.distributed.context
    if num_processes % context:
        return f"{num_processes} processes, and distributed.context asks for groups of {context}"
    most = config.trainer.most_micro_batches(config) // config.trainer.updates * context
    if num_processes <= most:
        return None
    return (
        f"{num_processes} processes, but an optimiser step has micro-batches for {most} only; start no more, or "
        f"write {remedy(config, num_processes // context)}"
    )


def waiting(config: Config, num_processes: int) -> str | None:
    """What it costs that processes wait for those which have more micro-batches, and what mends it; None where it costs
    next to nothing."""
    times = _speedup(config, num_processes)
    if times >= WORTH_SAYING * num_processes:
        return None
    step = config.trainer.cut(config, num_processes)[0]
    unit = "trees" if config.trainer.grows_trees else "samples"
    return (
        f"{num_processes} processes share {len(step)} micro-batches of {max(step)} {unit} in an optimiser step, and "
        f"some wait: about {times:.2f} times as fast as one process; with {remedy(config, num_processes)} none does"
    )


def remedy(config: Config, num_processes: int) -> str:
    """The changes by which all processes have the same work: the largest batch that makes it so, else more prompts."""
    sampling = config.sampling
    whole = num_processes * config.trainer.updates
    more = math.ceil(sampling.prompts_per_iteration / whole) * whole
    for prompts in (sampling.prompts_per_iteration, more):
        for size in range(sampling.batch_size, 0, -1):
            changes = {"prompts_per_iteration": prompts, "batch_size": size}
            changed = config.model_copy(update={"sampling": sampling.model_copy(update=changes)})
            if _speedup(changed, num_processes) == num_processes and _is_possible(changed):
                new = {key: value for key, value in changes.items() if value != getattr(sampling, key)}
                return " ".join(f"sampling.{key}={value}" for key, value in new.items())
    return f"sampling.prompts_per_iteration={more}"


def even(config: Config) -> Iterator[int]:
    """The numbers of processes that have equal work, ascending."""
    for count in range(1, config.trainer.most_micro_batches(config) // config.trainer.updates + 1):
        if _speedup(config, count) == count:
            yield count


def _speedup(config: Config, num_processes: int) -> float:
    """Samples (or trees) of an iteration over those of the process that has most of them, step by step."""
    steps = config.trainer.cut(config, num_processes)
    return sum(map(sum, steps)) / sum(math.ceil(len(step) / num_processes) * max(step) for step in steps)


def _is_possible(config: Config) -> bool:
    try:
        refuse_impossible(config)
    except ImpossibleConfig:
        return False
    return True
