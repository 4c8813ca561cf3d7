"""The density of a transition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, Normal

from genrl.mdp import gaussian, noise

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
