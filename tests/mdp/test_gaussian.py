"""The density of a transition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, MultivariateNormal, Normal

from genrl.mdp import gaussian, kernels, noise
from tests.reference.grids import shifted_grid

SHAPES = st.sampled_from([(1, 1), (3, 4), (2, 3, 5), (2, 4, 2, 3), (1, 2, 3, 2, 2)])
STDS = st.floats(0.01, 90.0)


def draw(shape: tuple[int, ...], *keys: int | str) -> torch.Tensor:
    return noise.keyed_noise(shape, *keys).double()


@given(SHAPES, STDS, st.integers(0, 99))
def test_log_prob_is_that_of_torch(shape: tuple[int, ...], std: float, seed: int) -> None:
    x, mean = draw(shape, seed, "x"), draw(shape, seed, "mean")
    stds = torch.full((shape[0], *[1] * (len(shape) - 1)), std, dtype=torch.float64)
    joint = Independent(Normal(mean, stds.expand(shape)), len(shape) - 1)
    total = gaussian.log_prob(x, mean, stds, "sum")
    assert torch.allclose(total, joint.log_prob(x), rtol=1e-12, atol=1e-12)
    size = math.prod(shape[1:])
    assert torch.allclose(gaussian.log_prob(x, mean, stds) * size, total, rtol=1e-12, atol=1e-12)


@given(SHAPES, STDS)
def test_a_std_may_be_given_in_any_of_its_shapes(shape: tuple[int, ...], std: float) -> None:
    x, mean = draw(shape, "x"), draw(shape, "mean")
    column = torch.full((shape[0], *[1] * (len(shape) - 1)), std, dtype=torch.float64)
    given_as = [std, torch.tensor(std, dtype=torch.float64), column.flatten(), column, column.expand(shape)]
    values = [gaussian.log_prob(x, mean, s) for s in given_as]
    assert all(torch.equal(value, values[0]) for value in values)


def test_no_gradient_reaches_the_action() -> None:
    x, mean = draw((2, 3), "x").requires_grad_(), draw((2, 3), "mean").requires_grad_()
    gaussian.log_prob(x, mean, 0.5, "sum").sum().backward()
    assert x.grad is None
    assert mean.grad is not None and torch.allclose(mean.grad, (x - mean).detach() / 0.25)


@given(st.sampled_from(["flow_sde", "dance_sde", "flow_cps", "flow_ddim"]), st.integers(0, 8))
def test_the_gradient_with_respect_to_the_velocity(kind: str, i: int) -> None:
    """Invariant 5: d log p / d v = -(y - mean) / s^2 (sigma c0 - (1 - sigma) c1), element by element."""
    sigmas = shifted_grid(10, 3.0).double()
    x, y = draw((2, 3), "x"), draw((2, 3), "y")
    v = draw((2, 3), "v").requires_grad_()
    options = {"sigma_max": sigmas[1]} if kind == "flow_sde" else {}
    step = getattr(kernels, kind)(x, v, sigmas[i], sigmas[i + 1], noise_level=0.6, **options)
    gaussian.log_prob(y, step.mean, step.std, "sum").sum().backward()
    on_velocity = step_coefficients(kind, sigmas, i)
    want = (y - step.mean.detach()) / step.std**2 * on_velocity
    assert v.grad is not None and torch.allclose(v.grad, want, rtol=1e-9)


def step_coefficients(kind: str, sigmas: torch.Tensor, i: int) -> float:
    """d mean / d v from the kernel itself, which is affine in v."""
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    options = {"sigma_max": sigmas[1]} if kind == "flow_sde" else {}
    kernel, at = getattr(kernels, kind), (sigmas[i], sigmas[i + 1])
    return float(
        kernel(zero, one, *at, noise_level=0.6, **options).mean
        - kernel(zero, zero, *at, noise_level=0.6, **options).mean
    )


def test_the_steps_of_a_chain_add_up_to_its_joint_density() -> None:
    """Invariant 6, on a linear-Gaussian chain whose joint covariance is known: x' = k x + s xi, three steps."""
    decay, std, steps = 0.8, 0.6, 3
    chain = draw((5, steps + 1), "chain")
    total = gaussian.log_prob(chain[:, :1], torch.zeros(5, 1, dtype=torch.float64), 1.0, "sum")
    for i in range(steps):
        total += gaussian.log_prob(chain[:, i + 1 : i + 2], decay * chain[:, i : i + 1], std, "sum")
    # x_i = sum_j L[i, j] xi_j
    mixing = torch.zeros(steps + 1, steps + 1, dtype=torch.float64)
    for i in range(steps + 1):
        mixing[i, 0] = decay**i
        for j in range(1, i + 1):
            mixing[i, j] = std * decay ** (i - j)
    joint = MultivariateNormal(torch.zeros(steps + 1, dtype=torch.float64), mixing @ mixing.T)
    assert torch.allclose(total, joint.log_prob(chain), rtol=0, atol=1e-9)


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, torch.tensor([0.3, 0.0])])
def test_a_step_without_noise_has_no_density(std: float | torch.Tensor) -> None:
    x = draw((2, 3), "x")
    with pytest.raises(ValueError, match="not an action"):
        gaussian.log_prob(x, x, std)


def test_half_precision_is_computed_in_float32() -> None:
    x, mean = noise.keyed_noise((4, 64), "x"), noise.keyed_noise((4, 64), "mean")
    for kind in (torch.bfloat16, torch.float16):
        value = gaussian.log_prob(x.to(kind), mean.to(kind), 0.3)
        assert value.dtype == torch.float32
        assert torch.equal(value, gaussian.log_prob(x.to(kind).float(), mean.to(kind).float(), 0.3))
    assert gaussian.log_prob(x, mean.double(), 0.3).dtype == torch.float64


def test_wrong_shapes_and_names_are_refused() -> None:
    x = draw((2, 3), "x")
    with pytest.raises(ValueError, match=r"\[\] or \[2\]"):
        gaussian.log_prob(x, x, torch.ones(3))
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        gaussian.log_prob(x, x, 1.0, "max")  # type: ignore[arg-type]


@pytest.mark.slow
def test_monte_carlo_of_the_log_ratio() -> None:
    """Invariant 8: under the old policy, E[l_new - l_old] = -KL and E[exp(l_new - l_old)] = 1 (joint densities)."""
    count, size, std = 200_000, 4, 0.7
    old = torch.zeros(count, size, dtype=torch.float64)
    new = old + torch.tensor([0.2, -0.1, 0.15, 0.05], dtype=torch.float64)
    x = gaussian.sample(old, torch.tensor(std), noise.keyed_noise((count, size), "monte-carlo"))
    log_ratio = gaussian.log_prob(x, new, std, "sum") - gaussian.log_prob(x, old, std, "sum")
    kl = ((new[0] - old[0]) ** 2).sum().item() / (2 * std**2)
    assert log_ratio.mean().item() == pytest.approx(-kl, abs=5 * log_ratio.std().item() / count**0.5)
    ratio = log_ratio.exp()
    assert ratio.mean().item() == pytest.approx(1.0, abs=5 * ratio.std().item() / count**0.5)
    assert 10 * 5 * log_ratio.std().item() / count**0.5 < kl  # sharp enough to see a missing factor
