"""What the checkers of the drawn worlds share: credit for numbers of things and a relation, and scores by caption."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from genrl_rewards.contract import Scored
from genrl_rewards.pictures import to_uint8

if TYPE_CHECKING:
    import torch

BACKGROUND = (244, 243, 238)
POSITION_WEIGHT = 0.4  # of the soft score of a caption that names a relation

Asked = TypeVar("Asked")


def credit(counts: Sequence[int], asked: Sequence[int], extra: int, position: float) -> tuple[float, float]:
    """soft and strict, in [0, 1], of so many things that are there (counts) and asked for by group, and `extra` others.

    soft: mean over groups of max(0, 1 - |counts - asked| / asked), times asked / (asked + extra); position, NaN where
    no relation was requested, has a weight of `POSITION_WEIGHT` in it. strict: 1 if all is as requested.
    """
    errors = [abs(counted - expected) for counted, expected in zip(counts, asked, strict=True)]
    total = sum(asked)
    soft = float(np.mean([max(0.0, 1 - e / expected) for e, expected in zip(errors, asked, strict=True)]))
    # Or a picture full of things would have all that is asked for.
    soft *= total / (total + extra)
    exact = not any(errors) and extra == 0
    if not math.isnan(position):
        soft = (1 - POSITION_WEIGHT) * soft + POSITION_WEIGHT * position
        exact = exact and position == 1.0
    return soft, float(exact)


def by_caption(
    images: torch.Tensor,
    prompts: Sequence[str],
    parse: Callable[[str], Asked | None],
    check: Callable[[np.ndarray, Asked], dict[str, float]],
    parts: Sequence[str],
    *,
    strict: bool,
) -> Scored:
    """`check` of each picture, float [N, 3, H, W] in [0, 1], against what `parse` reads of its prompt; no score for a
    prompt that it cannot read. The score is the part `strict` or `soft`; all `parts` are reported, too."""
    scores: dict[str, list[float]] = {name: [] for name in parts}
    for picture, prompt in zip(to_uint8(images), prompts, strict=True):
        caption = parse(prompt)
        result = check(picture, caption) if caption else dict.fromkeys(parts, math.nan)
        for name in parts:
            scores[name].append(result[name])
    return scores["strict" if strict else "soft"], scores
