"""Evaluation: held-out prompts, fixed noise, the pipeline's own deterministic solver, the training scorers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.data.prompts import Prompt
from genrl.diffusion import looks
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import Rollouts, Worker, batch_inputs, call_arguments, to_bytes
from genrl.diffusion.rollout.scoring import Scored, Scorers, score
from genrl.mdp.batches import turns
from genrl.runtime.folder.metrics import MetricLogger
from genrl.runtime.folder.run import Run
from genrl.runtime.show import pictures
from genrl_rewards import compose

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
    """Of every row (`looks`)."""
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
            statistics += zip(rows, looks.thumbnails(images), looks.high_frequencies(images).tolist(), strict=True)
        worker.advance(len(rows) * worker.num_processes)
    groups = same_prompt(prompts)
    scored = score(scorers, pieces, prompts, groups, worker.beat)
    total = compose.evaluate(scored.values, scorers.components)
    numbers = spread(num_pictures, len(prompts))
    pictures = [(r, image) for rows, images in pieces for r, image in zip(rows, images, strict=True) if r in numbers]
    gathered = dict(gather_object([(r, to_bytes(image)) for r, image in pictures]))
    drawn_texts = [p.text for p in prompts] if texts is None else list(texts)
    _, small, frequencies = zip(*sorted(gather_object(statistics), key=itemgetter(0)), strict=True)
    thumbnails = torch.stack(small)
    figures = looks.figures(thumbnails, torch.tensor(frequencies), groups)
    return Evaluated(
        # Bytes in between: a quarter of the traffic, and what a PNG holds.
        scored,
        total,
        drawn_texts,
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


def show(found: Evaluated, folder: Path, log: MetricLogger, iteration: int, name: str = "samples/grid") -> None:
    """The pictures of an evaluation in `folder` and as a grid, each with its scores; all scores as trackers' table."""
    labels = list(found.scored.values)
    columns = zip(*(found.scored.values[label].tolist() for label in labels), strict=True)
    rows = [[prompt, *values] for prompt, values in zip(found.prompts, columns, strict=True)]
    log.log_table(iteration, f"{name}_rewards", ["prompt", *labels], rows)
    if not found.images:
        return
    scores = {label: values[found.shown].tolist() for label, values in found.scored.values.items()}
    prompts = [found.prompts[row] for row in found.shown]
    grid = pictures.save_samples(folder, iteration, found.images, prompts, scores)
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
