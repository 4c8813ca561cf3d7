"""The world model: its divergence against torch's, whose gradients move what, and that it learns what a move does."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from genrl.mdp.noise import keyed_noise
from genrl.playground.minitable import task
from genrl.playground.minitable.world import play, seen
from genrl.vla.methods.diwa.rssm import WorldModel, balanced_kl, world_loss, world_step


def gaussians(seed: int) -> tuple[Normal, Normal]:
    draw = [keyed_noise((5, 4), seed, place) for place in range(4)]
    return Normal(draw[0], draw[1].exp()), Normal(draw[2], draw[3].exp())


@settings(max_examples=15)
@given(st.integers(0, 1000), st.floats(0, 1))
def test_the_divergence_is_torchs_whatever_the_balance(seed: int, balance: float) -> None:
    q, p = gaussians(seed)
    expected = kl_divergence(q, p).sum(-1)
    torch.testing.assert_close(balanced_kl(q, p, balance=balance), expected, rtol=1e-4, atol=1e-4)


def test_the_balance_shares_out_the_gradient() -> None:
    q, p = (Normal(g.mean.requires_grad_(), g.stddev.detach().requires_grad_()) for g in gaussians(3))
    plain = torch.autograd.grad(kl_divergence(q, p).sum(), (q.loc, p.loc))
    shared = torch.autograd.grad(balanced_kl(q, p, balance=0.8).sum(), (q.loc, p.loc))
    torch.testing.assert_close(shared[0], 0.2 * plain[0])
    torch.testing.assert_close(shared[1], 0.8 * plain[1])


def toys(tables: int = 40, length: int = 24, seed: int = 0):
    found = play(tables, length, seed=seed)
    return torch.from_numpy(found.observations), torch.from_numpy(found.actions)


def test_play_follows_the_table_and_is_a_function_of_its_seed() -> None:
    found, again, other = play(6, 30, seed=1), play(6, 30, seed=1), play(6, 30, seed=2)
    assert np.array_equal(found.observations, again.observations) and np.array_equal(found.actions, again.actions)
    assert not np.array_equal(found.actions, other.actions)
    assert found.observations.shape == (6, 31, 9) and np.abs(found.actions).max() <= 1
    state = task.initial_state(task.episode_keys(1, np.arange(6), np.zeros(6)), task.PUT)
    for t in range(30):
        assert np.array_equal(seen(state), found.observations[:, t])
        state = task.step(state, found.actions[:, t])
    assert play(200, 60, seed=0).observations[:, -1, 2].mean() > 0.05  # somebody holds something


def test_imagination_and_looking_differ_in_what_they_know() -> None:
    observations, actions = toys(4)
    torch.manual_seed(0)
    world = WorldModel(observations, actions, deterministic=16, stochastic=4)
    latent = world.first(observations[:, 0])
    dreamt = world.imagine(latent, actions[:, 0], torch.zeros(4, 4))
    looked = world.look(latent, actions[:, 0], observations[:, 1])
    assert torch.equal(dreamt.h, looked.h) and not torch.equal(dreamt.z, looked.z)
    assert torch.equal(world.imagine(latent, actions[:, 0], torch.zeros(4, 4)).z, dreamt.z)
    elsewhere = world.look(latent, actions[:, 0], observations[:, 1].flip(0))
    assert torch.equal(looked.h, elsewhere.h) and not torch.equal(looked.z, elsewhere.z)
    assert world.decode(looked).shape == (4, 9) and looked.rows(torch.tensor([2])).h.shape == (1, 16)


def test_the_loss_is_reconstruction_and_divergence() -> None:
    """Nothing foretells the first observation. Without noise the model has looked at both."""
    observations, actions = toys(3, 4)
    torch.manual_seed(0)
    world = WorldModel(observations, actions, deterministic=16, stochastic=4)
    noise = torch.zeros(3, 2, 4)
    found = world_loss(world, observations[:, :2], actions[:, :1], noise, balance=0.8, kl_scale=0.5)
    first = world.first(observations[:, 0])
    h = world.forward_h(first, actions[:, 0])
    expected = balanced_kl(world.seen(h, observations[:, 1]), world.expected(h), balance=0.8).mean()
    torch.testing.assert_close(found.kl, expected)
    both = torch.stack([world.decode(first), world.decode(world.look(first, actions[:, 0], observations[:, 1]))], 1)
    errors = (both - observations[:, :2]) / world.observation_std
    torch.testing.assert_close(found.reconstruction, 0.5 * errors.square().sum(-1).mean(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.loss, found.reconstruction + 0.5 * found.kl)


def test_updates_are_functions_of_seed_and_step_and_lower_the_loss() -> None:
    observations, actions = toys(8)
    how = {"length": 6, "batch_size": 4, "seed": 0}

    def losses(steps):
        torch.manual_seed(0)
        world = WorldModel(observations, actions, deterministic=16, stochastic=4)
        optimiser = torch.optim.Adam(world.parameters(), lr=1e-2)
        return [float(world_step(world, optimiser, observations, actions, step=s, **how).loss) for s in steps]

    assert losses((0, 1, 2)) == losses((0, 1, 2)) and losses((0,)) != losses((5,))
    same = losses([0] * 20)
    assert same[-1] < 0.7 * same[0]
