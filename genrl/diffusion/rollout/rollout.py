"""One iteration's samples: which prompts, from which noise, drawn by whom, and how they are scored.

Slot s of an iteration is sample `s % group_size` of its prompt `s // group_size`. Slots (of trees: those of the roots)
are cut into micro-batches of `batch_size` in slot order and the micro-batches are shuffled, both by (seed, iteration)
alone; position p of the shuffled list belongs to process `p % num_processes`. So prompts, noise and the samples of an
optimiser step are the same for any number of processes. Pictures are, too, to the bit, where all processes have equal
work by these micro-batches; else a step's are cut anew (`shared_out`), and other shapes round differently. Replay sees
the very batches that were recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from PIL import Image
from torch import Tensor

import genrl_rewards
from genrl.data.prompts import Prompt
from genrl.data.rows import input_problem
from genrl.diffusion.config.schema import Config, shared_out
from genrl.diffusion.config.sections import Sampling
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, NoiseKey
from genrl.diffusion.rollout.forest import Draw, Piece, Samples
from genrl.diffusion.rollout.scoring import Scored, Scoring
from genrl.mdp.noise import bucketed_indices, generator, prompt_indices
from genrl.objectives.credit import max_variance
from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.process import Process
from genrl_rewards import compose
from genrl_rewards.compose import Running
from genrl_rewards.contract import nearest


@dataclass(frozen=True)
class Worker:
    """One of the processes that share the samples of a run, and what it tells the run of its work."""

    process: int = 0
    num_processes: int = 1
    member: int = 0
    """Which one it is of the processes that draw each sample together."""
    members: int = 1
    """How many these are."""
    advance: Callable[[int], None] = lambda images: None
    """So many samples are finished, by all processes together; all of them call it as often."""
    beat: Callable[[], None] = lambda: None
    """Something was done."""
    timed: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
    """Context in which this phase runs."""
    fitting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which memory may run out; it may leave then."""

    @classmethod
    def of(cls, process: Process, loop: Loop, advance: Callable[[int], None]) -> Self:
        """This process of a run."""
        place = (process.replica, process.replicas, process.member, process.context)
        return cls(*place, advance, loop.alive, loop.timed, loop.fitting)

    def scores(self, number: int) -> bool:
        """Whether it hands on the micro-batch of this number, of those that it drew: members take turns."""
        return number % self.members == self.member


@dataclass(frozen=True)
class MicroBatch:
    """Samples drawn together by one process."""

    slots: list[int]
    batch: Batch
    final: Tensor
    """Final states, float32 [B, ...]."""
    sigmas: Tensor
    """The full schedule, float32 [T + 1] (diffusion: timesteps [T])."""
    pieces: list[Piece]
    """The recorded segments that led to them."""
    images: Tensor
    """uint8 on the CPU: [B, 3, H, W], or [B, F, 3, H, W]. For pictures of the run; rewards had them as floats."""

    def of(self, slots: Collection[int]) -> MicroBatch:
        """The samples at these slots, of independent ones; pieces without an action have nothing to train."""
        rows = [row for row, slot in enumerate(self.slots) if slot in slots]
        pieces = [piece.of(slots) for piece in self.pieces if piece.slots]
        some = [self.slots[r] for r in rows]
        return MicroBatch(some, self.batch.take(rows), self.final[rows], self.sigmas, pieces, self.images[rows])


@dataclass(frozen=True)
class Rollouts:
    """The samples of one iteration that this process drew, and the scores of all of them."""

    mine: dict[int, MicroBatch]
    """Position in the shuffled list -> micro-batch."""
    slots: list[list[int]]
    """Slots of the samples at each position."""
    bounds: list[int]
    """Positions where optimiser steps begin, and the end."""
    prompts: list[str]
    """Prompt of every slot [N]."""
    group: Tensor
    """Prompt slot of every sample, int64 [N]."""
    scored: Scored
    total: Tensor
    """What is trained on: the weighted sum of the rewards, gated and normalised, float64 [N]; NaN = no score."""
    used: dict[str, float] = field(default_factory=dict)
    """Metrics of the scores as they entered the total."""
    running: dict[str, Running] = field(default_factory=dict)
    """Statistics of the scores so far, this iteration's included."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Label -> what of each reward entered the total, before its weight, float64 [N]."""
    weights: dict[str, float] = field(default_factory=dict)
    """Label -> weight in this iteration."""

    @property
    def num_samples(self) -> int:
        return len(self.prompts)

    @property
    def sample_elements(self) -> int:
        """Numbers in one sample's state; 1 where this process drew none."""
        return next((m.final[0].numel() for m in self.mine.values()), 1)

    def updates(self) -> Iterator[tuple[list[MicroBatch], list[int]]]:
        """The optimiser steps of the iteration: (this process's micro-batches, slots of all processes')."""
        for first, last in pairwise(self.bounds):
            yield (
                [self.mine[p] for p in range(first, last) if p in self.mine],
                [slot for slots in self.slots[first:last] for slot in slots],
            )


def downsampled(rollouts: Rollouts, keep: int) -> Rollouts:
    """The samples of each group that are trained on, where these are not all (PODS, arXiv 2504.13818). The totals of
    the others are NaN, so that advantages are of the kept ones among themselves. Every micro-batch holds whole groups
    of independent samples."""
    groups = int(rollouts.group.max()) + 1
    # The subset with the largest spread of rewards carries the most gradient per sample (PODS); groups lie slot by
    # slot.
    selected = max_variance(rollouts.total.view(groups, -1), keep).flatten()
    slots = set(selected.nonzero()[:, 0].tolist())
    return replace(
        rollouts,
        mine={position: micro_batch.of(slots) for position, micro_batch in rollouts.mine.items()},
        total=torch.where(selected, rollouts.total, math.nan),
        parts={label: torch.where(selected, values, math.nan) for label, values in rollouts.parts.items()},
        slots=[[slot for slot in some if slot in slots] for some in rollouts.slots],
    )


def call_arguments(sampling: Sampling) -> dict[str, Any]:
    """Arguments of the pipeline call; what is null is left to the pipeline."""
    named = {
        name: getattr(sampling, name)
        for name in ("num_inference_steps", "guidance_scale", "height", "width", "num_frames")
    }
    named["num_inference_steps"] = sampling.scheduled(sampling.num_inference_steps)
    return {name: value for name, value in named.items() if value is not None} | dict(sampling.pipeline_args)


def batch_arguments(sampling: Sampling, rows: Sequence[Prompt]) -> dict[str, Any]:
    """Arguments of the pipeline call for these prompts, which are of one size."""
    assert all(row.size == rows[0].size for row in rows), "a micro-batch is of one size"
    return call_arguments(sampling) | dict(rows[0].size)


def batch_inputs(columns: Mapping[str, str], rows: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The pictures that the pipeline is given with these prompts: argument of its call -> PIL pictures, RGB.

    columns: argument -> column that names the file.
    """
    return {argument: [_picture(row.columns[column]) for row in rows] for argument, column in columns.items()}


# All samples of a group are given the same picture.
@lru_cache(maxsize=256)
def _picture(path: str) -> Image.Image:
    return genrl_rewards.open_picture(path)


def check_inputs(columns: Mapping[str, str], rows: Sequence[Prompt], source: str) -> None:
    """Raise ValueError where a prompt names no picture, or one that is not there, with its line."""
    for argument, column in columns.items():
        for row in rows:
            if problem := input_problem(column, row.columns):
                hint = "" if column in row.columns else nearest(column, row.columns)
                raise ValueError(f"sampling.inputs.{argument}: {source}:{row.line} {problem}.{hint}")


def iteration_rows(config: Config, prompts: Sequence[Prompt], iteration: int) -> list[int]:
    """Numbers of the prompts of an iteration, one for each group of samples, in slot order."""
    sampling, key = config.sampling, {"seed": config.seed, "iteration": iteration}
    count = sampling.prompts_per_iteration
    if sampling.buckets:
        return bucketed_indices([row.bucket for row in prompts], count, sampling.prompts_together, **key)
    return prompt_indices(len(prompts), count, **key)


def micro_batches(
    config: Config, roots: Sequence[int], iteration: int, num_processes: int, *, trees: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Slots of the roots of each micro-batch, in the order of training, and where optimiser steps begin, and the end.
    Which roots a step has depends on seed and iteration alone."""
    size, updates = config.sampling.batch_size, config.trainer.updates
    together = 1 if trees else size
    # Cut in slot order: the samples of a prompt share a micro-batch, and so one encoding of it.
    pieces = [list(roots[s : s + together]) for s in range(0, len(roots), together)]
    # Whole micro-batches are shuffled, never samples: which ones are run together decides their bits.
    order = torch.randperm(len(pieces), generator=generator(config.seed, "micro-batches", iteration)).tolist()
    plan: list[list[int]] = []
    bounds = [0]
    # Each step is cut by itself: a micro-batch that lay across two would be stepped on twice.
    for first, last in pairwise(len(pieces) * k // updates for k in range(updates + 1)):
        step = [pieces[k] for k in order[first:last]]
        slots = sorted(slot for piece in step for slot in piece)
        if trees:
            step = [slots[s : s + size] for s in range(0, len(slots), size)]
        sizes = [len(piece) for piece in step]
        shares = shared_out(sizes, num_processes, 1 if trees else config.undivided)
        plan += step if shares == sizes else [some.tolist() for some in torch.tensor(slots).split(shares)]
        bounds.append(len(plan))
    return plan, bounds


@dataclass(frozen=True)
class Sheet:
    """An iteration before anything is drawn: what seed, iteration and the number of processes say."""

    iteration: int
    leaves: int
    """Samples of each root, at its own slot and the next ones."""
    rows: list[Prompt]
    """The prompt of every slot [N]."""
    group: Tensor
    """Prompt slot of every slot, int64 [N]."""
    plan: list[list[int]]
    """Slots of the roots of each micro-batch, in the order of training."""
    bounds: list[int]
    """Positions in the plan where optimiser steps begin, and the end."""

    @classmethod
    def of(
        cls, config: Config, prompts: Sequence[Prompt], iteration: int, *, leaves: int = 1, num_processes: int = 1
    ) -> Self:
        """leaves: more than 1 = the roots are of trees. num_processes: which share it out."""
        size = config.sampling.group_size
        rows = [prompts[row] for row in iteration_rows(config, prompts, iteration) for _ in range(size)]
        group = torch.arange(len(rows)) // size
        roots = range(0, len(rows), leaves)
        return cls(
            iteration, leaves, rows, group, *micro_batches(config, roots, iteration, num_processes, trees=leaves > 1)
        )

    def batch(self, config: Config, slots: Sequence[int]) -> Batch:
        """What the roots at these slots are drawn from."""
        sampling, rows = config.sampling, [self.rows[s] for s in slots]
        same: list[NoiseKey] = [(config.seed, self.iteration, "group", int(self.group[s])) for s in slots]
        return Batch(
            prompts=[row.text for row in rows],
            keys=[(config.seed, self.iteration, s) for s in slots],
            sampling=batch_arguments(sampling, rows),
            initial_keys=same if sampling.same_initial_noise else None,
            inputs=batch_inputs(sampling.inputs, rows),
        )


class Job(NamedTuple):
    """A micro-batch that is to be drawn."""

    position: int
    """In the plan of its iteration."""
    slots: list[int]
    batch: Batch


class Finished(NamedTuple):
    """A micro-batch that was drawn."""

    samples: Samples
    images: Tensor
    """Float on the CPU, [B, 3, H, W] or [B, F, 3, H, W]."""


Finishing = Iterator[tuple[int, Finished]]
"""Micro-batches by their positions, in the order of the jobs, as whoever draws them finishes them."""


def jobs_of(config: Config, sheet: Sheet, worker: Worker) -> Iterator[Job]:
    """What this process has to draw."""
    # Dealt like cards, so that the micro-batches of each update go to all processes.
    for position in range(worker.process, len(sheet.plan), worker.num_processes):
        slots = sheet.plan[position]
        yield Job(position, slots, sheet.batch(config, slots))


@torch.no_grad()
def finish(policy: Policy, samples: Samples, size: int) -> Finished:
    """Add the pictures of the final states, decoded `size` at a time."""
    # A decoder takes more memory for a picture than the steps that led to it.
    rows = _chunks(len(samples.slots), size)
    images = [policy.decode(samples.batch.take(some), samples.final[some]).cpu() for some in rows]
    return Finished(samples, torch.cat(images))


def draw_here(
    jobs: Iterable[Job],
    policy: Policy,
    draw: Draw,
    worker: Worker,
    size: int,
    *,
    under: Callable[[], AbstractContextManager[None]],
    beat: Callable[[], None],
) -> Finishing:
    """Micro-batches that this process draws one after the other, and decodes `size` pictures at a time. under: context
    with the weights that draw; beat: is called while a micro-batch is drawn."""
    for job in jobs:
        with torch.no_grad(), worker.fitting():
            with worker.timed("sample"), under():
                samples = draw(policy, job.batch, job.slots, beat=beat)
            with worker.timed("decode"):
                finished = finish(policy, samples, size)
        yield job.position, finished


def handed_on(finishing: Finishing, scoring: Scoring, worker: Worker) -> Iterator[tuple[int, MicroBatch]]:
    """What this process draws, by position, each on its way to the rewards while the next one is drawn."""
    for number, (position, (samples, images)) in enumerate(finishing, start=1):
        if worker.scores(number):
            scoring.add(samples.slots, images)
        yield (
            position,
            MicroBatch(samples.slots, samples.batch, samples.final, samples.sigmas, samples.pieces, to_bytes(images)),
        )


def gathered(
    sheet: Sheet,
    arrivals: Iterable[tuple[int, MicroBatch]],
    scoring: Scoring,
    worker: Worker,
    *,
    running: Mapping[str, Running],
) -> Rollouts:
    """The iteration, once all of it is drawn and scored, in all processes."""
    micro_batches: dict[int, MicroBatch] = {}
    for position, micro_batch in arrivals:
        micro_batches[position] = micro_batch
        # Processes draw in lockstep, one micro-batch each: the others have just finished as many.
        worker.advance(len(micro_batch.slots) * worker.num_processes)
    if len(micro_batches) < -(-len(sheet.plan) // worker.num_processes):
        worker.advance(0)  # another process has one more: meet it where the end is agreed
    with worker.timed("score"), worker.fitting():
        scored = scoring.result()
    components = scoring.scorers.components
    combined = compose.combine(scored.values, components, sheet.group, iteration=sheet.iteration, running=running)
    return Rollouts(
        mine=micro_batches,
        slots=[[leaf for slot in slots for leaf in range(slot, slot + sheet.leaves)] for slots in sheet.plan],
        bounds=sheet.bounds,
        prompts=[row.text for row in sheet.rows],
        group=sheet.group,
        scored=scored,
        total=combined.total,
        used=compose.metrics(combined, components),
        running=combined.running,
        parts=combined.values,
        weights=combined.weights,
    )


def _chunks(count: int, size: int) -> list[list[int]]:
    return [list(range(first, min(first + size, count))) for first in range(0, count, size)]


def to_bytes(image: Tensor) -> Tensor:
    """Floats in [0, 1] as uint8; what is not a number is black."""
    # Clamped before the cast: out of range, a float becomes any byte, and another one on each device.
    return (image.nan_to_num() * 255).round().clamp(0, 255).to(torch.uint8)
