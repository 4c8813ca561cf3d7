"""Groups of answers that are no texts of a vision-language model (pictures, sounds, shapes, unmasked texts), and their
scores: what `rollout.draw` and `evaluate.judge` do for texts."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import rewards
from genrl.config.vlm import VLMConfig
from genrl.objectives.advantages.reward_shaping import over_views
from genrl.vlm.evaluate import Judged, in_the_dark
from genrl.vlm.rollout.rollout import Answers, joined
from genrl.vlm.tasks.rows import Row
from rewards.contract import Reward, Scores
from rewards.scorers.texts.completions import score_completions

if TYPE_CHECKING:
    from genrl.vlm.policies.contract import SequencePolicy
    from genrl.vlm.policies.policy import Encoded
    from genrl.vlm.policies.sampling import Sampled

TOGETHER = 64
"""Answers that an evaluation samples side by side."""


def draw(
    policy: SequencePolicy,
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
        sampled = policy.sample(prompts, size, settings.temperature, [(*keys, row.name) for row in some])
        parts.append(as_answers(config, opened, some, prompts, sampled))
        advance(len(sampled.texts))
    return joined(parts)


def as_answers(
    config: VLMConfig, opened: Mapping[str, Reward], rows: list[Row], prompts: list[Encoded], sampled: Sampled
) -> Answers:
    """Scored. Where the sampler has no log-probabilities, theirs are NaN."""
    size = len(sampled.texts) // len(rows)
    group = [number for number in range(len(rows)) for _ in range(size)]
    scores = score(config, opened, rows, sampled, group)
    missing = torch.full(sampled.mask.shape, torch.nan)
    return Answers(
        rows,
        prompts,
        sampled.tokens,
        sampled.mask,
        missing if sampled.log_prob is None else sampled.log_prob,
        sampled.texts,
        sampled.cut,
        {label: torch.tensor(one.values, dtype=torch.float64) for label, one in scores.items()},
    )


def score(
    config: VLMConfig, opened: Mapping[str, Reward], rows: Sequence[Row], sampled: Sampled, group: Sequence[int]
) -> dict[str, Scores]:
    """Scores of what was sampled, number k for rows[group[k]]: by rewards of pictures where there are `images`, else of
    texts. Raises ValueError for a column that is not there, and for a reward that failed."""
    asked = [rows[number] for number in group]
    columns = {name: [row.columns[name] for row in asked] for name in sorted(rows[0].columns)}
    prompts = [text_of(row) for row in asked]
    found: dict[str, Scores] = {}
    for label, reward in opened.items():
        made = sampled.made.get("images")
        if made is not None and made.dim() == 6:  # of each step six views
            rule = next(r.views for r, name in zip(config.rewards, config.reward_labels, strict=True) if name == label)
            coarse, fine = (_of_views(reward, made[:, step], prompts, columns, rule, label) for step in (0, -1))
            found |= {label: fine, f"{label}/coarse": coarse}
        elif made is not None:
            found[label] = rewards.score(
                reward, images=made, prompts=prompts, columns=columns, group=list(group), name=label
            )
        else:
            given = columns | {name: list(values) for name, values in sampled.made.items()}
            found[label] = score_completions(
                reward, prompts=prompts, completions=sampled.texts, columns=given, group=list(group), name=label
            )
        if found[label].failures:
            failure = found[label].failures[0]
            raise ValueError(f"reward {label!r} failed on {failure.samples} answers: {failure.error}")
    return found


def _of_views(
    reward: Reward, images: Tensor, prompts: Sequence[str], columns: Mapping[str, list[Any]], rule: Any, label: str
) -> Scores:
    """One score of the six views [B, 6, 3, H, W] of each shape. A view without a score makes the shape's NaN."""

    def each(values: Sequence[Any]) -> list[Any]:
        return [value for value in values for _ in range(images.shape[1])]

    one = rewards.score(
        reward,
        images=images.flatten(0, 1),
        prompts=each(prompts),
        columns={name: each(values) for name, values in columns.items()},
        group=each(range(len(images))),
        name=label,
    )
    scores = torch.tensor(one.values, dtype=torch.float64).view(images.shape[:2])
    return Scores(over_views(scores, rule).tolist(), failures=one.failures)


def text_of(row: Row) -> str:
    """The words of a prompt."""
    return " ".join(part for part in row.prompt.parts if isinstance(part, str))


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


def as_wav(sound: Tensor, rate: int) -> bytes:
    """A waveform [S] in [-1, 1] as a .wav file of 16 bits."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setparams((1, 2, rate, len(sound), "NONE", "not compressed"))
        file.writeframes((sound.clamp(-1, 1) * 32767).short().numpy().tobytes())
    return stream.getvalue()


def judge(
    policy: SequencePolicy,
    config: VLMConfig,
    opened: Mapping[str, Reward],
    questions: Any,
    numbers: Sequence[int],
    *,
    shown: Shown | None = None,
    blind: bool = False,
    advance: Callable[[int], None] = lambda answers: None,
) -> Judged:
    """One answer to each of these prompts: the most probable one (`SequencePolicy.greedy`), or a sample at the
    temperature of training, from a noise that depends on the prompt alone. blind: with black pictures."""
    found = Judged([], [], {label: [] for label in opened})
    temperature = 0.0 if policy.greedy else config.generation.temperature
    for start in range(0, len(numbers), TOGETHER):
        rows = [questions[number] for number in numbers[start : start + TOGETHER]]
        if blind:
            rows = in_the_dark(rows)
        prompts = [policy.encode(row.prompt) for row in rows]
        sampled = policy.sample(prompts, 1, temperature, [("evaluation", row.name) for row in rows])
        if shown is not None:
            shown.add(sampled)
        scores = score(config, opened, rows, sampled, list(range(len(rows))))
        values = {label: scores[label].values for label in opened}
        names = [row.name if policy.greedy else text_of(row) for row in rows]
        found = found.joined(Judged(names, sampled.texts, values))
        advance(len(rows))
    return found
