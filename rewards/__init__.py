"""Rewards: callables that score generated samples. See `rewards.contract` for what one looks like.

This package imports nothing of `genrl`, and no torch until a reward is loaded.
"""

from rewards.contract import (
    FAILED_LIMIT,
    Failure,
    Needs,
    Reward,
    RewardFailed,
    Scores,
    check_columns,
    check_failures,
    close,
    first_failure,
    is_trainable,
    move,
    name_of,
    needs,
    open_picture,
    score,
    score_with_gradients,
    to_pil,
    to_uint8,
    weighted_sum,
)
from rewards.declared import Declared, lower_end
from rewards.loading import Listed, Origin, declaration, listing, load, resolve

__all__ = [
    "FAILED_LIMIT",
    "Declared",
    "Failure",
    "Listed",
    "Needs",
    "Origin",
    "Reward",
    "RewardFailed",
    "Scores",
    "check_columns",
    "check_failures",
    "close",
    "declaration",
    "first_failure",
    "is_trainable",
    "listing",
    "load",
    "lower_end",
    "move",
    "name_of",
    "needs",
    "open_picture",
    "resolve",
    "score",
    "score_with_gradients",
    "to_pil",
    "to_uint8",
    "weighted_sum",
]
