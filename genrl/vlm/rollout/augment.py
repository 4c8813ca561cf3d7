"""Questions by how hard they are for the model: those that it never or always answers rightly left out before training
(MedVLThinker), others changed and answered again (DeepVideo-R1, arXiv 2506.07464).

d = the mean reward of recent iterations - that of the question's own answers. Easy questions (d < 0) get noise on their
pictures; hard ones (d > 0) a beginning of the model's best reasoning, which it found with the answer in the question.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.loop.loop import Loop
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import answering
from genrl.vlm.policies.pictures import Change, with_pictures
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import Answers, check_failed, draw, failures_of, is_right, joined, open_rewards, totals
from genrl.vlm.tasks import Row
from genrl_rewards.failures import Failure
from genrl_rewards.scorers.texts.verifiable import answer_in

RECENT = "recent_rewards"
"""In the loop's memory: mean rewards of the last iterations."""


def noisy(level: float) -> Change:
    """Gaussian noise of this standard deviation, in levels of 255, on every pixel and channel."""

    def change(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        pixels = np.array(picture, dtype=np.float64)
        return Image.fromarray((pixels + rng.normal(0, level, pixels.shape)).clip(0, 255).round().astype(np.uint8))

    return change


def gaps(config: VLMConfig, loop: Loop, rounds: Sequence[Answers]) -> tuple[Tensor | None, dict[str, list[float]]]:
    """d of each question of the last of an iteration's rounds so far, float64 [P], None in the first iteration, which
    has nothing before it; and what the loop's memory is to hold from now on, with the mean reward of the answers of all
    rounds and processes."""
    assert config.augmentation is not None
    means = [totals(config, each.scores).nan_to_num(nan=0.0).view(len(each.rows), -1).mean(1) for each in rounds]
    recent: list[float] = loop.memory.get(RECENT, [])
    every = torch.cat(gather_object([torch.cat(means)]))
    # A new list: an iteration that is undone puts the old one back.
    memory = {RECENT: [*recent, float(every.mean())][-config.augmentation.window :]}
    return (sum(recent) / len(recent) - means[-1] if recent else None), memory


def hint(completion: str, share: float) -> str:
    """The first words of the reasoning between `<think>` tags, this share of them rounded up; "" without any."""
    words = (answer_in(completion, "think") or "").split()
    return " ".join(words[: math.ceil(min(1.0, share) * len(words))])


def question_of(row: Row) -> str:
    """The last piece of text of a question."""
    return [part for part in row.prompt.parts if isinstance(part, str)][-1]


def with_text(row: Row, text: str) -> Row:
    """A question with this in place of its last piece of text."""
    parts = list(row.prompt.parts)
    parts[max(k for k, part in enumerate(parts) if isinstance(part, str))] = text
    return replace(row, prompt=replace(row.prompt, parts=tuple(parts)))


def augmented(
    config: VLMConfig, answers: Answers, gap: Tensor, ask: Callable[[Sequence[Row], str], Answers], iteration: int
) -> Answers:
    """Answers to the changed questions, groups in the order of `answers`. gap: d, [P]. ask: draws groups of answers to
    questions; its second argument is part of their keys. A question with d = 0 keeps its answers."""
    settings = config.augmentation
    assert settings is not None
    size, hard = answers.size, [k for k, d in enumerate(gap.tolist()) if d > 0]
    rows = list(answers.rows)
    if hard:
        questions = {k: question_of(rows[k]) for k in hard}
        for k in hard:
            if "answer" not in rows[k].columns:
                raise ValueError(f"{rows[k].name}: augmentation reads the column 'answer', which is not there")
        answer = {k: rows[k].columns["answer"] for k in hard}
        with_truth = [with_text(rows[k], settings.truth.format(question=questions[k], answer=answer[k])) for k in hard]
        reasoned = ask(with_truth, "told")
        # One without a score must not be the best.
        worth = totals(config, reasoned.scores).nan_to_num(nan=-math.inf).view(-1, size)
        for place, k in enumerate(hard):
            best = reasoned.texts[place * size + int(worth[place].argmax())]
            words = hint(best, float(gap[k]))
            rows[k] = with_text(rows[k], f"{questions[k]} {words}".strip())
    for k, d in enumerate(gap.tolist()):
        if d < 0:
            rng = np.random.default_rng(derive_seed(config.seed, "noise", iteration, rows[k].name))
            rows[k] = replace(rows[k], prompt=with_pictures(rows[k].prompt, noisy(settings.noise * -d), rng))
    changed = [k for k, d in enumerate(gap.tolist()) if d != 0]
    if not changed:
        return answers
    new_answers = ask([rows[k] for k in changed], "changed")
    places = {k: len(rows) + place for place, k in enumerate(changed)}
    return joined([answers, new_answers]).chosen([places.get(k, k) for k in range(len(rows))])


TOGETHER = 64
"""Answers drawn side by side."""


def leave_out(config: VLMConfig, questions: Questions, policy: Policy, loop: Loop, stage: int) -> None:
    """Set `questions.kept` to those that were right at least once, but not always, in `task.passes` answers.

    The numbers of right answers are in passes-<stage>.jsonl of the run's folder; a resumed run reads them there.
    Raises ValueError where fewer questions are left than an iteration asks, and RewardFailed as `check_failed`. An
    answer without a score is not right, and is counted where the rest is said.
    """
    passes = config.task.passes
    if passes is None:
        return
    file = loop.process.run.folder / f"passes-{stage}.jsonl"
    loop.process.accelerator.wait_for_everyone()  # none looks for the file while another writes it
    # a pass over all questions is dear: a resumed run reads what the first one counted
    if not file.is_file():
        with answering(policy):
            _count(config, questions, policy, loop, stage)
    counts = [json.loads(line)["right"] for line in file.read_text(encoding="utf-8").splitlines()]
    questions.kept = [number for number, right in enumerate(counts) if 0 < right < passes]
    never, always = sum(right == 0 for right in counts), sum(right == passes for right in counts)
    loop.process.progress.say(f"{len(questions.kept)} of {len(counts)} questions: {never} never right, {always} always")
    per_iteration = config.generation.prompts_per_iteration
    if len(questions.kept) < per_iteration:
        raise ValueError(
            f"task.passes: {len(questions.kept)} of {len(counts)} questions are sometimes right, and an iteration asks "
            f"{per_iteration}; take more questions, more passes, or easier ones ({file})"
        )


def _count(config: VLMConfig, questions: Questions, policy: Policy, loop: Loop, stage: int) -> None:
    assert config.task.passes is not None
    size = config.task.passes
    generation = config.generation.model_copy(update={"group_size": size, "batch_size": None})
    config, opened = config.model_copy(update={"generation": generation}), open_rewards(config)
    rank, processes = loop.process.accelerator.process_index, loop.process.accelerator.num_processes
    numbers_here = list(range(rank, len(questions), processes))
    loop.phase("counting passes", len(numbers_here) * size)
    right: dict[int, int] = {}
    together, unscored = max(1, TOGETHER // size), 0
    for start in range(0, -(-len(questions) // processes), together):  # as often in every process
        numbers, failures = numbers_here[start : start + together], dict[str, tuple[Failure, ...]]()
        if numbers:
            rows = [questions.row(number) for number in numbers]
            answers = draw(policy, config, opened, rows, (config.seed, "passes", stage), advance=loop.advance_or_leave)
            values, failures = answers.scores[config.reward_labels[0]], answers.failures
            right |= dict(zip(numbers, is_right(config, values).view(-1, size).sum(1).tolist(), strict=True))
            unscored += int(values.isnan().sum())
        every: list[tuple[Mapping[str, tuple[Failure, ...]], int]] = gather_object([(failures, len(numbers) * size)])
        check_failed(config, failures_of([failed for failed, _ in every]), sum(number for _, number in every))
    loop.check_stop()
    without = sum(gather_object([unscored]))
    if without:
        loop.process.progress.say(f"{without} of {len(questions) * size} answers have no score, and are not right")
    counts = {number: count for part in gather_object([right]) for number, count in part.items()}
    if loop.is_main:
        lines = [
            json.dumps({"question": questions[number].name, "right": counts[number], "of": size})
            for number in range(len(questions))
        ]
        write_atomic(loop.process.run.folder / f"passes-{stage}.jsonl", "\n".join(lines) + "\n")
    loop.process.accelerator.wait_for_everyone()
