"""Groups of answers that are no texts of a vision-language model (pictures, sounds, shapes, unmasked texts), and their
scores: what `rollout.draw` and `evaluate.judge` do for texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import rewards
from genrl.config.vlm import VLMConfig
from genrl.vlm.evaluate import Judged
from genrl.vlm.rollout import Answers, joined
from genrl.vlm.tasks.rows import Row
from rewards.completions import score_completions
from rewards.contract import Reward, Scores

if TYPE_CHECKING:
    from genrl.vlm.image_tokens import Drawn
    from genrl.vlm.policy import Encoded

TOGETHER = 64
"""Answers that an evaluation draws side by side."""


def draw(
    policy: Any,
    config: VLMConfig,
    opened: Mapping[str, Reward],
    rows: Sequence[Row],
    keys: Sequence[int | str],
    *,
    advance: Callable[[int], None] = lambda answers: None,
) -> Answers:
    """Groups of answers to these prompts, with their scores; a sample's key is (*keys, its prompt's name)."""
    settings, size = config.generation, config.generation.group_size
    together = max(1, (settings.batch_size or len(rows) * size) // size)
    parts = []
    for start in range(0, len(rows), together):
        some = list(rows[start : start + together])
        prompts = [policy.encode(row.prompt) for row in some]
        drawn = policy.draw(prompts, size, settings.temperature, [(*keys, row.name) for row in some])
        parts.append(as_answers(config, opened, some, prompts, drawn))
        advance(len(drawn.texts))
    return joined(parts)


def as_answers(
    config: VLMConfig, opened: Mapping[str, Reward], rows: list[Row], prompts: list[Encoded], drawn: Drawn
) -> Answers:
    """Scored. Where the sampler has no log-probabilities, theirs are NaN."""
    size = len(drawn.texts) // len(rows)
    group = [number for number in range(len(rows)) for _ in range(size)]
    scores = score(config, opened, rows, drawn, group)
    missing = torch.full(drawn.mask.shape, torch.nan)
    return Answers(
        rows,
        prompts,
        drawn.tokens,
        drawn.mask,
        missing if drawn.log_prob is None else drawn.log_prob,
        drawn.texts,
        drawn.cut,
        {label: torch.tensor(one.values, dtype=torch.float64) for label, one in scores.items()},
    )


def score(
    config: VLMConfig, opened: Mapping[str, Reward], rows: Sequence[Row], drawn: Drawn, group: Sequence[int]
) -> dict[str, Scores]:
    """Scores of what was drawn, number k for rows[group[k]]: by rewards of pictures where there are `images`, else of
    texts. Raises ValueError for a column that is not there, and for a reward that failed."""
    asked = [rows[number] for number in group]
    columns = {name: [row.columns[name] for row in asked] for name in sorted(rows[0].columns)}
    prompts = [text_of(row) for row in asked]
    found = {}
    for label, reward in opened.items():
        if "images" in drawn.made:
            found[label] = rewards.score(
                reward, images=drawn.made["images"], prompts=prompts, columns=columns, group=list(group), name=label
            )
        else:
            given = columns | {name: list(values) for name, values in drawn.made.items()}
            found[label] = score_completions(
                reward, prompts=prompts, completions=drawn.texts, columns=given, group=list(group), name=label
            )
        if found[label].failures:
            failure = found[label].failures[0]
            raise ValueError(f"reward {label!r} failed on {failure.samples} answers: {failure.error}")
    return found


def text_of(row: Row) -> str:
    """The words of a prompt."""
    return " ".join(part for part in row.prompt.parts if isinstance(part, str))


class Shown:
    """What an evaluation shows: the first pictures of it, with their captions and scores."""

    def __init__(self, number: int = 16) -> None:
        self.number = number
        self.images: list[Tensor] = []

    def add(self, drawn: Drawn) -> None:
        images = drawn.made.get("images", [])
        self.images += list(images[: self.number - len(self.images)])


def judge(
    policy: Any,
    config: VLMConfig,
    opened: Mapping[str, Reward],
    questions: Any,
    numbers: Sequence[int],
    *,
    shown: Shown | None = None,
    advance: Callable[[int], None] = lambda answers: None,
) -> Judged:
    """One answer to each of these prompts, drawn at the temperature of training from a noise that depends on the prompt
    alone: the most probable codes are no typical picture."""
    found = Judged([], [], {label: [] for label in opened})
    temperature = 0.0 if config.vlm.output == "masked_text" else config.generation.temperature
    for start in range(0, len(numbers), TOGETHER):
        rows = [questions[number] for number in numbers[start : start + TOGETHER]]
        prompts = [policy.encode(row.prompt) for row in rows]
        drawn = policy.draw(prompts, 1, temperature, [("evaluation", row.name) for row in rows])
        if shown is not None:
            shown.add(drawn)
        scores = score(config, opened, rows, drawn, list(range(len(rows))))
        values = {label: one.values for label, one in scores.items()}
        names = [row.name if config.vlm.output == "masked_text" else text_of(row) for row in rows]
        found = found.joined(Judged(names, drawn.texts, values))
        advance(len(rows))
    return found
