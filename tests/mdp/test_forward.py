"""The forward process belongs to the kernels: with the right prediction, their deterministic steps stay on its path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import forward, kernels, noise


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    return noise.keyed_noise((3, 2, 4), seed, "clean").double(), noise.keyed_noise((3, 2, 4), seed, "noise").double()


@given(st.integers(0, 99), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_an_ode_step_with_the_right_velocity_stays_on_the_path(seed: int, sigma: float, share: float) -> None:
    clean, source = pictures(seed)
    velocity = forward.flow_target(clean, source)
    step = kernels.ode(forward.flow_sample(clean, source, sigma), velocity, sigma, share * sigma)
    assert torch.allclose(step.mean, forward.flow_sample(clean, source, share * sigma), atol=1e-12)


@given(
    st.integers(0, 99),
    st.floats(0.01, 0.98),
    st.floats(0.0, 1.0),
    st.sampled_from(["epsilon", "v_prediction", "sample"]),
)
def test_a_ddim_step_with_the_right_prediction_stays_on_the_path(
    seed: int, alpha_bar: float, share: float, kind: str
) -> None:
    clean, source = pictures(seed)
    target = forward.diffusion_target(clean, source, alpha_bar, kind)  # type: ignore[arg-type]
    next_level = alpha_bar + share * (1 - alpha_bar)
    step = kernels.ddim(
        forward.diffusion_sample(clean, source, alpha_bar), target, alpha_bar, next_level, eta=0.0,
        prediction_type=kind,  # type: ignore[arg-type]
    )  # fmt: skip
    assert torch.allclose(step.mean, forward.diffusion_sample(clean, source, next_level), atol=1e-9)


def test_levels_may_differ_per_sample_and_half_precision_is_computed_in_float32() -> None:
    clean, source = pictures(0)
    levels = torch.tensor([0.2, 0.5, 1.0])
    for sample in (forward.flow_sample, forward.diffusion_sample):
        together = sample(clean, source, levels)
        for i in range(3):
            assert torch.allclose(together[i : i + 1], sample(clean[i : i + 1], source[i : i + 1], levels[i]))
        low = sample(clean.bfloat16(), source.bfloat16(), 0.3)
        assert low.dtype == torch.float32
        assert torch.equal(low, sample(clean.bfloat16().float(), source.bfloat16().float(), 0.3))


def test_the_ends_are_noise_and_data() -> None:
    clean, source = pictures(1)
    assert torch.equal(forward.flow_sample(clean, source, 1.0), source)
    assert torch.equal(forward.flow_sample(clean, source, 0.0), clean)
    assert torch.equal(forward.diffusion_sample(clean, source, 0.0), source)
    assert torch.equal(forward.diffusion_sample(clean, source, 1.0), clean)
    with pytest.raises(ValueError, match="prediction_type must be"):
        forward.diffusion_target(clean, source, 0.5, "x0")  # type: ignore[arg-type]
