"""How processes share out the micro-batches of an optimiser step, and what it costs where some of them wait. No torch.

Which samples are run together decides their bits, so micro-batches are the same for any number of processes: work is
equal only where that number divides those of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

WORTH_SAYING = 0.95
"""Of what so many processes can do, the share below which the rest is worth a word."""


def processes_problem(config: Config, num_processes: int) -> str | None:
    """Why `num_processes` do not fit this run, in words; None if they do."""
    context = config.distributed.context
    if num_processes % context:
        return f"distributed.context: {num_processes} processes cannot be put in groups of {context}"
    groups, unit, most = num_processes // context, _unit(config), most_processes(config)
    if groups > most:
        return (
            f"{groups} {unit}, but an optimiser step has micro-batches for {most} only; start no more, or write "
            f"{remedy(config, groups)}"
        )
    for key in ("rollout_workers", "reward_workers") if config.engine is not None else ():
        workers = getattr(config.engine, key)
        if workers % num_processes:
            return (
                f"engine.{key}: {num_processes} processes have as many each, and {workers} cannot be divided so; "
                f"write {-(-workers // num_processes) * num_processes}"
            )
    if config.distributed.fsdp and num_processes == 1:
        return f"{config.sharded_by}: there is one process, nothing to shard over; use --nproc or set it to false"
    if groups == 1 or not config.in_step:
        return None
    return _uneven(config, groups, unit)


def _uneven(config: Config, groups: int, unit: str) -> str | None:
    """Say what is uneven: where every model call is a collective, all processes must make as many in every update."""
    key, sampling, updates = config.sharded_by, config.sampling, config.trainer.updates
    if not config.distributed.fsdp:
        return f"{key}: gradients of all weights that wait on the CPU are not summed over processes; use fsdp"
    if sampling.images_per_iteration % sampling.batch_size:
        return (
            f"{key}: {sampling.images_per_iteration} samples in micro-batches of {sampling.batch_size} leave a smaller "
            "one, and all processes make as many model calls; change sampling.batch_size"
        )
    if sampling.micro_batches / updates % groups:
        return (
            f"{key}: {sampling.micro_batches} micro-batches in {updates} updates cannot be shared out evenly to "
            f"{groups} {unit}; write {remedy(config, groups)}"
        )
    return None


def waiting(config: Config, groups: int) -> str | None:
    """What it costs that processes (or groups of them, `distributed.context`) wait for those which have more
    micro-batches, and what mends it; None where it costs next to nothing."""
    times = _speedup(config, groups)
    if times >= WORTH_SAYING * groups:
        return None
    step = config.trainer.cut(config, groups)[0]
    samples = "trees" if config.trainer.branches == "trees" else "samples"
    return (
        f"{groups} {_unit(config)} share {len(step)} micro-batches of {max(step)} {samples} in an optimiser step, and "
        f"some wait: about {times:.2f} times as fast as one; with {remedy(config, groups)} none does"
    )


def remedy(config: Config, num_processes: int) -> str:
    """The changes by which all processes have the same work: the largest batch that makes it so, else more prompts."""
    sampling = config.sampling
    parts = num_processes * config.trainer.updates
    more = math.ceil(sampling.prompts_per_iteration / parts) * parts
    for prompts in (sampling.prompts_per_iteration, more):
        for size in range(sampling.batch_size, 0, -1):
            changes = {"prompts_per_iteration": prompts, "batch_size": size}
            changed = config.model_copy(update={"sampling": sampling.model_copy(update=changes)})
            if _speedup(changed, num_processes) == num_processes and not any(changed.problems()):
                new = {key: value for key, value in changes.items() if value != getattr(sampling, key)}
                return " ".join(f"sampling.{key}={value}" for key, value in new.items())
    return f"sampling.prompts_per_iteration={more}"


def even(config: Config) -> Iterator[int]:
    """The numbers of processes that have equal work, ascending."""
    for count in range(1, most_processes(config) + 1):
        if _speedup(config, count) == count:
            yield count


def most_processes(config: Config) -> int:
    """How many of them (or of their groups) can have a micro-batch in every optimiser step, however small it is."""
    return min(map(len, config.trainer.cut(config, config.sampling.images_per_iteration)))


def _speedup(config: Config, num_processes: int) -> float:
    """Samples (or trees) of an iteration over those of the process that has most of them, step by step."""
    steps = config.trainer.cut(config, num_processes)
    return sum(map(sum, steps)) / sum(math.ceil(len(step) / num_processes) * max(step) for step in steps)


def _unit(config: Config) -> str:
    context = config.distributed.context
    return "processes" if context == 1 else f"groups of {context} processes"
