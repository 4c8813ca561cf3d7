"""The rewards of a run: opened as the configuration says, asked for scores, gathered from all processes.

Pointwise rewards score each micro-batch where it was drawn; the others get whole groups, which are shared out to the
processes, each to one that has most of it. Micro-batches are scored in the order in which they were drawn, each by all
rewards in their order, whether in the background or not; but a reward of which there are several copies, on servers or
Ray actors, is asked about as many at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

import genrl_rewards
from genrl.data.prompts import Prompt
from genrl.diffusion.config.schema import Config
from genrl.diffusion.rollout.ray_rewards import FarReward, RewardPool, opened_for
from genrl_rewards.background import Background
from genrl_rewards.calls import inner
from genrl_rewards.compose import Component, Gate
from genrl_rewards.contract import ChecksRows, Movable
from genrl_rewards.rows import survey
from genrl_rewards.service.isolation import Isolated
from genrl_rewards.service.remote import Remote

logger = logging.getLogger(__name__)

SlotScores = tuple[str, list[int], genrl_rewards.Scores]  # label, slots, their scores
Pictures = TypeVar("Pictures")


def check_rows(scorers: Mapping[str, genrl_rewards.Reward], rows: Sequence[Prompt], source: str) -> None:
    """Raise ValueError where a reward needs a column that some row lacks, or cannot read its columns in a row."""
    if not rows:
        return
    columns = sorted(set().union(*(row.columns for row in rows)))
    for label, reward in scorers.items():
        genrl_rewards.check_columns(reward, columns, name=label)
        needed, itself = set(genrl_rewards.needs(reward).columns), inner(reward)
        for row in rows:
            if lacking := needed - row.columns.keys():
                text = f"reward {label!r} asks for the column {min(lacking)!r}, which this row lacks"
                raise ValueError(f"{source}:{row.line}: {text}")
        if isinstance(itself, ChecksRows):
            for row in rows:
                genrl_rewards.check_row(itself, row.columns, row=f"{source}:{row.line}: reward {label!r}")
        named = ((f"{source}:{row.line}", {**row.columns, "prompts": row.text}) for row in rows)
        if read := survey(label, itself, named):
            read.tell(logger)


@dataclass(frozen=True)
class Scored:
    """Scores of N samples by reward label, gathered from all processes and ordered by slot."""

    values: dict[str, Tensor]
    """Label -> float64 [N]; NaN = no score."""
    parts: dict[str, Tensor]
    """`label/part` -> float64 [N]."""
    broken: int = 0
    """Samples whose pictures are not finite: they have no score, whatever a reward makes of them."""


@dataclass(frozen=True)
class Scorers:
    """The rewards of a run, by label."""

    rewards: dict[str, genrl_rewards.Reward]
    components: dict[str, Component]
    """How each enters the total."""
    offloaded: dict[str, str] = field(default_factory=dict)
    """Labels of those whose models are off their device between scorings, and that device."""
    alone: dict[str, Lock] = field(default_factory=dict)
    """Labels of those that serve one thread at a time; any number may ask a server."""
    copies: dict[str, int] = field(default_factory=dict)
    """Labels of those that are held several times, elsewhere, and how often: so many calls run at a time."""
    pool: RewardPool | None = None
    """Who holds those on Ray actors."""

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Context in which every model is on its device."""
        try:
            for label, device in self.offloaded.items():
                genrl_rewards.move(self.rewards[label], device)
            yield
        finally:
            for label in self.offloaded:
                genrl_rewards.move(self.rewards[label], "cpu")

    def close(self) -> None:
        """End the processes that were started for rewards."""
        for reward in self.rewards.values():
            genrl_rewards.close(reward)


def plain(opened: Mapping[str, genrl_rewards.Reward]) -> Scorers:
    """Rewards that are added up as they are."""
    return Scorers(dict(opened), {label: Component() for label in opened})


def open_scorers(
    config: Config, device: str, stopped: Callable[[], bool] = lambda: False, pool: RewardPool | None = None
) -> Scorers:
    """Load, start or connect to every reward of the configuration; `device` is the run's, `stopped` whether it is to
    end and waits for no server any more. pool: who holds those that no server has; None = this process.

    Raises ValueError as `genrl_rewards.placing.open_reward`, and where a model is to be moved that cannot be.
    """
    opened: dict[str, genrl_rewards.Reward] = {}
    offloaded: dict[str, str] = {}
    alone: dict[str, Lock] = {}
    copies: dict[str, int] = {}
    # Where a later reward is refused, those that were opened before it must not leave their processes behind.
    with ExitStack() as undo:
        for index, (label, settings) in enumerate(zip(config.reward_labels, config.rewards, strict=True)):
            where = str(settings.args.get("device", device))
            if pool is not None and settings.remote is None:
                opened[label], copies[label] = FarReward(pool, label), len(pool.seats)
                continue
            reward = opened_for(settings, device, stopped)
            undo.callback(genrl_rewards.close, reward)
            opened[label] = reward
            server = inner(reward)
            # A model in this process or in its own child answers one thread at a time, and so does a cache; servers
            # queue themselves.
            if not isinstance(server, Remote) or isinstance(server, Isolated) or settings.cache:
                alone[label] = Lock()
            elif len(server.servers) > 1:
                copies[label] = len(server.servers)
            if settings.offload:
                if not isinstance(inner(reward), Movable):
                    raise ValueError(
                        f"rewards.{index}.offload: {settings.name!r} has no method to(device), by which its model "
                        "would be moved; leave offload out"
                    )
                offloaded[label] = where
                genrl_rewards.move(reward, "cpu")
        undo.pop_all()
    return Scorers(opened, components(config), offloaded, alone, copies, pool)


def components(config: Config) -> dict[str, Component]:
    """How each reward of the configuration enters the total."""
    by_label: dict[str, Component] = {}
    for label, settings in zip(config.reward_labels, config.rewards, strict=True):
        gate = Gate(**settings.gate.model_dump()) if settings.gate is not None else None
        by_label[label] = Component(settings.weight, settings.schedule, settings.normalize, gate)
    return by_label


class Scoring:
    """The scoring of one iteration, or of one evaluation, while its samples are drawn.

        with Scoring(scorers, rows, group, background=True) as scoring:
            for ...:
                scoring.add(slots, images)
            scored = scoring.result()

    rows and group: prompt row and group of every slot [N], the same in all processes. `beat` is called, in this thread,
    after each micro-batch and each group. With the background off, everything is scored in `result`.
    """

    def __init__(
        self,
        scorers: Scorers,
        rows: Sequence[Prompt],
        group: Sequence[int],
        *,
        background: bool = False,
        beat: Callable[[], None] = lambda: None,
    ):
        self.rows, self.group, self.beat = rows, group, beat
        self.scorers = scorers
        kinds = {label: genrl_rewards.needs(reward).kind for label, reward in scorers.rewards.items()}
        single = {k: reward for k, reward in scorers.rewards.items() if kinds[k] == "pointwise"}
        self._single = {k: reward for k, reward in single.items() if k not in scorers.copies}
        self._spread = {k: reward for k, reward in single.items() if k in scorers.copies}
        self._grouped = {k: reward for k, reward in scorers.rewards.items() if kinds[k] != "pointwise"}
        self._background = background
        self._worker: Background[list[SlotScores]] = Background(background)
        self._queues: dict[str, Background[list[SlotScores]]] = {
            label: Background(True, count) for label, count in scorers.copies.items()
        }
        self._pieces: list[tuple[list[int], Tensor]] = []
        self._broken: list[int] = []
        self._short: torch.OutOfMemoryError | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Scoring:
        if self._background:
            self._stack.enter_context(self.scorers.placed())
        self._stack.enter_context(self._worker)  # left first: no model is moved away from under it
        for queue in self._queues.values():
            self._stack.enter_context(queue)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, slots: list[int], images: Tensor) -> None:
        """A micro-batch of this process: its slots, and its pictures, float [B, 3, H, W] or [B, F, 3, H, W]."""
        # A picture that is not finite has no score, whatever a reward makes of it.
        self._broken += [s for s, image in zip(slots, images, strict=True) if not image.isfinite().all()]
        if self._background:
            self._worker.submit(partial(self._ask, self._single, slots, images))
            self._queue(self._ask, self._spread, slots, images)
        if not self._background or self._grouped:
            self._pieces.append((slots, images))

    def result(self) -> Scored:
        """The scores of all processes. A collective.

        Raises RewardFailed in all processes together where a reward raised for too many samples, or says itself that
        the run is to stop; and torch.OutOfMemoryError in all of them where one had no memory left.
        """
        scores_here: list[SlotScores] = []
        with ExitStack() as stack:
            with self._until_all_are_there():
                if self._background:
                    scores_here = [item for items in self._worker.results(self.beat) for item in items]
                else:
                    stack.enter_context(self.scorers.placed())
                    for slots, images in self._pieces:
                        self._queue(self._ask, self._spread, slots, images)
                    for slots, images in self._pieces:
                        scores_here += self._ask(self._single, slots, images)
                        self.beat()
                scores_here += self._answers()
            scores_here += self._of_groups()
        everything = gather_object([(self._short is not None, scores_here, self._broken)])
        if any(short for short, _, _ in everything):
            raise self._short or torch.OutOfMemoryError("memory ran out while another process scored")
        scores = [item for _, items, _ in everything for item in items]
        broken = {slot for _, _, slots in everything for slot in slots}
        if len(broken) == len(self.rows):  # before a reward is blamed for what it could not score
            raise RuntimeError(not_finite(len(broken), len(self.rows)))
        if broken:
            logger.warning(not_finite(len(broken), len(self.rows)))
        return replace(_gathered(list(self.scorers.rewards), scores, broken, len(self.rows)), broken=len(broken))

    @contextmanager
    def _until_all_are_there(self) -> Iterator[None]:
        """Memory that runs out here is kept until all processes hear of it together."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._short = error

    def _of_groups(self) -> list[SlotScores]:
        """The rewards that look at whole groups, which the processes share."""
        if not self._grouped:
            return []
        here = {k: reward for k, reward in self._grouped.items() if k not in self.scorers.copies}
        copied = {k: reward for k, reward in self._grouped.items() if k in self.scorers.copies}
        groups, pictures = self._whole_groups()
        scores: list[SlotScores] = []
        with self._until_all_are_there():
            for slots in groups:
                self._queue(self._ask_group, copied, slots, pictures)
            for slots in groups if here else ():
                scores += self._ask_group(here, slots, pictures)
                self.beat()
            scores += self._answers()
        return scores

    def _whole_groups(self) -> tuple[list[list[int]], dict[int, Tensor]]:
        """Slots of the groups that this process scores, and their pictures. A collective."""
        rank = PartialState().process_index
        pictures = {slot: image for slots, images in self._pieces for slot, image in zip(slots, images, strict=True)}
        holders = {slot: process for process, slots in enumerate(gather_object([list(pictures)])) for slot in slots}
        members: dict[int, list[int]] = {}
        for slot in sorted(holders):
            members.setdefault(self.group[slot], []).append(slot)
        scored_by = shared_out({group: [holders[s] for s in slots] for group, slots in members.items()})
        for process in sorted(set(scored_by.values())):
            missing = [s for s, holder in holders.items() if scored_by[self.group[s]] == process != holder]
            if missing:
                pictures |= gathered_on(process, {slot: pictures[slot] for slot in missing if holders[slot] == rank})
        return [slots for group, slots in sorted(members.items()) if scored_by[group] == rank], pictures

    def _queue(
        self,
        ask: Callable[[Mapping[str, genrl_rewards.Reward], list[int], Pictures], list[SlotScores]],
        scorers: Mapping[str, genrl_rewards.Reward],
        slots: list[int],
        images: Pictures,
    ) -> None:
        """Ask rewards of which there are several copies, each when one of its copies is free."""
        for label, reward in scorers.items():
            self._queues[label].submit(partial(ask, {label: reward}, slots, images))

    def _answers(self) -> list[SlotScores]:
        """Answers to all that `_queue` asked. Each call has its own limit: while one lasts, this process is alive."""
        queues = self._queues.values()
        return [item for queue in queues for items in queue.results(self.beat, self.beat) for item in items]

    def _ask(self, scorers: Mapping[str, genrl_rewards.Reward], slots: list[int], images: Tensor) -> list[SlotScores]:
        results: list[SlotScores] = []
        for label, reward in scorers.items():
            columns = {c: [self.rows[s].columns[c] for s in slots] for c in genrl_rewards.needs(reward).columns}
            with self.scorers.alone.get(label, nullcontext()):
                scores = genrl_rewards.score(
                    reward,
                    images=images,
                    prompts=[self.rows[s].text for s in slots],
                    columns=columns,
                    group=[self.group[s] for s in slots],
                    name=label,
                )
            results.append((label, slots, scores))
        return results

    def _ask_group(
        self, scorers: Mapping[str, genrl_rewards.Reward], slots: list[int], pictures: Mapping[int, Tensor]
    ) -> list[SlotScores]:
        # Stacked only now: the pictures of all groups would be in memory twice.
        return self._ask(scorers, slots, torch.stack([pictures[slot] for slot in slots]))


def shared_out(holders: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Group -> the process that scores it: one that holds most of its pictures, but none has more than its share.

    holders: group -> the processes of its pictures.
    """
    processes = PartialState().num_processes
    # No process scores more than its share, or all would wait for the one that holds most.
    room = dict.fromkeys(range(processes), -(-len(holders) // processes))
    scored_by: dict[int, int] = {}
    for group, of_pictures in sorted(holders.items()):
        chosen = max((p for p in room if room[p]), key=lambda p: (of_pictures.count(p), room[p]))
        scored_by[group] = chosen
        room[chosen] -= 1
    return scored_by


def gathered_on(process: int, mine: dict[int, Tensor]) -> dict[int, Tensor]:
    """The entries of all processes, on this one; nothing on the others. A collective."""
    state = PartialState()
    parts: list[Any] | None = [None] * state.num_processes if state.process_index == process else None
    # To the one that scores them alone: pictures of all on all processes would multiply the memory by their number.
    torch.distributed.gather_object(mine, parts, dst=process)
    return {slot: image for part in parts or () for slot, image in part.items()}


def score(
    scorers: Scorers,
    pieces: Sequence[tuple[list[int], Tensor]],
    rows: Sequence[Prompt],
    group: Sequence[int],
    beat: Callable[[], None] = lambda: None,
) -> Scored:
    """The scores of all processes for their pieces (slots, images); arguments and errors as of `Scoring`."""
    with Scoring(scorers, rows, group, beat=beat) as scoring:
        for slots, images in pieces:
            scoring.add(slots, images)
        return scoring.result()


def not_finite(broken: int, count: int, pipe: Any = None) -> str:
    """What pictures that are not finite mean: no reward's fault. pipe: where it is at hand, to name its VAE."""
    vae = getattr(pipe, "vae", None)
    named = "the VAE" if vae is None else f"the VAE ({type(vae).__name__}, {str(vae.dtype).removeprefix('torch.')})"
    return (
        f"{broken} of {count} pictures hold numbers that are not finite, so they have no score and would be black: "
        f"{named} overflows in half precision (write model.dtype: bfloat16 or float32; --dtype), or the weights have "
        "diverged"
    )


def _gathered(labels: Sequence[str], results: Sequence[SlotScores], without: Collection[int], count: int) -> Scored:
    """Scores of `count` samples, by label; those of the slots `without` one are NaN."""
    values = {label: torch.full((count,), math.nan, dtype=torch.float64) for label in labels}
    parts: dict[str, Tensor] = {}
    failures: dict[str, list[genrl_rewards.Failure]] = {label: [] for label in labels}
    for label, slots, scores in results:
        values[label][slots] = torch.tensor(scores.values, dtype=torch.float64)
        values[label][[slot for slot in slots if slot in without]] = math.nan
        failures[label] += scores.failures
        for part, numbers in scores.parts.items():
            column = parts.setdefault(f"{label}/{part}", torch.full((count,), math.nan, dtype=torch.float64))
            column[slots] = torch.tensor(numbers, dtype=torch.float64)
    for label, of_label in failures.items():
        failed = sum(failure.samples for failure in of_label)
        genrl_rewards.check_failures(label, failed, count, genrl_rewards.first_failure(of_label))
    return Scored(values, parts)


def score_metrics(scored: Scored, total: Tensor) -> dict[str, float]:
    """Means and spreads of an iteration's scores, over the samples that have one."""
    metrics = {"reward/total_mean": _mean(total), "reward/total_std": _std(total)}
    for label, values in scored.values.items():
        metrics[f"reward/{label}_mean"] = _mean(values)
        metrics[f"reward/{label}_std"] = _std(values)
        metrics[f"reward/{label}_failed"] = float(values.isnan().sum())
    return metrics | {f"reward/{name}_mean": _mean(values) for name, values in scored.parts.items()}


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _std(values: Tensor) -> float:
    scores = values[~values.isnan()]
    return float(scores.std(correction=0)) if len(scores) else math.nan
