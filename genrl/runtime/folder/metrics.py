"""What a run measures: the catalogue of metrics, and the logger that writes them.

Every logged key has an entry in the `catalogue`, with its formula and how to read it: `docs/metrics.md`.
What all runs and those of pipelines share is here, what those of another kind share in its `config.metrics`, and what a
method logs beside it in its settings (`Method.metrics`).
`<name>` stands for the name of a reward (`shapes`) or of a part of it (`shapes/count`).
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from genrl.config import RunConfig
from genrl.config.method import KINDS, Kind, MetricDoc, built_in, headings, methods_of, metrics_of
from genrl.runtime.folder import trackers
from genrl.runtime.folder.run import Run, json_line

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)


_REWARDS = {
    "reward/<name>_mean": MetricDoc(
        "mean of reward `<name>` over the iteration's samples that got a score",
        "The curve to watch. It is noisy, because prompts differ from one iteration to the next; "
        "`eval/<name>_mean` is the fair comparison.",
        "the reward's own",
    ),
    "reward/<name>_std": MetricDoc(
        "standard deviation of reward `<name>` over the iteration's samples that got a score",
        "Falls as the policy becomes surer. Near zero early in a run: the reward hardly distinguishes the samples.",
        "the reward's own",
    ),
    "reward/<name>_failed": MetricDoc(
        "number of the iteration's samples without a score (NaN or None) from reward `<name>`",
        "0, unless the reward answers None where it does not apply. They take no part in statistics or updates, and "
        "never count as zero; where the reward raises, the log says why.",
        "samples",
    ),
    "reward/total_mean": MetricDoc(
        "mean over samples of sum_i weight_i * reward_i; rewards of weight 0 are left out",
        "What training raises. If it rises while a reward of weight 0 falls, the policy is exploiting the reward.",
        "weighted sum",
    ),
    "reward/total_std": MetricDoc(
        "standard deviation of the weighted sum over the iteration's samples",
        "Spread between prompts and within groups together; `group_std_mean` has the second part alone.",
        "weighted sum",
    ),
}

_USED = {
    "used/<name>_mean": MetricDoc(
        "mean of weight * normalised(gated(reward `<name>`)); only for rewards that are not simply added",
        "What the reward put into the total. 0 by definition where it is normalised in groups.",
        "weighted",
    ),
    "used/<name>_std": MetricDoc(
        "standard deviation of weight * normalised(gated(reward `<name>`)); only for rewards that are not simply added",
        "Which reward decides: the one with the largest spread, whatever its weight.",
        "weighted",
    ),
    "used/<name>_weight": MetricDoc(
        "weight * schedule(iteration); only for rewards with a schedule",
        "Where the schedule is.",
    ),
    "used/<name>_gated": MetricDoc(
        "samples whose gate was closed / samples; only for rewards with a gate",
        "Near 1: the gate leaves nothing of the reward, lower `at_least`. Near 0: it does nothing.",
        "share",
    ),
}

_ADVANTAGES = {
    "zero_std_ratio": MetricDoc(
        "groups whose scored samples all have the same total reward / all groups",
        "Such groups give no update. Near 1: prompts too easy or too hard, groups too small, or too little "
        "sampling noise.",
        "share 0..1",
    ),
    "group_std_mean": MetricDoc(
        "mean over groups of the standard deviation of the total reward inside the group",
        "The learning signal. If it shrinks to 0 while the reward is low, raise the noise level or the group size.",
        "weighted sum",
    ),
    "advantage/abs_mean": MetricDoc(
        "mean of |advantage| over the samples that are trained on, after clipping",
        "About 0.8 for normalised, unclipped advantages. Far lower: many groups without spread.",
    ),
    "advantage/clipped": MetricDoc(
        "share of samples whose advantage was cut at +-advantage_clip",
        "Should stay small; a large share means a few outliers dominate the standard deviation.",
        "share 0..1",
    ),
}

_UPDATE = {
    "loss": MetricDoc(
        "mean over samples and trained steps (DiffusionNFT: noise levels) of the training loss, penalties included",
        "In policy-gradient training its level says little: it starts near 0 and need not fall.",
    ),
    "kl": MetricDoc(
        "mean of the configured KL estimate between the policy and the reference (adapter off), before its weight",
        "Distance from the starting model. Slow growth is normal; a sudden jump comes before broken images: lower "
        "the learning rate or raise kl_weight.",
        "nats, or as `trainer.kl` says",
    ),
    "grad_norm": MetricDoc(
        "L2 norm of the averaged gradient over all trainable parameters, before clipping to max_grad_norm; "
        "mean over the iteration's updates",
        "Spikes come before divergence. Constantly above max_grad_norm: every step has the same, clipped length.",
    ),
    "lr": MetricDoc("learning rate of the iteration's last update", "The schedule, as it was applied."),
    "rounding/applied": MetricDoc(
        "of weights in half precision, in the last step: share of the difference to their float32 copies that reached "
        "them; the rest waits in the copies",
        "Noisy, and small at small learning rates. Nothing is lost: it is made up for as the copies move on.",
        "share",
    ),
    "updates": MetricDoc("optimiser steps of this iteration that moved weights", "0: no group had spread.", "steps"),
}

_EVALUATION = {
    "eval/<name>_mean": MetricDoc(
        "mean of reward `<name>` over the held-out prompts: fixed prompts, fixed noise, deterministic sampler",
        "The figure to report. The row of step 0 is the model before training.",
        "the reward's own",
    ),
    "eval/<name>_std": MetricDoc(
        "standard deviation of reward `<name>` over the held-out prompts",
        "Divide by the square root of the number of prompts for the standard error of the mean.",
        "the reward's own",
    ),
    "eval/<name>_failed": MetricDoc(
        "number of held-out samples without a score", "As `reward/<name>_failed`.", "samples"
    ),
    "eval/total_mean": MetricDoc("mean of the weighted sum over the held-out prompts", "As `eval/<name>_mean`."),
    "eval/total_se": MetricDoc(
        "standard error of `eval/total_mean`: standard deviation over the samples / sqrt(their number)",
        "Two evaluations that differ by less than one of it, times sqrt(2), do not differ.",
    ),
    "eval/moved": MetricDoc(
        "root mean squared difference of held-out pictures, reduced to 8 x 8, from those before training, same noise",
        "How far the model has gone. Where it rises ever faster, or beside a reward that falls, the model is breaking.",
        "of 1 = white",
    ),
    "eval/high_frequencies": MetricDoc(
        "root mean squared difference of a pixel from the mean of its 3 x 3 neighbours, mean over held-out pictures",
        "Confetti and noise raise it, blur lowers it: twice its first value, look at the pictures.",
        "of 1 = white",
    ),
    "eval/diversity": MetricDoc(
        "standard deviation over a prompt's held-out pictures (`evaluation.group_size`), reduced to 8 x 8; mean",
        "Falls to 0 where every noise gives the same picture.",
        "of 1 = white",
    ),
    "eval/below_best": MetricDoc(
        "best evaluation so far - this one, of the figure that judges the run: total, success, accuracy or loss, or "
        "that of `evaluation.monitor`; a best is better than the one before by more than noise",
        "Above three standard errors (or the monitor's tolerance) twice in a row: `evaluation.on_collapse` acts.",
        "the reward's own",
    ),
}

_COLLAPSE = {
    "collapse/<name>": MetricDoc(
        "of a held-out figure (total, success, a monitor's): how far below its best; of loss, grad_norm, kl: the "
        "value that left its history; back, stopped: the iteration that the run went back to, or that was its best",
        "The run collapses. Only where it is noticed; console, live page and report say what helps.",
    ),
}

_TIMING_READING = "Where an iteration's time goes. Measured on the main process; phases do not overlap."
_COST = {
    "timing/sample_s": MetricDoc("wall time of the rollouts, without decoding", _TIMING_READING, "s", False),
    "timing/decode_s": MetricDoc("wall time of decoding latents to pixels", _TIMING_READING, "s", False),
    "timing/score_s": MetricDoc("wall time of all rewards", _TIMING_READING, "s", False),
    "timing/train_s": MetricDoc("wall time of replay, backward passes and updates", _TIMING_READING, "s", False),
    "timing/eval_s": MetricDoc("wall time of the evaluation", _TIMING_READING, "s", False),
    "timing/iteration_s": MetricDoc(
        "wall time of the iteration; evaluation and saving come on top", _TIMING_READING, "s", False
    ),
    "images_per_s": MetricDoc(
        "samples of the iteration, all processes / timing/iteration_s",
        "Training throughput. Divide by the number of processes to compare machines.",
        "images/s",
        False,
    ),
    "model_calls/sample": MetricDoc(
        "denoiser forward passes while sampling, summed over samples; a guided step counts 2",
        "The cost which does not depend on the machine: compare algorithms by it.",
        "calls x samples",
    ),
    "model_calls/train": MetricDoc(
        "denoiser forward passes while training, those of the reference and the old policy included, summed over "
        "samples; a guided step counts 2",
        "As `model_calls/sample`; one with a backward pass costs about three of those.",
        "calls x samples",
    ),
    "memory/peak_mb": MetricDoc(
        "peak memory of the process so far: torch's allocated peak on the accelerator, the resident peak "
        "on CPU; maximum over processes",
        "Grows on after the first few iterations: a leak.",
        "MiB",
        False,
    ),
}


_WORKERS = {
    "timing/push_s": MetricDoc(
        "wall time of handing the trained weights to rollout workers",
        "With LoRA next to nothing. `timing/sample_s` is then the time waited until all samples were there, decoded.",
        "s",
        False,
    ),
    "workers/idle": MetricDoc(
        "1 - seconds that rollout workers drew / (workers * seconds of the iteration, from the end of the one before); "
        "of the main process's workers",
        "Without `sampling.staleness` they wait while the model is trained. Else large: more workers than are needed.",
        "share",
        False,
    ),
    "workers/lost": MetricDoc(
        "rollout and reward workers that died or hung and were replaced, since the run was started or resumed; of the "
        "main process's workers",
        "Samples and scores are the same; it only took longer.",
        "workers",
        False,
    ),
}

_OLDER = {
    "staleness": MetricDoc(
        "iterations by which the weights that drew this one were behind",
        "`sampling.staleness` (`generation.staleness`, `environment.staleness`), but for the first iterations.",
        "iterations",
    ),
    "importance/mean": MetricDoc(
        "mean of w = exp(log-prob before the first update - log-prob when sampled) over samples and trained steps, "
        "tokens of the answers, or ratios of the rollout; 0 where it is above 5, and min(w, 1) of policies in "
        "simulation. Policy gradients only. Of answers with the level and limits of `engine_mismatch`, also where the "
        "engine has the present weights",
        "About 1. Far from it, samples are too old for the learning rate. Of log-probabilities that are means over D "
        "numbers (or tokens: GSPO) it is a D-th root, so small deviations say much.",
    ),
    "importance/left_out": MetricDoc(
        "share of these whose w was above 5, or outside of the limits of `engine_mismatch`: 0, not learned from. Not "
        "of policies in simulation",
        "Above 0: samples are too old, or the engine computes too differently.",
        "share 0..1",
    ),
    "importance/max_abs_dev": MetricDoc("max of |w - 1| over these", "As `importance/mean`."),
}

_FIRST: dict[str, dict[str, MetricDoc]] = {
    "Rewards": _REWARDS,
    "Rewards as used": _USED,
    "Evaluation": _EVALUATION,
    "Collapse": _COLLAPSE,
    "Groups and advantages": _ADVANTAGES,
    "Update": _UPDATE,
}
_LAST: dict[str, dict[str, MetricDoc]] = {
    "Time, memory and cost": _COST,
    "Rollout workers": _WORKERS,
    "Samples of earlier weights": _OLDER,
}
_SHARED = {key: doc for section in (*_FIRST.values(), *_LAST.values()) for key, doc in section.items()}
_OF_KINDS = {"vla": "genrl.vla.config.metrics", "vlm": "genrl.vlm.config.metrics"}
"""Who says what all runs of a kind log; named by a string, since nothing in `runtime` imports a kind."""

_NAME = r"[\w.-]+(/[\w.-]+( [\w.-]+)*)?"  # reward, or reward/part; as `genrl_rewards.contract` allows part names


def _of_kind(kind: Kind) -> dict[str, dict[str, MetricDoc]]:
    """What all runs of a kind log, by heading."""
    sections: dict[str, dict[str, MetricDoc]] = import_module(_OF_KINDS[kind]).SECTIONS if kind in _OF_KINDS else {}
    return sections


def logged_by(config: RunConfig) -> dict[str, MetricDoc]:
    """What runs of the kind and the methods of a configuration log beside what all runs do."""
    of_kind = {key: doc for section in _of_kind(config.kind).values() for key, doc in section.items()}
    return of_kind | {name: doc for method in methods_of(config) for name, doc in metrics_of(type(method)).items()}


@cache
def by_heading() -> dict[str, dict[str, MetricDoc]]:
    """What every run of every built-in method logs, by heading. It imports the settings of all methods, which no run
    needs: a run documents what it logs by `logged_by`."""
    by_title: dict[str, dict[str, MetricDoc]] = {title: dict(entries) for title, entries in _FIRST.items()}
    for kind in KINDS:
        parts: list[Mapping[str, Mapping[str, MetricDoc]]] = [_of_kind(kind)]
        for part in parts + [headings(method) for method in built_in(kind).values()]:
            for title, entries in part.items():
                by_title.setdefault(title, {}).update(entries)
    return by_title | _LAST


@cache
def catalogue() -> dict[str, MetricDoc]:
    """Catalogue of all metrics, by key."""
    return {key: doc for section in by_heading().values() for key, doc in section.items()}


def document(key: str, own: Mapping[str, MetricDoc] | None = None) -> MetricDoc:
    """The entry of a logged key, among those of a run (`own`: `logged_by`) or in the catalogue. Raises ValueError where
    there is none."""
    entry = None if own is None else _entry(key, {**own, **_SHARED})
    if entry is None:
        entry = _entry(key, catalogue())
    if entry is not None:
        return entry
    raise ValueError(
        f"metric {key!r} has no entry in genrl.runtime.folder.metrics, nor in the method's `metrics`: add its formula "
        "and how to read it"
    )


def _entry(key: str, entries: Mapping[str, MetricDoc]) -> MetricDoc | None:
    if key in entries:
        return entries[key]
    return next((doc for name, doc in entries.items() if "<name>" in name and _pattern(name).fullmatch(key)), None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_NAME.join(map(re.escape, name.split("<name>"))))


class MetricLogger:
    """Writes one row per iteration to metrics.jsonl and to accelerate's trackers. Only where `enabled`."""

    def __init__(
        self,
        run: Run,
        names: Sequence[str] = (),
        *,
        config: Mapping[str, object] | None = None,
        resumed_from: int = 0,
        enabled: bool = True,
        own: Mapping[str, MetricDoc] | None = None,
    ) -> None:
        """names: of trackers known to accelerate. config: shown by trackers that show one. enabled: main process. own:
        what the run's method logs beside the catalogue."""
        trackers.check_trackers(names)
        self.own = own
        self.run = run
        self.enabled = enabled
        self.begun = False
        self.trackers = [trackers.start(name, run, config, resumed_from) for name in names] if enabled else []

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """The row of `step` finished iterations (0: before training). NaN, infinity and None are written as null.

        Raises ValueError for a key without documentation.
        """
        row: dict[str, float | None] = {"step": step}
        for key, value in values.items():
            document(key, self.own)
            row[key] = value if value is not None and math.isfinite(value) else None
        if not self.enabled:
            return
        if self.begun and not self.run.metrics.is_file():
            logger.warning(
                "%s was removed while the run was going: the rows before %d are lost", self.run.metrics, step
            )
        self.begun = True
        self.run.folder.mkdir(parents=True, exist_ok=True)
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json_line(row))
            file.flush()
            # Rows are what is left of a run whose machine goes down: they are on the disk before the next iteration
            # begins.
            os.fsync(file.fileno())
        numbers = {key: value for key, value in row.items() if value is not None and key != "step"}
        for tracker in self.trackers:
            tracker.log(numbers, step=step)

    def log_picture(self, step: int, name: str, picture: Image) -> None:
        """Hand a picture to the trackers that take some; the files in samples/ are written by `pictures`."""
        for tracker in self.trackers:
            trackers.log_picture(tracker, step, name, picture)

    def log_video(self, step: int, name: str, file: Path) -> None:
        """A film in a file (gif), to the trackers that take films."""
        for tracker in self.trackers:
            trackers.log_video(tracker, step, name, file)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[trackers.Row]) -> None:
        """Rows of texts and numbers (NaN is empty), to the trackers that take tables."""
        clean = [[None if isinstance(cell, float) and math.isnan(cell) else cell for cell in row] for row in rows]
        for tracker in self.trackers:
            trackers.log_table(tracker, step, name, columns, clean)

    def finish(self) -> None:
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []


def markdown() -> str:
    """The page docs/metrics.md. Write it by `python -m genrl.runtime.folder.metrics > docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "This page explains every key of `metrics.jsonl` and of the trackers, and is made from",
        "`genrl/runtime/folder/metrics.py`. One row is written per iteration; `step` is the number of finished",
        "iterations; the row of step 0 is the model before training.",
        "`<name>` is the name of a reward, or `reward/part` for a part of one. A value that is not finite is `null`.",
        "Metrics marked * differ from run to run; all others are equal, byte for byte, in two runs with one seed",
        "on one machine.",
    ]
    lines += ["", "| `trainer.algorithm` | logs, beside what all runs of its kind do |", "| --- | --- |"]
    for name, method in chain.from_iterable(built_in(kind).items() for kind in KINDS):
        titles = ", ".join(f"[{title}](#{_anchor(title)})" for title in headings(method)) or "-"
        lines.append(f"| `{name}` | {titles} |")
    for title, section in by_heading().items():
        lines += ["", f"## {title}", "", "| key | formula | unit | how to read it |", "| --- | --- | --- | --- |"]
        for key, doc in section.items():
            cells = [f"`{key}`" + ("" if doc.reproducible else " *"), doc.formula, doc.unit or "-", doc.reading]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    """The link to a heading."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    print(markdown(), end="")
