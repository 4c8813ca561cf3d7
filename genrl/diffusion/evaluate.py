"""Evaluation: held-out prompts, fixed noise, the pipeline's own deterministic solver, the training scorers; and what is
shown of samples.

Looks are what becomes of held-out pictures whatever their rewards say, at no model call: a collapsing model moves far
from where it began, and makes one picture of a prompt from every noise, or confetti. A sheet shows pictures as decoded,
beside those that the pipeline is given, with their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional

from genrl.data.prompts import Prompt
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import Rollouts, Worker, batch_inputs, call_arguments, to_bytes
from genrl.diffusion.rollout.scoring import Scored, Scorers, score
from genrl.mdp.noise import turns
from genrl.runtime.folder.metrics import MetricLogger
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.running import TrainingRun
from genrl.runtime.show import pictures
from genrl.runtime.show.sheet import SHOWN as ON_SHEET
from genrl.runtime.show.sheet import ContactSheet, Look, score_text
from genrl_rewards import compose
from genrl_rewards.calls import inner
from genrl_rewards.rows import read_as

SHOWN = 16
"""Prompts in the picture grids of a run."""


@dataclass(frozen=True)
class Evaluated:
    """Scores of every prompt, and the pictures of a few."""

    scored: Scored
    total: Tensor
    """Weighted sum, float64 [N]."""
    prompts: list[str]
    """As they were drawn."""
    shown: list[int]
    """The rows that have a picture in `images`, ascending."""
    images: list[Tensor]
    """Of the rows `shown`: float32 in [0, 1], [3, H, W] (video [F, 3, H, W]); on every process."""
    thumbnails: Tensor
    """Of every row (`thumbnails_of`)."""
    looks: dict[str, float]
    """Metrics of the pictures that no reward has."""

    @property
    def metrics(self) -> dict[str, float]:
        scored = self.total[~self.total.isnan()]
        row: dict[str, float] = {"eval/total_mean": float(scored.mean())}
        row["eval/total_se"] = float(scored.std(correction=0)) / max(1, len(scored)) ** 0.5
        for label, values in self.scored.values.items():
            scores = values[~values.isnan()]
            row[f"eval/{label}_mean"] = float(scores.mean())
            row[f"eval/{label}_std"] = float(scores.std(correction=0))
            row[f"eval/{label}_failed"] = float(len(values) - len(scores))
        return row | self.looks | {f"eval/{name}_mean": float(v.nanmean()) for name, v in self.scored.parts.items()}


@torch.no_grad()
def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    scorers: Scorers,
    sampling: Mapping[str, Any],
    *,
    batch_size: int,
    seed: int,
    num_pictures: int = SHOWN,
    inputs: Mapping[str, str] = MappingProxyType({}),
    texts: Sequence[str] | None = None,
    worker: Worker = Worker(),
) -> Evaluated:
    """Draw one picture per prompt from noise that depends on (seed, row) alone, and score it.

    sampling: arguments of the pipeline call; inputs: those that are pictures of the prompt's row, with their columns.
    texts: what is drawn in place of the prompts; scores are by the prompts all the same.
    The pictures of `num_pictures` prompts are kept (see `spread`). All processes return the same scores.
    """
    pieces: list[tuple[list[int], Tensor]] = []
    statistics: list[tuple[int, Tensor, float]] = []
    batches = turns(_batches(prompts, batch_size), worker.process, worker.num_processes)
    for number, (rows, counts) in enumerate(batches):
        batch = Batch(
            [prompts[r].text if texts is None else texts[r] for r in rows],
            [("evaluation", seed, r) for r in rows],
            # One size for all: `_batches` puts pictures of different sizes into different calls.
            {**sampling, **prompts[rows[0]].size},
            inputs=batch_inputs(inputs, [prompts[r] for r in rows]),
        )
        images = policy.decode(batch, policy.generate(batch)).cpu()
        # Processes with fewer batches repeat one, so that collective calls of a sharded model match; it is not counted.
        if counts and worker.scores(number):
            pieces.append((rows, images))
            statistics += zip(rows, thumbnails_of(images), high_frequencies(images).tolist(), strict=True)
        worker.advance(len(rows) * worker.num_processes)
    groups = same_prompt(prompts)
    scored = score(scorers, pieces, prompts, groups, worker.beat)
    total = compose.evaluate(scored.values, scorers.components)
    numbers = spread(num_pictures, len(prompts))
    pictures = [(r, image) for rows, images in pieces for r, image in zip(rows, images, strict=True) if r in numbers]
    # Bytes in between: a quarter of the traffic, and what a PNG holds.
    gathered = dict(gather_object([(r, to_bytes(image)) for r, image in pictures]))
    captions = [p.text for p in prompts] if texts is None else list(texts)
    _, small, frequencies = zip(*sorted(gather_object(statistics), key=itemgetter(0)), strict=True)
    thumbnails = torch.stack(small)
    figures = look_figures(thumbnails, torch.tensor(frequencies), groups)
    return Evaluated(
        scored,
        total,
        captions,
        numbers,
        [gathered[r].float() / 255 for r in numbers],
        thumbnails,
        figures,
    )


def _batches(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """The rows in batches, each of one size of picture, in the order of the file within it."""
    of_size: dict[object, list[int]] = {}
    for row, prompt in enumerate(prompts):
        of_size.setdefault(prompt.bucket, []).append(row)
    return [rows[first : first + size] for rows in of_size.values() for first in range(0, len(rows), size)]


def same_prompt(prompts: Sequence[Prompt]) -> list[int]:
    """Group of each row, for rewards that compare: the first row that is the same one of the prompt file."""
    first: dict[tuple[str, int], int] = {}
    return [first.setdefault((prompt.text, prompt.line), row) for row, prompt in enumerate(prompts)]


def spread(count: int, length: int) -> list[int]:
    """`count` of the rows 0 to `length` - 1 (all where there are no more), evenly: k * length // count.

    Prompt files are often sorted, from easy to hard: the first rows would show another task than the scores are of.
    """
    count = min(count, length)
    return [k * length // count for k in range(count)]


def evaluation_arguments(config: Config) -> dict[str, Any]:
    """Arguments of the pipeline call in evaluation that are not those of the rollouts."""
    settings = config.evaluation
    named = {name: getattr(settings, name) for name in ("num_inference_steps", "guidance_scale", "height", "width")}
    if settings.num_inference_steps is not None:
        named["num_inference_steps"] = config.sampling.scheduled(settings.num_inference_steps)
    return {name: value for name, value in named.items() if value is not None}


def evaluate_held_out(
    config: Config,
    policy: Policy,
    prompts: Sequence[Prompt],
    scorers: Scorers,
    worker: Worker,
    *,
    texts: Sequence[str] | None = None,
) -> Evaluated:
    """`evaluate` as the configuration of a run says."""
    settings = config.evaluation
    return evaluate(
        policy,
        prompts,
        scorers,
        call_arguments(config.sampling) | evaluation_arguments(config),
        batch_size=settings.batch_size or config.sampling.batch_size,
        seed=settings.seed,
        inputs=config.sampling.inputs,
        texts=texts,
        worker=worker,
    )


def show(evaluated: Evaluated, folder: Path, log: MetricLogger, iteration: int, name: str = "samples/grid") -> None:
    """The pictures of an evaluation in `folder` and as a grid, each with its scores; all scores as trackers' table."""
    labels = list(evaluated.scored.values)
    columns = zip(*(evaluated.scored.values[label].tolist() for label in labels), strict=True)
    rows = [[prompt, *values] for prompt, values in zip(evaluated.prompts, columns, strict=True)]
    log.log_table(iteration, f"{name}_rewards", ["prompt", *labels], rows)
    if not evaluated.images:
        return
    scores = {label: values[evaluated.shown].tolist() for label, values in evaluated.scored.values.items()}
    prompts = [evaluated.prompts[row] for row in evaluated.shown]
    grid = pictures.save_samples(folder, iteration, evaluated.images, prompts, scores)
    log.log_picture(iteration, name, grid)


def draw_best_and_worst(rollouts: Rollouts, run: Run, log: MetricLogger, iteration: int) -> None:
    """Best and worst sample of the groups that this process drew (its own pictures only)."""
    slots = [s for m in rollouts.mine.values() for s in m.slots]
    picture = pictures.best_and_worst(
        [image.float() / 255 for m in rollouts.mine.values() for image in m.images],
        [float(rollouts.total[s]) for s in slots],
        [int(rollouts.group[s]) for s in slots],
        [rollouts.prompts[s] for s in slots],
    )
    if picture is not None:
        pictures.save_png(picture, run.samples / f"step-{iteration:06d}-best-worst.png")
        log.log_picture(iteration, "samples/best_worst", picture)


SIDE = 8


class Before:
    """The thumbnails of the evaluation before training, uint8 [N, D]; empty until then. Part of every checkpoint."""

    thumbnails: Tensor = torch.zeros(0, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"thumbnails": self.thumbnails}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.thumbnails = state["thumbnails"]


def thumbnails_of(images: Tensor) -> Tensor:
    """Small copies of pictures [B, 3, H, W] (videos [B, F, 3, H, W]: their mean over time) in [0, 1]: uint8 [B, 3 *
    SIDE * SIDE]."""
    still = images.mean(1) if images.dim() == 5 else images
    return (functional.adaptive_avg_pool2d(still.float(), SIDE) * 255).round().to(torch.uint8).flatten(1)


def high_frequencies(images: Tensor) -> Tensor:
    """Root of the mean squared difference of a number from the mean of its 3 x 3 neighbours, of pictures or videos as
    in `thumbnails_of`: [B]."""
    frames = images.flatten(0, -4).float()
    detail = frames - functional.avg_pool2d(functional.pad(frames, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return detail.square().reshape(len(images), -1).mean(1).sqrt()


def look_figures(seen: Tensor, frequencies: Tensor, groups: Sequence[int]) -> dict[str, float]:
    """Metrics of thumbnails [N, D] and high frequencies [N]; diversity where prompts have several pictures."""
    row, whose = {"eval/high_frequencies": float(frequencies.mean())}, torch.tensor(groups)
    spreads = [
        (seen[whose == group].float() / 255).var(0).mean().sqrt()
        for group, count in zip(*whose.unique(return_counts=True), strict=True)
        if count > 1
    ]
    return row | ({"eval/diversity": float(torch.stack(spreads).mean())} if spreads else {})


def moved_from(seen: Tensor, before: Tensor) -> float:
    """Root mean squared difference of two evaluations' thumbnails, of the same prompts and noise."""
    return float((seen.float() / 255 - before.float() / 255).square().mean().sqrt())


class HeldOut:
    """What a run measures on its held-out prompts."""

    def __init__(self, run: TrainingRun[Config], prompts: Sequence[Prompt], scorers: Scorers) -> None:
        self.run, self.prompts, self.scorers = run, prompts, scorers
        self.before = Before()
        """What was shown before training."""
        self.rewrite: Callable[[Sequence[Prompt]], list[str]] | None = None
        """Where prompts are rewritten: their new texts. Both are rendered."""

    def evaluated(self, iteration: int, worker: Worker) -> dict[str, float]:
        """Metrics of the prompts, from fixed noise, of which worker draws its share; empty without prompts."""
        run, prompts = self.run, self.prompts
        if not prompts:
            return {}
        run.loop.phase("evaluating", len(prompts) * (1 if self.rewrite is None else 2))
        # Evaluations are due at other times after a resume with another `every`; the counts of training are not to
        # depend on it.
        with run.policy.uncounted():
            held_out = partial(evaluate_held_out, run.config, run.policy, prompts, self.scorers, worker)
            judged = held_out()
            rewritten = None if self.rewrite is None else held_out(texts=self.rewrite(prompts))
        metrics, inputs = judged.metrics, run.config.sampling.inputs
        run.note_sheet(lambda: of_evaluated(self.scorers, judged, prompts, inputs))
        if iteration == 0:
            self.before.thumbnails = judged.thumbnails
        # A run that was begun without has none to compare with, and a resumed one may evaluate fewer or more prompts.
        if len(self.before.thumbnails) == len(judged.thumbnails):
            metrics["eval/moved"] = moved_from(judged.thumbnails, self.before.thumbnails)
        if rewritten is not None:
            figures = {key: value for key, value in rewritten.metrics.items() if key not in rewritten.looks}
            metrics |= {f"eval_rewritten/{key.removeprefix('eval/')}": value for key, value in figures.items()}
        if run.is_main:
            samples, log = run.process.run.samples, run.process.log
            show(judged, samples, log, iteration)
            if rewritten is not None:
                show(rewritten, samples / "rewritten", log, iteration, name="samples/rewritten")
        return metrics


def look(
    scorers: Scorers, scored: Scored, slot: int, row: Prompt, text: str, image: Tensor, inputs: Mapping[str, Any]
) -> Look:
    """One sample: its number among the scores, its row, the text that it was drawn from, and what it was given."""
    facts = {f"reward {label}": score_text(float(values[slot])) for label, values in scored.values.items()}
    facts |= {label: score_text(float(values[slot])) for label, values in scored.parts.items()}
    for label, reward in scorers.rewards.items():
        if read := read_as(inner(reward), {**row.columns, "prompts": row.text}):
            facts[f"{label} expects"] = read
    if text != row.text:
        facts["drawn from"] = text
    facts |= {f"column {name}": f"{value!r:.200}" for name, value in row.columns.items()}
    inputs_shown = [(f"given as {name}", picture) for name, picture in inputs.items()]
    return Look(row.text, facts, [*inputs_shown, ("drawn, as rewards see it", image)])


def of_rollouts(scorers: Scorers, rollouts: Rollouts, rows: Sequence[Prompt]) -> ContactSheet:
    """The sheet of this process's first sample of each of the first prompts. rows: a prompt each group."""
    slots = {
        slot: (micro_batch, k) for micro_batch in rollouts.mine.values() for k, slot in enumerate(micro_batch.slots)
    }
    # Backwards, so that the first sample of a group is the one that stays.
    first = {int(rollouts.group[slot]): slot for slot in sorted(slots, reverse=True)}
    looks = []
    for group, slot in sorted(first.items())[:ON_SHEET]:
        micro_batch, k = slots[slot]
        inputs = {name: each[k] for name, each in micro_batch.batch.inputs.items()}
        image = micro_batch.images[k].float() / 255
        looks.append(look(scorers, rollouts.scored, slot, rows[group], micro_batch.batch.prompts[k], image, inputs))
    return ContactSheet(looks)


def of_evaluated(
    scorers: Scorers, evaluated: Evaluated, rows: Sequence[Prompt], inputs: Mapping[str, str]
) -> ContactSheet:
    """The sheet of the first shown samples of an evaluation of these rows. inputs: as of `batch_inputs`."""
    numbers = evaluated.shown[:ON_SHEET]
    given = batch_inputs(inputs, [rows[k] for k in numbers])
    looks = []
    for place, (k, image) in enumerate(zip(numbers, evaluated.images, strict=False)):
        pictures = {name: each[place] for name, each in given.items()}
        looks.append(look(scorers, evaluated.scored, k, rows[k], evaluated.prompts[k], image, pictures))
    return ContactSheet(looks)


def of_training_prompts(config: Config, policy: Policy, prompts: Sequence[Prompt], scorers: Scorers) -> ContactSheet:
    """The sheet of training prompts, drawn for it by the pipeline's own solver with the arguments of training."""
    rows = [prompts[number] for number in spread(ON_SHEET, len(prompts))]
    size, inputs = min(ON_SHEET, config.sampling.batch_size), config.sampling.inputs
    sampling = call_arguments(config.sampling)
    judged = evaluate(policy, rows, scorers, sampling, batch_size=size, seed=config.seed, inputs=inputs)
    return of_evaluated(scorers, judged, rows, inputs)
