"""Chains of action chunks: replay, which steps are drawn, a learned std."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import chains, ddpm, kernels, noise, schedules
from genrl.mdp.chains import Chain
from genrl.mdp.kernels import Transition


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """A nonlinear field: any policy."""
    return torch.tanh(0.7 * x + 0.3) + sigma.reshape(-1, *[1] * (x.dim() - 1)) * x.flip(-1)


def flow_sde_chain(noisy: Tensor, sigmas: Tensor, level: float, seed: int, field=velocity) -> Chain:
    batch, steps = noisy.shape
    drawn = noise.keyed_noise((batch, steps + 1, 4, 3), seed)

    def transition(k: int, x: Tensor) -> Transition:
        at = sigmas[k].expand(batch)
        return kernels.flow_sde(
            x, field(x, at), at, sigmas[k + 1], noise_level=noisy[:, k] * level, sigma_max=sigmas[1]
        )

    return chains.sample_chain(transition, drawn[:, 0], drawn[:, 1:])


def transition_of(kind: str):
    """(step k or one step per row, x) -> Transition: the same rule for sampling and for replay."""
    sigmas, grid = schedules.linspace_grid(4), ddpm.ddim_grid(ddpm.cosine_alpha_bars(20), 4)

    def transition(k, x: Tensor) -> Transition:
        at = torch.as_tensor(k).expand(len(x))
        if kind == "dppo":
            step = ddpm.denoise(x, torch.tanh(x + at.view(-1, 1, 1) / 4), grid, at)
            return ddpm.with_floor(step, 0.1)
        now = sigmas[at], sigmas[at + 1]
        v = velocity(x, now[0])
        if kind == "flow_sde":
            return kernels.flow_sde(x, v, *now, noise_level=0.5, sigma_max=sigmas[1])
        if kind == "flow_cps":
            return kernels.flow_cps(x, v, *now, noise_level=0.5)
        std = chains.bounded_std(x.flip(-2), 0.08, 0.16)
        return chains.learned_noise(x, v, *now, std=std, clip=1.0 if kind == "reinflow" else None)

    return transition


@pytest.mark.parametrize("kind", ["flow_sde", "flow_cps", "flow_noise", "reinflow", "dppo"])
def test_replaying_a_whole_chain_gives_ratio_one(kind: str) -> None:
    """All steps of all rows in one call, each at its own step: the joint ratio is 1 exactly, for every transition."""
    transition = transition_of(kind)
    drawn = noise.keyed_noise((6, 5, 4, 3), 11)
    clips = {"noise_clip": 3.0, "last_clip": 1.0} if kind in ("reinflow", "dppo") else {}
    chain = chains.sample_chain(transition, drawn[:, 0], drawn[:, 1:], **clips)
    steps = 3 if kind == "flow_cps" else 4  # its last step is deterministic
    rows = chain.states[:, :steps].flatten(0, 1)
    again = transition(torch.arange(steps).repeat(6), rows)
    shape = (6, steps, 4, 3)
    replayed = Chain(
        chain.states[:, : steps + 1],
        again.mean.view(shape),
        again.std.expand_as(again.mean).reshape(shape),
    )
    recorded = Chain(chain.states[:, : steps + 1], chain.means[:, :steps], chain.stds[:, :steps])
    old, new = (
        chains.aggregate(chains.chain_log_prob(c, initial=True, reduction="sum"), "chunk", "sum")
        for c in (recorded, replayed)
    )
    assert torch.equal(old, new)


def test_a_chain_with_a_deterministic_step_has_no_joint_density() -> None:
    chain = flow_sde_chain(chains.noisy_steps("last", 2, 3), schedules.linspace_grid(3), 1.0, seed=6)
    with pytest.raises(ValueError, match="not an action"):
        chains.chain_log_prob(chain, initial=False, reduction="sum")


def test_gradients_reach_the_learned_std_and_not_the_action() -> None:
    raw = torch.zeros(2, 4, 3, requires_grad=True)
    x = noise.keyed_noise((2, 4, 3), 7).requires_grad_()
    std = chains.bounded_std(raw, 0.1, 0.4)
    density = chains.element_log_prob(x, torch.zeros_like(x), std)
    grad = torch.autograd.grad(density.sum(), raw)[0]
    z = (x / std).detach()
    torch.testing.assert_close(grad, (z**2 - 1) * math.log(4.0) / 2)  # d ln p / d ln s = z^2 - 1, d ln s / d raw
    assert torch.autograd.grad(density.sum(), x, allow_unused=True)[0] is None


@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.sampled_from(["all", "random_per_env", "random_per_batch", "last"]),
    st.data(),
)
def test_steps_that_are_drawn(batch: int, steps: int, selection, data) -> None:
    skip = data.draw(st.booleans()) and steps > 1
    count = data.draw(st.integers(1, steps - skip)) if selection == "last" else 1
    noisy = chains.noisy_steps(selection, batch, steps, count=count, skip_last=skip, generator=noise.generator(8))
    assert noisy.shape == (batch, steps)
    expected = steps - skip if selection == "all" else count
    assert (noisy.sum(1) == expected).all()
    assert not (skip and noisy[:, -1].any())
    if selection != "random_per_env":
        assert (noisy == noisy[:1]).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: chains.noisy_steps("random_per_env", 2, 3), "pass a generator"),
        (lambda: chains.noisy_steps("last", 2, 3, count=4), "cannot be stochastic"),
        (lambda: chains.noisy_steps("all", 2, 1, skip_last=True), "cannot be stochastic"),
        (lambda: chains.noisy_steps("some", 2, 1), "selection must be"),
        (lambda: chains.bounded_std(torch.zeros(1), 0.2, 0.1), "0 < low <= high"),
        (lambda: chains.executed(torch.zeros(1, 2, 2), 3, 1), "cannot execute"),
        (lambda: chains.aggregate(torch.zeros(1, 2, 2), "token", "sum"), "level must be"),
    ],
)
def test_what_cannot_be_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
