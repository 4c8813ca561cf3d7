"""Masks, means and log-ratios of token sequences."""

from __future__ import annotations

import pytest
import torch

from genrl.objectives.tokens import tokens

MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
VALUES = torch.tensor([[1.0, 3.0, float("nan")], [float("inf")] * 3, [2.0, 4.0, 9.0]])


def test_means_are_of_valid_tokens_and_empty_rows_give_zero() -> None:
    assert tokens.masked(VALUES, MASK).tolist() == [[1.0, 3.0, 0.0], [0.0] * 3, [2.0, 4.0, 9.0]]
    assert tokens.token_count(MASK).tolist() == [2, 0, 3]
    assert tokens.row_sum(VALUES, MASK).tolist() == [4.0, 0.0, 15.0]
    assert tokens.row_mean(VALUES, MASK).tolist() == [2.0, 0.0, 5.0]
    assert tokens.token_mean(VALUES, MASK) == 19.0 / 5
    assert tokens.token_mean(VALUES, torch.zeros_like(MASK)) == 0.0


def test_log_ratios_have_their_gradient_in_the_new_policy_alone() -> None:
    new, old = VALUES.clone().requires_grad_(), VALUES.flip(0).clone().requires_grad_()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 0]])
    assert tokens.log_ratio(new, old, mask).tolist() == [[-1.0, -1.0, 0.0], [0.0] * 3, [1.0, 1.0, 0.0]]
    assert tokens.sequence_log_ratio(new, old, mask).tolist() == [-2.0, 0.0, 2.0]
    mean = tokens.mean_log_ratio(new, old, mask)
    mean.sum().backward()
    assert mean.tolist() == [-1.0, 0.0, 1.0] and old.grad is None
    assert new.grad is not None and new.grad.tolist() == [[0.5, 0.5, 0.0], [0.0] * 3, [0.5, 0.5, 0.0]]


def test_one_value_per_row_or_per_token() -> None:
    assert tokens.per_token(torch.arange(3.0), MASK).tolist() == [[0.0], [1.0], [2.0]]
    assert tokens.per_token(torch.ones(3, 1), MASK).shape == (3, 1)
    assert tokens.per_token(VALUES, MASK)[1].tolist() == [0.0] * 3
    with pytest.raises(ValueError, match=r"per row or per token of \[3, 3\] is needed, got \[4\]"):
        tokens.per_token(torch.ones(4), MASK)
