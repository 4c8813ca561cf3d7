"""Tokens: their probabilities are torch's, a draw is decided by its noise alone and has their frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical

from genrl.mdp import categorical
from genrl.mdp.noise import keyed_noise


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_probabilities_and_entropy_are_torchs(temperature: float) -> None:
    logits = 3.0 * keyed_noise((4, 3, 256), "logits")
    found = categorical.log_probs(logits.bfloat16(), temperature)
    theirs = Categorical(logits=logits.bfloat16().float() / temperature)
    tokens = torch.randint(256, (4, 3), generator=torch.Generator().manual_seed(0))
    assert found.dtype == torch.float32
    torch.testing.assert_close(categorical.chosen(found, tokens), theirs.log_prob(tokens))
    torch.testing.assert_close(categorical.entropy(found), theirs.entropy())


def test_a_draw_is_where_the_cumulative_probability_reaches_that_of_its_noise() -> None:
    """P = .25, .5, .25: bounds at the quartiles of a normal, +-0.6745."""
    log_prob = torch.tensor([0.25, 0.5, 0.25]).log().expand(6, 3)
    noise = torch.tensor([-9.0, -0.675, -0.674, 0.674, 0.675, 9.0])
    assert categorical.draw(log_prob, noise).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_token_without_probability_is_never_drawn() -> None:
    log_prob = torch.log_softmax(torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf]), 0).expand(2000, 5)
    noise = torch.cat([keyed_noise((1998,), "draws"), torch.tensor([-40.0, 40.0])])
    assert set(categorical.draw(log_prob, noise).tolist()) == {1, 3}


def test_frequencies_of_draws_are_the_probabilities() -> None:
    """20 000 draws of five tokens: within five standard errors."""
    log_prob = categorical.log_probs(torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 1.6)
    drawn = categorical.draw(log_prob.expand(20_000, 5), keyed_noise((20_000,), "frequencies"))
    share, wanted = drawn.bincount(minlength=5) / 20_000, log_prob.exp()
    assert ((share - wanted).abs() < 5.0 * (wanted * (1.0 - wanted) / 20_000).sqrt()).all()
