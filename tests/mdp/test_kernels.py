"""What holds for the kernels at any state, velocity and time (their numbers: test_kernels_golden)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from genrl.mdp import gaussian, kernels, noise
from genrl.mdp.kernels import Transition
from tests.reference.grids import shifted_grid


def pair(seed: int, shape: tuple[int, ...] = (2, 3, 4)) -> tuple[Tensor, Tensor]:
    return noise.keyed_noise(shape, seed, "x").double(), noise.keyed_noise(shape, seed, "v").double()


def close(ours: Tensor, want: Tensor, tolerance: float = 1e-12) -> bool:
    return bool(((ours - want).abs() <= tolerance * want.abs().clamp(min=1.0)).all())


def flow_sde(x: Tensor, v: Tensor, sigma: float, sigma_next: float, noise_level: float) -> Transition:
    return kernels.flow_sde(x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=0.97)


STOCHASTIC = {
    "flow_sde": flow_sde,
    "dance_sde": lambda x, v, s, t, a: kernels.dance_sde(x, v, s, t, noise_level=a),
    "flow_cps": lambda x, v, s, t, a: kernels.flow_cps(x, v, s, t, noise_level=a),
    "flow_ddim": lambda x, v, s, t, a: kernels.flow_ddim(x, v, s, t, noise_level=a),
}
BY_NAME = pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)


# Replay --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
@BY_NAME
def test_a_replayed_step_has_ratio_one_bit_for_bit(kernel, storage: torch.dtype) -> None:
    """The next state is rounded to its storage type before it is scored."""
    sigmas = shifted_grid(10, 3.0)
    x, v = noise.keyed_noise((3, 4, 8, 8), "x").to(storage), noise.keyed_noise((3, 4, 8, 8), "v")
    step = kernel(x, v, sigmas[4], sigmas[5], 0.7)
    action = gaussian.sample(step.mean, step.std, noise.keyed_noise((3, 4, 8, 8), "n")).to(storage)
    recorded = gaussian.log_prob(action, step.mean, step.std)
    again = kernel(x.clone(), v.clone().requires_grad_(), sigmas[4], sigmas[5], 0.7)
    replayed = gaussian.log_prob(action, again.mean, again.std)
    assert torch.equal((replayed - recorded).exp(), torch.ones(3))


@BY_NAME
def test_samples_at_different_steps_share_a_batch(kernel) -> None:
    sigmas = shifted_grid(10, 3.0)
    index = torch.tensor([0, 7, 3, 8])
    x, v, y = (noise.keyed_noise((4, 3, 5, 5), name) for name in "xvy")
    together = kernel(x, v, sigmas[index], sigmas[index + 1], 0.7)
    assert together.std.shape == (4, 1, 1, 1)
    for row, i in enumerate(index.tolist()):
        alone = kernel(x[row : row + 1], v[row : row + 1], sigmas[i], sigmas[i + 1], 0.7)
        assert torch.equal(alone.mean[0], together.mean[row]) and torch.equal(alone.std[0], together.std[row])
        want = gaussian.log_prob(y[row : row + 1], alone.mean, alone.std)[0]
        assert gaussian.log_prob(y, together.mean, together.std)[row] == pytest.approx(want.item(), abs=1e-6)


def test_the_step_is_made_in_float32_whatever_the_model_gives() -> None:
    x, v = noise.keyed_noise((2, 8), "x"), noise.keyed_noise((2, 8), "v")
    for kind in (torch.bfloat16, torch.float16):
        low = flow_sde(x.to(kind), v.to(kind), 0.8, 0.6, 0.7)
        same = flow_sde(x.to(kind).float(), v.to(kind).float(), 0.8, 0.6, 0.7)
        assert low.mean.dtype == low.std.dtype == torch.float32
        assert torch.equal(low.mean, same.mean)
    assert flow_sde(x, v.double(), 0.8, 0.6, 0.7).mean.dtype == torch.float64


@pytest.mark.parametrize(("sigma", "sigma_next"), [(0.5, 0.6), (0.0, 0.0), (1.1, 0.5), (14.6, 9.7), (0.5, -0.1)])
def test_times_off_the_straight_path_are_refused(sigma: float, sigma_next: float) -> None:
    x, v = pair(0)
    for kernel in (kernels.ode, partial(kernels.flow_cps, noise_level=0.5)):
        with pytest.raises(ValueError, match="flow-matching"):
            kernel(x, v, sigma, sigma_next)


def test_wrong_arguments_are_refused() -> None:
    x, v = pair(0)
    with pytest.raises(ValueError, match="second value"):
        kernels.flow_sde(x, v, 1.0, 0.9, noise_level=0.7, sigma_max=1.0)
    with pytest.raises(ValueError, match="one value|per sample"):
        kernels.ode(x, v, torch.tensor([0.5, 0.5, 0.5]), 0.4)
    with pytest.raises(ValueError, match="prediction_type"):
        kernels.ddim(x, v, 0.5, 0.6, eta=1.0, prediction_type="flow")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha_bar must be"):
        kernels.ddim(x, v, 0.6, 0.5, eta=1.0, prediction_type="epsilon")
    with pytest.raises(ValueError, match="zero terminal SNR"):
        kernels.ddim(x, v, 0.0, 0.5, eta=1.0, prediction_type="epsilon")


def test_names_offered_to_configurations_exist() -> None:
    assert all(callable(getattr(kernels, name)) for name in kernels.FLOW_KERNELS)


# DDIM ----------------------------------------------------------------------------------------------------------------


class NoFloat64OnTheWay(TorchDispatchMode):
    """As on MPS, which has no float64: no conversion from or to it together with a change of device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            assert torch.float64 not in (args[0].dtype, kwargs.get("dtype")), "float64 between two devices"
        return func(*args, **kwargs)


@pytest.mark.parametrize("times", ["float", "one", "each"])
def test_no_float64_leaves_the_host(times: str) -> None:
    x, v = (tensor.float() for tensor in pair(0))
    sigma = {"float": 0.75, "one": torch.tensor(0.75), "each": torch.tensor([0.75, 0.5])}[times]
    with NoFloat64OnTheWay():
        steps = [kernel(x, v, sigma, sigma / 2, 0.7) for kernel in STOCHASTIC.values()]
        steps.append(kernels.ddim(x, v, sigma / 2, sigma, eta=1.0, prediction_type="epsilon"))
        for step in steps:
            density = gaussian.log_prob(x, step.mean, step.std)
            assert {step.mean.dtype, step.std.dtype, density.dtype} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_step_on_the_device_is_the_step_on_the_host(where: str) -> None:
    """States on the device, times on either: same transition, same density."""
    sigmas, index = shifted_grid(10, 3.0).to(where), torch.tensor([0, 4, 8], device=where)
    x, v, y = (noise.keyed_noise((3, 4, 16, 16), name) for name in "xvy")
    for name, kernel in STOCHASTIC.items():
        host = kernel(x, v, sigmas.cpu()[index.cpu()], sigmas.cpu()[index.cpu() + 1], 0.7)
        step = kernel(x.cuda(), v.cuda(), sigmas[index], sigmas[index + 1], 0.7)
        assert step.mean.is_cuda and step.std.is_cuda, name
        assert torch.equal(step.std.cpu(), host.std) and close(step.mean.cpu(), host.mean, 1e-6), name
        density = gaussian.log_prob(y.cuda(), step.mean, step.std).cpu()
        assert close(density, gaussian.log_prob(y, host.mean, host.std), 1e-6), name
