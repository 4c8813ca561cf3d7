"""Aggregation rules by hand, and which of them do not depend on micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.objectives.tokens.token_aggregation import aggregate

TERM = torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, torch.nan, torch.nan, torch.nan], [torch.nan] * 4])
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
RULES = ("seq_mean", "token_mean_global", "const", "seq_sum", "otm")


def test_by_hand() -> None:
    wanted = {
        "seq_mean": (3 + 4 + 0) / 3,
        "token_mean": 16 / 5,
        "token_mean_global": 16 / 5,
        "const": 16 / (3 * 8),
        "seq_sum": 16 / 3,
        "otm": 7.0,
    }
    for rule, value in wanted.items():
        assert aggregate(TERM, MASK, rule, length=8).item() == pytest.approx(value), rule
    assert aggregate(TERM, MASK, "token_mean_global", tokens=8).item() == pytest.approx(2.0)


def test_a_term_per_row_stands_for_each_of_its_tokens() -> None:
    term = torch.tensor([[2.0], [3.0], [torch.nan]])
    assert aggregate(term, MASK, "seq_mean").item() == pytest.approx(5 / 3)
    assert aggregate(term, MASK, "seq_sum").item() == pytest.approx(11 / 3)  # times the row's length: LUSPO
    assert aggregate(term, MASK, "token_mean").item() == pytest.approx(11 / 5)


@given(st.integers(0, 99), st.sampled_from([1, 2, 3, 4]))
def test_micro_batches_add_up(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    term = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 5, generator=generator) < 0.7
    totals = {"rows": 8, "tokens": int(mask.sum()), "length": 9}
    for rule in RULES:
        parts = [aggregate(t, m, rule, **totals) for t, m in zip(term.split(size), mask.split(size), strict=True)]
        assert torch.allclose(torch.stack(parts).sum(), aggregate(term, mask, rule, length=9)), rule
    if int(mask.sum()) and 8 % size == 0:
        # the local rules add up to the mean of the parts
        local = [aggregate(t, m, "token_mean", rows=8) for t, m in zip(term.split(size), mask.split(size), strict=True)]
        alone = [aggregate(t, m, "token_mean") for t, m in zip(term.split(size), mask.split(size), strict=True)]
        assert torch.allclose(torch.stack(local).sum(), torch.stack(alone).mean())


def test_nothing_valid_is_zero_with_a_zero_gradient() -> None:
    term = torch.full((2, 3), torch.nan, requires_grad=True)
    for rule in (*RULES, "token_mean"):
        loss = aggregate(term, torch.zeros(2, 3), rule, length=3)
        (gradient,) = torch.autograd.grad(loss, term)
        assert loss == 0 and bool((gradient == 0).all())


def test_what_a_rule_lacks_and_unknown_rules() -> None:
    with pytest.raises(ValueError, match="longest allowed completion: got length None"):
        aggregate(TERM, MASK, "const")
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; known: seq_mean, token_mean"):
        aggregate(TERM, MASK, "mean")  # type: ignore[arg-type]
