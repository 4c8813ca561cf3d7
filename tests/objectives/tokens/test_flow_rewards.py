"""RLFR's flow rewards: the velocity error of known fields, and what tokens are charged, by hand."""

from __future__ import annotations

import pytest
import torch

from genrl.objectives.tokens.flow_rewards import flow_returns, unlikely_tokens, velocity_deviation, velocity_error


def test_the_velocity_of_one_point_has_no_error_and_a_shifted_one_that_of_the_shift() -> None:
    """All data at c: x_t = t c + (1 - t) n, so that the velocity c - n is (c - x_t) / (1 - t)."""
    torch.manual_seed(0)
    c, noise, t = torch.tensor([0.5, -2.0, 1.0]), torch.randn(6, 3), torch.linspace(0.1, 0.9, 6)
    data = c.expand(6, 3)
    exact = velocity_error(lambda x, t: (c - x) / (1 - t[:, None]), data, noise, t)
    assert float(exact.max()) < 1e-10
    shifted = velocity_error(lambda x, t: (c - x) / (1 - t[:, None]) + torch.tensor([3.0, 0.0, 0.0]), data, noise, t)
    torch.testing.assert_close(shifted, torch.full((6,), 3.0))  # 9 / 3 dimensions
    still = velocity_error(lambda x, t: torch.zeros_like(x), data, noise, t)
    torch.testing.assert_close(still, (data - noise).square().mean(1))


def test_scores_weigh_times_by_t_over_1_minus_t() -> None:
    data, noise = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
    found = velocity_deviation(lambda x, t: x, data, noise, (0.5, 0.8))  # v = t at x_t = t, off by 1 - t
    assert float(found.error) == pytest.approx((0.25 + 0.04) / 2)
    assert float(found.score) == pytest.approx((1 * 0.25 + 4 * 0.04) / 2)


def test_charges_by_hand() -> None:
    score = torch.tensor([[1.0, 5.0, 4.5, 3.0, 99.0], [2.0, 2.0, 2.0, 7.0, 7.0], [0.0, 10.0, 9.0, 8.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = unlikely_tokens(score, mask, threshold=0.6, most=2)
    wanted = [[0, 1.0, 0.875, 0, 0], [0] * 5, [0, 1.0, 0.9, 0, 0]]
    assert found.tolist() == wanted
    every = unlikely_tokens(score, mask, threshold=0.6, most=None)
    assert every[2].tolist() == [0, 1.0, 0.9, 0.8, 0.7] and torch.equal(every[:2], found[:2])
    paid = flow_returns(found, mask, coefficient=0.5)
    torch.testing.assert_close(paid[0], torch.tensor([-0.9375, -0.9375, -0.4375, 0, 0], dtype=torch.float64))
    assert (paid[1] == 0).all()


def test_what_is_masked_does_not_matter() -> None:
    mask = torch.tensor([[True, True, False]])
    clean = unlikely_tokens(torch.tensor([[0.0, 1.0, 0.0]]), mask, threshold=0.0, most=1)
    for value in (torch.nan, torch.inf, -torch.inf):
        odd = unlikely_tokens(torch.tensor([[0.0, 1.0, value]]), mask, threshold=0.0, most=1)
        assert torch.equal(odd, clean)
