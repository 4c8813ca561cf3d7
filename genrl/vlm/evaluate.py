"""The most probable answers to held-out questions, and how many of them are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from genrl.config.vlm import VLMConfig
from genrl.runtime.intervals import wilson
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.policies.pictures import black, with_pictures
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import score
from genrl.vlm.tasks.rows import Row
from rewards.contract import Reward

TOGETHER = 64
"""Questions answered side by side."""


@dataclass(frozen=True)
class Judged:
    """N questions: their names, texts of the answers, and scores by reward (NaN = none), in their order."""

    names: list[str]
    texts: list[str]
    scores: dict[str, list[float]]

    def joined(self, other: Judged) -> Judged:
        """Both, one after the other."""
        scores = {label: values + other.scores[label] for label, values in self.scores.items()}
        return Judged(self.names + other.names, self.texts + other.texts, scores)


def shows_pictures(questions: Questions) -> bool:
    """Whether there is anything to make black."""
    return any(not isinstance(part, str) for part in questions[0].prompt.parts)


def in_the_dark(rows: Sequence[Row]) -> list[Row]:
    """The same questions about black pictures of the same size."""
    return [replace(row, prompt=with_pictures(row.prompt, black, np.random.default_rng(0))) for row in rows]


def judge(
    policy: Policy,
    config: VLMConfig,
    opened: Mapping[str, Reward],
    questions: Questions,
    numbers: Sequence[int],
    *,
    blind: bool = False,
    advance: Callable[[int], None] = lambda answers: None,
) -> Judged:
    """Answer these questions. blind: with black pictures of the same size."""
    found = Judged([], [], {label: [] for label in opened})
    sampling = Sampling(config.generation.max_new_tokens, temperature=0.0)
    for start in range(0, len(numbers), TOGETHER):
        rows = [questions[number] for number in numbers[start : start + TOGETHER]]
        if blind:
            rows = in_the_dark(rows)
        made = generate(policy, [policy.encode(row.prompt) for row in rows], 1, sampling, [(row.name,) for row in rows])
        ids = [row[kept].tolist() for row, kept in zip(made.tokens, made.mask, strict=True)]
        scores = score(config, opened, rows, made.texts, list(range(len(rows))), ids)
        values = {label: one.values for label, one in scores.items()}
        found = found.joined(Judged([row.name for row in rows], made.texts, values))
        advance(len(rows))
    return found


def figures(config: VLMConfig, found: Judged) -> dict[str, float]:
    """Metrics of an evaluation: accuracy with its 95 % interval, means of the rewards, and of their weighted sum.

    Right is an answer whose first reward is at least `evaluation.right_at`; without a score it is not right.
    """
    first = np.array(found.scores[config.reward_labels[0]])
    right = int((first >= config.evaluation.right_at - 1e-9).sum())
    low, high = wilson(right, len(first))
    row: dict[str, Any] = {
        "eval/accuracy_mean": right / len(first),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
    }
    total = np.zeros(len(first))
    for label, reward in zip(config.reward_labels, config.rewards, strict=True):
        values = np.array(found.scores[label])
        scored = values[~np.isnan(values)]
        row[f"eval/{label}_mean"] = float(scored.mean()) if len(scored) else float("nan")
        total += reward.weight * np.nan_to_num(values)
    row["eval/total_mean"] = float(total.mean())
    return row
