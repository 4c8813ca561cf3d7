"""Prompts that name the one reward which judges their samples, in a column (PromptRL's reward tags, 2602.01382)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from genrl.config import Config
from genrl.data.prompts import Prompt
from genrl.diffusion.rollout.rollout import Rollouts


def check_tags(config: Config, prompts: Sequence[Prompt], column: str | None) -> None:
    """Raise ValueError, with its line, for a prompt whose `column` names none of the rewards that are trained on. None:
    no column is read."""
    if column is None:
        return
    trained = [label for label, reward in zip(config.reward_labels, config.rewards, strict=True) if reward.weight != 0]
    for row in prompts:
        where, label = f"{config.prompts.train}:{row.line}", row.columns.get(column)
        if label not in trained:
            near = get_close_matches(str(label), trained, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            has = f"no column {column!r}" if column not in row.columns else f"{column} {label!r}, which is no reward"
            raise ValueError(
                f"trainer.reward_column: {where} has {has}; {hint}rewards that are trained on: {', '.join(trained)}"
            )


def scored_by_tags(rollouts: Rollouts, prompts: Sequence[Prompt], column: str | None) -> Tensor:
    """Reward of every sample, float64 [N]: the one that its prompt names, or without a column the weighted sum.

    prompts: of each group.
    """
    if column is None:
        return rollouts.total
    named = [prompts[group].columns[column] for group in rollouts.group.tolist()]
    return torch.stack([rollouts.parts[label][slot] for slot, label in enumerate(named)])
