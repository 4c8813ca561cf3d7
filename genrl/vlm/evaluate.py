"""The most probable answers to held-out questions: how many of them are right, and two models' side by side (`genrl
compare` of models that answer with pictures, shapes or sounds)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.config import load
from genrl.config.method import module_of
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.running import of_all
from genrl.runtime.show.compare.page import Media, Page, Pair, as_wav, check_pairs, check_size, encode
from genrl.runtime.show.compare.statistics import wilson
from genrl.runtime.show.pictures import save_samples
from genrl.runtime.show.sheet import SHOWN, ContactSheet, Look, score_text
from genrl.runtime.weights.devices import default_device
from genrl.vlm.common import VLMRun
from genrl.vlm.config.schema import VLMConfig, columns_of
from genrl.vlm.engines.generation import answering
from genrl.vlm.policies.contract import Sampled, SequencePolicy
from genrl.vlm.policies.folder import gathered, load_trained, open_policy
from genrl.vlm.policies.pictures import black, with_pictures
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import open_image, without_clips
from genrl.vlm.rollout.data import Questions, held_out_loss
from genrl.vlm.rollout.rollout import check_failed, failures_of, is_right, open_rewards, sample, score, text_of
from genrl.vlm.tasks import Row
from genrl_rewards.contract import Reward
from genrl_rewards.failures import Failure
from genrl_rewards.rows import read_as

TOGETHER = 64
"""Questions answered side by side."""
SAVED = 32
"""Answers of an evaluation that are written into samples/."""


@dataclass(frozen=True)
class Judged:
    """N questions: their names, texts of the answers, and scores by reward (NaN = none), in their order; failures: by
    the label of a reward that raised."""

    names: list[str]
    texts: list[str]
    scores: dict[str, list[float]]
    failures: dict[str, tuple[Failure, ...]] = field(default_factory=dict)

    def joined(self, other: Judged) -> Judged:
        """Both, one after the other."""
        scores = {label: values + other.scores[label] for label, values in self.scores.items()}
        failures = failures_of([self.failures, other.failures])
        return Judged(self.names + other.names, self.texts + other.texts, scores, failures)


class Shown:
    """What an evaluation shows: its first pictures (of a shape its six views, the last step's), or sounds as .wav."""

    def __init__(self, number: int = 16) -> None:
        self.number = number
        self.images: list[Tensor] = []
        self.sounds: dict[str, bytes] = {}

    def add(self, sampled: Sampled) -> None:
        images = sampled.made.get("images", torch.zeros(0))
        if images.dim() == 6:  # [B, steps, 6, 3, H, W] -> [B, 3, H, 6 W]
            images = torch.cat(images[:, -1].unbind(1), -1)
        self.images += list(images[: self.number - len(self.images)])
        for sound in sampled.made.get("audio", [])[: self.number - len(self.sounds)]:
            self.sounds[f"{len(self.sounds):02d}"] = as_wav(sound, sampled.made["rate"][0])


def shows_pictures(questions: Questions) -> bool:
    """Whether there is anything to make black."""
    return any(not isinstance(part, str) for part in questions[0].prompt.pieces)


def in_the_dark(rows: Sequence[Row]) -> list[Row]:
    """Questions about black pictures of the same size."""
    return [replace(row, prompt=with_pictures(row.prompt, black, np.random.default_rng(0))) for row in rows]


def judge(
    policy: Policy,
    config: VLMConfig,
    opened: Mapping[str, Reward],
    questions: Questions,
    numbers: Sequence[int],
    *,
    shown: Shown | None = None,
    blind: bool = False,
    advance: Callable[[int], None] = lambda answers: None,
) -> Judged:
    """One answer to each of these questions: the most probable one, or (`SequencePolicy.greedy`) a sample at the
    temperature of training, from a noise that depends on the prompt alone. blind: with black pictures."""
    judged = Judged([], [], {label: [] for label in opened})
    greedy, key = (policy.greedy, ("evaluation",)) if isinstance(policy, SequencePolicy) else (True, ())
    temperature = 0.0 if greedy else config.generation.temperature
    for start in range(0, len(numbers), TOGETHER):
        rows = [questions[number] for number in numbers[start : start + TOGETHER]]
        if blind:
            rows = in_the_dark(rows)
        prompts = [policy.encode(row.prompt) for row in rows]
        sampled = sample(policy, config, prompts, 1, temperature, [(*key, row.name) for row in rows])
        if shown is not None:
            shown.add(sampled)
        scores = score(config, opened, rows, sampled, list(range(len(rows))))
        values = {label: scores[label].values for label in opened}
        failures = {label: scored.failures for label, scored in scores.items() if scored.failures}
        names = [row.name if greedy else text_of(row) for row in rows]
        judged = judged.joined(Judged(names, sampled.texts, values, failures))
        advance(len(rows))
    return judged


def figures(config: VLMConfig, judged: Judged) -> dict[str, float]:
    """Metrics of an evaluation: accuracy with its 95 % interval, means of the rewards, and of their weighted sum.

    Right is an answer whose first reward is at least `evaluation.right_at`; without a score it is not right. Raises
    RewardFailed as `rollout.check_failed`.
    """
    check_failed(config, judged.failures, len(judged.names))
    first = torch.tensor(judged.scores[config.reward_labels[0]], dtype=torch.float64)
    right = int(is_right(config, first).sum())
    low, high = wilson(right, len(first))
    row: dict[str, Any] = {
        "eval/accuracy_mean": right / len(first),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
    }
    total = np.zeros(len(first))
    for label, reward in zip(config.reward_labels, config.rewards, strict=True):
        values = np.array(judged.scores[label])
        scored = values[~np.isnan(values)]
        row[f"eval/{label}_mean"] = float(scored.mean()) if len(scored) else float("nan")
        row[f"eval/{label}_failed"] = float(len(values) - len(scored))
        # An answer without a score counts as 0 here, so that a reward which fails does not raise the mean.
        total += reward.weight * np.nan_to_num(values)
    row["eval/total_mean"], row["eval/total_se"] = float(total.mean()), float(total.std()) / len(total) ** 0.5
    return row


def held_out(
    policy: Policy, config: VLMConfig, begin: Callable[[int], None], advance: Callable[[int], None]
) -> tuple[dict[str, float], int]:
    """Metrics of a model on its held-out questions, also with black pictures where the configuration asks for it, and
    how many questions they are. begin: told how many answers there will be; advance: how many more there are. Raises
    ValueError without rewards."""
    if not config.rewards:
        raise ValueError("rewards: there are none to judge answers by; the run's metrics.jsonl has what it measured")
    questions, opened = Questions(config, "eval"), open_rewards(config)
    blind = config.evaluation.blind and shows_pictures(questions) and not isinstance(policy, SequencePolicy)
    numbers = range(len(questions))
    begin(len(questions) * (1 + blind))
    scores = figures(config, judge(policy, config, opened, questions, numbers, advance=advance))
    if blind:
        unseen = judge(policy, config, opened, questions, numbers, blind=True, advance=advance)
        scores["eval/accuracy_blind"] = figures(config, unseen)["eval/accuracy_mean"]
    return scores, len(questions)


def save_answers(process: Process, judged: Judged, shown: Shown, iteration: int) -> None:
    """The first answers of an evaluation, in samples/."""
    samples = process.run.samples
    lines = [
        json.dumps({"question": name, "answer": text, **{label: v[k] for label, v in judged.scores.items()}})
        for k, (name, text) in enumerate(zip(judged.names[:SAVED], judged.texts, strict=False))
    ]
    samples.mkdir(parents=True, exist_ok=True)
    for name, sound in shown.sounds.items():
        write_atomic(samples / f"step-{iteration:06d}-{name}.wav", sound)
    if shown.images:
        number = len(shown.images)
        scores = {label: values[:number] for label, values in judged.scores.items()}
        sheet = save_samples(samples, iteration, shown.images, judged.names[:number], scores)
        process.log.log_picture(iteration, "samples/grid", sheet)
    write_atomic(samples / f"step-{iteration:06d}.jsonl", "\n".join(lines) + "\n")
    rows = list(zip(judged.names, judged.texts, *judged.scores.values(), strict=True))
    process.log.log_table(iteration, "samples/answers", ["question", "answer", *judged.scores], rows)


class HeldOut:
    """What a run measures on its held-out questions. alone: a context in which nothing else is drawn."""

    def __init__(
        self, run: VLMRun, opened: Mapping[str, Reward], alone: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.run, self.opened, self.alone = run, opened, alone
        self.questions: Questions | None = None
        """Read when they are first needed."""
        self.shown = Shown()
        """What the last evaluation made that is no text."""

    def evaluated(self, iteration: int) -> dict[str, float]:
        """The most probable answers; at the ends of the run with black pictures, too."""
        config: VLMConfig = self.run.loop.config
        row = self._target_loss(config, iteration)
        if config.rewards:
            row |= self._judged(config, iteration)
        if evaluate := getattr(module_of(config.trainer), "evaluate", None):  # the method's own
            row |= evaluate(self.run)
        return row

    def look(self, config: VLMConfig, questions: Questions) -> ContactSheet:
        """The first of these questions, answered as in evaluations, and scored."""
        numbers = questions.asked(0, 0, min(SHOWN, len(questions)))
        self.shown = Shown()
        if config.trainer.learns_from == "data":
            config = config.model_copy(update={"rewards": ()})
        opened = self.opened if config.rewards else {}
        with answering(self.run.policy):
            judged = judge(self.run.policy, config, opened, questions, numbers, shown=self.shown)
        rows = [questions.row(number) for number in numbers]
        return sheet_of(opened, rows, judged.texts, judged.scores, self.shown.images)

    def _target_loss(self, whole: VLMConfig, iteration: int) -> dict[str, float]:
        """The loss on the held-out questions' answers by the last of the stages so far, or else the first, that teaches
        any; empty without one, and where these questions lack its columns."""
        number, methods = whole.at(max(0, iteration - 1))[0], [part.trainer for part in whole.parts]
        taught = [None if method.learns_from != "data" else method.demonstrations for method in methods]
        targets = [target for _, target in filter(None, (*reversed(taught[: number + 1]), *taught))]
        questions = self._questions(whole)
        if not targets or not set(columns_of(targets[0])) <= questions[0].columns.keys():
            return {}
        loop, policy = self.run.loop, self.run.policy
        numbers = self.run.process.share(len(questions))
        loop.phase("evaluating", len(numbers))
        with gathered(policy):
            local = held_out_loss(policy, questions, numbers, targets[0], loop.advance_or_leave)
        total, squares, tokens = (sum(part) for part in zip(*gather_object([local]), strict=True))
        mean = total / tokens
        return {"eval/loss": mean, "eval/loss_se": (max(0.0, squares / tokens - mean**2) / tokens) ** 0.5}

    def _judged(self, whole: VLMConfig, iteration: int) -> dict[str, float]:
        questions, process = self._questions(whole), self.run.process
        judged = self._asked(whole, blind=False)
        row = figures(whole, judged)
        # twice is enough: what can be guessed hardly changes, and it costs an evaluation
        if iteration in (0, whole.iterations) and whole.evaluation.blind and shows_pictures(questions):
            blind = figures(whole, self._asked(whole, blind=True))["eval/accuracy_mean"]
            row["eval/accuracy_blind"] = blind
            if iteration == 0:
                self.run.warn_blind(row["eval/accuracy_mean"], blind, "answers are right")
        if process.is_main:
            save_answers(process, judged, self.shown, iteration)
        rows = [questions.row(number) for number in range(min(SHOWN, len(questions)))] if iteration == 0 else []
        self.run.note_sheet(lambda: sheet_of(self.opened, rows, judged.texts, judged.scores, self.shown.images))
        return row

    def _asked(self, whole: VLMConfig, *, blind: bool) -> Judged:
        questions, loop, policy = self._questions(whole), self.run.loop, self.run.policy
        loop.phase("evaluating", len(questions))
        numbers = self.run.process.share(len(questions))
        self.shown = Shown()
        with self.alone(), answering(policy):
            arguments = (policy, whole, self.opened, questions, numbers)
            local = judge(*arguments, shown=self.shown, blind=blind, advance=loop.advance_or_leave)
        return of_all(local)

    def _questions(self, whole: VLMConfig) -> Questions:
        if self.questions is None:
            self.questions = Questions(whole, "eval")
        return self.questions


Made = tuple[list[Media], dict[str, list[float]]]


def run_of(name: str) -> VLMConfig | None:
    """The configuration of the run of a model that answers; None for anything else."""
    file = Path(name) / "config.yaml"
    config = load(file) if file.is_file() else None
    return config if isinstance(config, VLMConfig) else None


def compare(
    a: str,
    b: str,
    page: Page,
    *,
    number: int | None = None,
    column: str | None = None,
    scores: bool = True,
    steps: Mapping[str, int] = MappingProxyType({}),
    begin: Callable[[int], None] = lambda samples: None,
    advance: Callable[[int], None] = lambda samples: None,
) -> None:
    """Put a pair for every held-out question of the run into the page, `number` at most.

    a, b: run folders, one of them may be a model's folder. column: of the category of a question. scores: by the run's
    rewards. steps: of a run by its name, the checkpoint; without, the newest. begin: told the number of samples;
    advance: how many more there are. Raises ValueError for models whose answers are text, for runs of different tasks,
    and where the page would be too large.
    """
    first, second = run_of(a), run_of(b)
    config = second or first
    assert config is not None, "one of them is a run"
    if config.environment is not None or config.vlm.output in ("text", "masked_text"):
        raise ValueError(f"{b if second else a}: its answers are text or actions; a page shows pictures and sounds")
    if first is not None and second is not None and (first.task, first.vlm.output) != (second.task, second.vlm.output):
        raise ValueError(f"{a} and {b} are of different tasks: compare runs whose task and vlm.output are the same")
    if Path(a).resolve() == Path(b).resolve():
        raise ValueError(f"A and B are the same model, {a}: give another run, or the model that it began with")
    if number is not None:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"questions": number})})
    if not scores:
        config = config.model_copy(update={"rewards": ()})
    questions = Questions(config, "eval")
    check_pairs(len(questions))
    begin(2 * len(questions))
    before = _made(a, first, config, questions, advance, steps.get(a))
    # By the first answer, before the second model is loaded and asked all of them.
    check_size(before[0][0], len(questions), beside=page.beside)
    after = _made(b, second, config, questions, advance, steps.get(b))
    for k in range(len(questions)):
        row = questions[k]
        category = None if column is None else row.columns.get(column)
        token = page.add(Pair(text_of(row), before[0][k], after[0][k], None if category is None else str(category)))
        for label in before[1] if token is not None else ():
            values = [side[1][label][k] for side in (before, after)]
            page.add_scores(str(token), label, *(None if math.isnan(value) else value for value in values))


def _made(
    name: str,
    run: VLMConfig | None,
    config: VLMConfig,
    questions: Questions,
    advance: Callable[[int], None],
    step: int | None,
) -> Made:
    """A sample for every question, from a noise that depends on the question alone, and its scores by reward."""
    device = default_device()
    policy = open_policy(config, device, name) if run is None else load_trained(run, Path(name), step, device)
    media_shown, opened = Shown(len(questions)), open_rewards(config)
    judged = judge(policy, config, opened, questions, range(len(questions)), shown=media_shown, advance=advance)
    media = [Media("audio", sound) for sound in media_shown.sounds.values()] or [
        encode(image) for image in media_shown.images
    ]
    if len(media) != len(questions):
        raise ValueError(f"{name}: its answers are neither pictures nor sounds, so a page cannot show them")
    return media, judged.scores


def sheet_of(
    opened: Mapping[str, Reward],
    rows: Sequence[Row],
    texts: Sequence[str],
    scores: Mapping[str, Sequence[float] | Tensor],
    images: Sequence[Tensor] = (),
) -> ContactSheet:
    """The sheet of the first of these questions, with an answer and scores of each. images: what was made in place of
    texts, of the first ones."""
    looks = []
    for number, row in enumerate(rows[:SHOWN]):
        facts = {"answer": texts[number]}
        facts |= {f"reward {label}": score_text(float(values[number])) for label, values in scores.items()}
        for label, reward in opened.items():
            if read := read_as(reward, {**row.columns, "prompts": text_of(row)}):
                facts[f"{label} expects"] = read
        facts |= {f"column {name}": f"{value!r:.200}" for name, value in row.columns.items()}
        parts: Any = [part for part in without_clips(row.prompt).pieces if not isinstance(part, str)]
        pictures = (
            [("shown to the model", open_image(part, row.name)) for part in parts] if not row.prompt.broken else []
        )
        rendered = [("made, as rewards see it", image) for image in images[number : number + 1]]
        looks.append(Look(f"{row.name}\n{text_of(row)}", facts, [*pictures, *rendered]))
    return ContactSheet(looks)
