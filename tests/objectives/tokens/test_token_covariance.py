"""Which tokens Clip-Cov and KL-Cov choose, against NumPy's covariance."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives.tokens import token_weights as tc


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3])[:, None]
    old = torch.where(mask, 3.0 * torch.randn(4, 6, generator=generator), torch.nan)
    return old, torch.randn(4, generator=generator, dtype=torch.float64), mask


@given(st.integers(0, 99))
def test_the_mean_of_the_terms_is_the_covariance(seed: int) -> None:
    old, advantage, mask = drawn(seed)
    found = tc.token_covariance(old, advantage, mask)
    by_token = advantage[:, None].expand(4, 6)
    wanted = np.cov(old[mask].double().numpy(), by_token[mask].numpy(), bias=True)[0, 1]
    assert np.isclose(float(found[mask].mean()), wanted) and bool((found[~mask] == 0).all())
    assert torch.equal(found, tc.token_covariance(old, by_token, mask))


@given(st.integers(0, 99))
def test_kl_cov_takes_the_largest(seed: int) -> None:
    old, advantage, mask = drawn(seed)
    covariance = tc.token_covariance(old, advantage, mask)
    chosen = tc.kl_cov_tokens(covariance, mask, share=0.25)  # of 14 tokens: 3
    largest = np.sort(covariance[mask].numpy())[::-1]
    assert float(chosen.sum()) == 3 and np.allclose(np.sort(covariance[chosen.bool()].numpy())[::-1], largest[:3])
    assert float(tc.kl_cov_tokens(covariance, mask, share=1e-4).sum()) == 1  # the paper rounds down to none
    assert torch.equal(tc.kl_cov_tokens(covariance, mask, share=1.0), mask.double())


def test_clip_cov_takes_those_drawn_first_within_the_band() -> None:
    covariance = torch.tensor([[0.5, 1.5, 4.0, 6.0, 2.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    draw = torch.tensor([[0.0, 0.9, 0.2, 0.1, 0.5, 0.0]])
    assert tc.clip_cov_weight(covariance, draw, mask).tolist() == [[1, 1, 0, 1, 1, 1]]
    assert tc.clip_cov_weight(covariance, draw, mask, share=0.4).tolist() == [[1, 1, 0, 1, 0, 1]]
    assert tc.clip_cov_weight(covariance, draw, mask, low=7.0, high=8.0).tolist() == [[1] * 6]  # none in the band
