"""Token weights: which tokens they keep (golden arrays: test_surrogate_golden)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives.tokens import token_weights as tw


def drawn(seed: int, rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    return values, torch.arange(length) < lengths[:, None]


@given(st.integers(0, 99), st.sampled_from([0.1, 0.2, 0.4, 1.0]))
def test_the_highest_of_the_batch_and_of_each_row(seed: int, share: float) -> None:
    scores, mask = drawn(seed)
    junk = torch.where(mask, scores, torch.inf)
    batch = tw.top_entropy(junk, mask, share=share)
    threshold = np.quantile(scores[mask].numpy(), 1 - share)
    assert torch.equal(batch.bool(), mask & (scores >= threshold))
    rows = tw.top_of_row(junk, mask, share=share).bool()
    assert not bool((rows & ~mask).any())
    for row, kept, valid in zip(scores, rows, mask, strict=True):
        count = math.ceil(round(share * int(valid.sum()), 9))
        assert int(kept.sum()) == count
        assert bool((row[kept].min() >= row[valid & ~kept]).all())


def test_an_exact_share_is_not_rounded_up() -> None:
    """.4 times 5 is 2.0000000000000004 in some orders of evaluation; .07 times 100 is 7.000000000000001."""
    assert int(tw.top_of_row(torch.arange(5.0)[None], torch.ones(1, 5), share=0.4).sum()) == 2
    assert int(tw.top_of_row(torch.arange(100.0)[None], torch.ones(1, 100), share=0.07).sum()) == 7
    assert tw.top_of_row(torch.ones(1, 4), torch.ones(1, 4), share=0.5).tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert tw.top_entropy(torch.ones(1, 2), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


@given(st.integers(0, 99))
def test_no_mismatch_is_weight_one_and_bounds_hold(seed: int) -> None:
    old, mask = drawn(seed)
    sampler = old + 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    for level in ("token", "sequence", "sequence_geo"):
        assert bool((tw.mismatch_weights(old, old, mask, level=level) == 1).all())
        truncated = tw.mismatch_weights(old, sampler, mask, level=level, mode="truncate", low=0.5, high=2.0)
        kept = tw.mismatch_weights(old, sampler, mask, level=level, mode="mask", low=0.5, high=2.0)
        assert bool((truncated >= 0.5).all()) and bool((truncated <= 2).all())
        assert bool(((kept == truncated) | (kept == 0)).all())
    token = tw.mismatch_weights(old, sampler, mask, level="token", mode="truncate", high=1e9)
    sequence = tw.mismatch_weights(old, sampler, mask, level="sequence", mode="truncate", high=1e9)
    geometric = tw.mismatch_weights(old, sampler, mask, level="sequence_geo", mode="truncate", high=1e9)
    assert torch.allclose(token.prod(dim=1, keepdim=True), sequence)
    assert torch.allclose(geometric ** mask.sum(dim=1, keepdim=True), sequence)


def test_unknown_levels_and_modes() -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="sequence_geo"):
        tw.mismatch_weights(ones, ones, ones, level="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="truncate"):
        tw.mismatch_weights(ones, ones, ones, mode="clip")  # type: ignore[arg-type]


def test_only_bad_rows_that_drifted_away_are_left_out() -> None:
    log_prob = torch.tensor([[-1.0, -1.0], [-3.0, -3.0], [-3.0, -3.0], [-3.0, torch.nan]])
    sampler = torch.full((4, 2), -1.0)
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    advantage = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    keep = tw.off_policy_mask(log_prob, sampler, advantage, mask, threshold=1.0)
    assert keep.tolist() == [[1.0], [0.0], [1.0], [0.0]]
