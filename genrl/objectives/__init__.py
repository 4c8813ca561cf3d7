"""Losses and advantages as functions of tensors. Here: what they and settings, which do not import torch, share."""

from __future__ import annotations

from typing import Literal

LARGEST_STALENESS_WEIGHT = 5.0
"""Of a sample that older weights drew, p_old / p_drawn: 5 in pi_RL's asynchronous recipe. One
with a greater weight is left out."""

PairLoss = Literal[
    "sigmoid", "robust", "ipo", "hinge", "sigmoid_norm", "nca_pair", "apo_zero", "apo_down", "sppo_hard", "orpo"
]
"""Of a preferred answer and another."""
MarkedLoss = Literal["kto", "apo_zero_unpaired"]
"""Of answers that are marked good or bad."""
MEAN_LOSSES = ("ipo", "sigmoid_norm", "orpo")
"""Which of them take means over tokens, and not sums."""
