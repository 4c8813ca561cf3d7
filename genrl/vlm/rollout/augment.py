"""Questions changed by how hard they are for the model, and answered again (DeepVideo-R1, arXiv 2506.07464).

d = the mean reward of recent iterations - that of the question's own answers. Easy questions (d < 0) get noise on their
pictures; hard ones (d > 0) a beginning of the model's best reasoning, which it found with the answer in the question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.runtime.loop.loop import Loop
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.pictures import Change, with_pictures
from genrl.vlm.rollout.rollout import Answers, joined, totals
from genrl.vlm.tasks.rows import Row
from genrl_rewards.scorers.texts.verifiable import answer_in

RECENT = "recent_rewards"
"""In the loop's memory: mean rewards of the last iterations."""


def noisy(level: float) -> Change:
    """Gaussian noise of this standard deviation, in levels of 255, on every pixel and channel."""

    def change(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        pixels = np.array(picture, dtype=np.float64)
        return Image.fromarray((pixels + rng.normal(0, level, pixels.shape)).clip(0, 255).round().astype(np.uint8))

    return change


def gaps(config: VLMConfig, loop: Loop, answers: Answers) -> tuple[Tensor | None, dict[str, list[float]]]:
    """d of each question, float64 [P], None in the first iteration, which has nothing before it; and what the loop's
    memory is to hold from now on, with the mean reward of the answers of all processes."""
    assert config.augmentation is not None
    means = totals(config, answers.scores).nan_to_num(nan=0.0).view(len(answers.rows), -1).mean(1)
    recent: list[float] = loop.memory.get(RECENT, [])
    every = torch.cat(gather_object([means]))
    memory = {RECENT: [*recent, float(every.mean())][-config.augmentation.window :]}
    return (sum(recent) / len(recent) - means if recent else None), memory


def hint(completion: str, share: float) -> str:
    """The first words of the reasoning between `<think>` tags, this share of them rounded up; "" without any."""
    words = (answer_in(completion, "think") or "").split()
    return " ".join(words[: math.ceil(min(1.0, share) * len(words))])


def question_of(row: Row) -> str:
    """The last piece of text of a question."""
    return [part for part in row.prompt.parts if isinstance(part, str)][-1]


def with_text(row: Row, text: str) -> Row:
    """The same question with this in place of its last piece of text."""
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
        asked = {k: question_of(rows[k]) for k in hard}
        for k in hard:
            if "answer" not in rows[k].columns:
                raise ValueError(f"{rows[k].name}: augmentation reads the column 'answer', which is not there")
        answer = {k: rows[k].columns["answer"] for k in hard}
        told = [with_text(rows[k], settings.truth.format(question=asked[k], answer=answer[k])) for k in hard]
        found = ask(told, "told")
        worth = totals(config, found.scores).nan_to_num(nan=-math.inf).view(-1, size)
        for place, k in enumerate(hard):
            best = found.texts[place * size + int(worth[place].argmax())]
            words = hint(best, float(gap[k]))
            rows[k] = with_text(rows[k], f"{asked[k]} {words}".strip())
    for k, d in enumerate(gap.tolist()):
        if d < 0:
            rng = np.random.default_rng(derive_seed(config.seed, "noise", iteration, rows[k].name))
            rows[k] = replace(rows[k], prompt=with_pictures(rows[k].prompt, noisy(settings.noise * -d), rng))
    changed = [k for k, d in enumerate(gap.tolist()) if d != 0]
    if not changed:
        return answers
    again = ask([rows[k] for k in changed], "changed")
    places = {k: len(rows) + place for place, k in enumerate(changed)}
    return joined([answers, again]).chosen([places.get(k, k) for k in range(len(rows))])
