"""One denoising step as a Gaussian transition N(mean, std^2 I), and its density: every sampler that trainers learn by.

Straight path `x_sigma = (1 - sigma) x0 + sigma noise`: sigma = 1 is noise, sigma = 0 data, velocity = noise - data.
All kernels on it have one canonical form (sigma' is the next grid value, xi ~ N(0, I)):

    x' = c0 x0_hat + c1 x1_hat + s xi,   c0 = 1 - sigma',   x0_hat = x - sigma v,   x1_hat = x + (1 - sigma) v

so a kernel is its pair (c1, s). `s` is the standard deviation of the transition itself, the only one ever handed out
(the diffusion coefficient b of an SDE gives s = b sqrt(sigma - sigma')). s = 0 is a deterministic step: no
action; it has no density, and asking `log_prob`, the only density formula of the project, for one is an error.

Shapes: x, velocity [B, ...]; sigma, sigma_next, noise_level a float, [] or [B] (each sample at its own step).
Coefficients are computed in float64 on the CPU, the transition in float32 (float64 if x or velocity is).
Raised everywhere: ValueError where not 1 >= sigma > 0, sigma >= sigma_next >= 0, or a vector is not one value per
sample.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scalar = Tensor | float
PredictionType = Literal["epsilon", "v_prediction", "sample"]
Reduction = Literal["mean", "sum"]

FLOW_KERNELS = ("ode", "flow_sde", "dance_sde", "wan_sde", "flow_cps", "flow_ddim")
"""Names of the straight-path kernels that a configuration may ask for."""

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_ROUNDING = 1e-6  # grids made in float32 may exceed 1 by an ulp


class _Moments(NamedTuple):
    mean: Tensor
    std: Tensor


class Transition(_Moments):
    """N(mean, std^2 I): mean [B, ...], std [B, 1, ..., 1], the transition std (0 = deterministic, not an action)."""

    random: bool | None = None
    """Whether all of std is above 0, as the host knows it: reading std would wait for the device. None = not said."""

    @classmethod
    def known(cls, mean: Tensor, std: Tensor, random: bool | None) -> Transition:
        """One of which the host knows whether it is random."""
        made = cls(mean, std)
        made.random = random
        return made


def ode(x: Tensor, velocity: Tensor, sigma: Scalar, sigma_next: Scalar) -> Transition:
    """Euler step of the probability-flow ODE, `x' = x - (sigma - sigma') v`: c1 = sigma', s = 0.

    The ODE is eq. 13 of arXiv 2011.13456. x, velocity [B, ...]; levels a float, [] or [B].
    """
    t, t_next = _times(sigma, sigma_next)
    return _transition(x, velocity, t, t_next, c1=t_next, std=torch.zeros_like(t_next))


def flow_sde(
    x: Tensor, velocity: Tensor, sigma: Scalar, sigma_next: Scalar, *, noise_level: Scalar, sigma_max: Scalar
) -> Transition:
    """Flow-SDE of Flow-GRPO (arXiv 2505.05470, its ODE-to-SDE conversion): `b = a sqrt(sigma / (1 - sigma))`.

    b is the diffusion coefficient, a = noise_level (their default .7). At sigma = 1 the denominator is clamped to
    `1 - min(sigma, sigma_max)`, sigma_max being the *second* value of the full grid, which makes the first
    transition's std exactly a. (Their code tests sigma == 1; the minimum is the same there and also holds on grids that
    start at 1 - 1e-6.) x, velocity [B, ...]; levels, noise_level and sigma_max a float, [] or [B].
    Raises ValueError unless 0 < sigma_max < 1.
    """
    t, t_next = _times(sigma, sigma_next)
    clamp = _host(sigma_max)
    if not bool(((clamp > 0) & (clamp < 1)).all()):
        raise ValueError(f"sigma_max must lie between 0 and 1: pass the grid's second value, not {clamp.tolist()}")
    b = _host(noise_level) * (t / (1.0 - torch.minimum(t, clamp))).sqrt()
    return _euler_maruyama(x, velocity, t, t_next, b)


def dance_sde(x: Tensor, velocity: Tensor, sigma: Scalar, sigma_next: Scalar, *, noise_level: Scalar) -> Transition:
    """Dance-SDE of DanceGRPO (arXiv 2505.07818): the same SDE with a constant coefficient `b = eta = noise_level` (.3).

    The score's 1/sigma makes the last step inject too much noise: leave it deterministic. x, velocity [B, ...]; the
    rest a float, [] or [B].
    """
    t, t_next = _times(sigma, sigma_next)
    return _euler_maruyama(x, velocity, t, t_next, _host(noise_level))


def wan_sde(
    x: Tensor, velocity: Tensor, sigma: Scalar, sigma_next: Scalar, *, sigma_max: Scalar, sigma_last: Scalar = 0.0
) -> Transition:
    """The SDE of Flow-GRPO's Wan script: `b = sigma_last + (sigma_max - sigma_last) sigma`, no free noise level.

    sigma_max is the second value of the full grid, sigma_last its final one. x, velocity [B, ...]; the rest a float, []
    or [B].
    """
    t, t_next = _times(sigma, sigma_next)
    last = _host(sigma_last)
    return _euler_maruyama(x, velocity, t, t_next, last + (_host(sigma_max) - last) * t)


def flow_cps(x: Tensor, velocity: Tensor, sigma: Scalar, sigma_next: Scalar, *, noise_level: Scalar) -> Transition:
    """Coefficients-preserving sampling, Flow-CPS (arXiv 2509.05952): c1 = sigma' cos(a pi/2), s = sigma' sin(a pi/2).

    a = noise_level in [0, 1]; 0 is the ODE, 1 replaces all noise. No sqrt(step): the noise of a step does not shrink as
    the grid gets finer, and the final marginal keeps a bias. The last step (sigma' = 0) is deterministic.
    """
    t, t_next = _times(sigma, sigma_next)
    angle = _host(noise_level) * (math.pi / 2.0)
    return _transition(x, velocity, t, t_next, c1=t_next * angle.cos(), std=t_next * angle.sin())


def flow_ddim(x: Tensor, velocity: Tensor, sigma: Scalar, sigma_next: Scalar, *, noise_level: Scalar) -> Transition:
    """DDIM (arXiv 2010.02502, eq. 12 and 16) on the straight path, alpha = 1 - sigma; noise_level = eta in [0, 1].

    `s = eta sigma' sqrt(1 - (sigma' (1 - sigma) / (sigma (1 - sigma')))^2)`, c1 = sqrt(sigma'^2 - s^2). eta = 1 is
    first-order SDE-DPM-Solver++; eta = 0 the ODE. The last step (sigma' = 0) is deterministic.
    """
    t, t_next = _times(sigma, sigma_next)
    # At sigma = sigma' = 1 the share is 0 / 0: `where` computes both sides, and the clamp keeps NaN out of the unused
    # one.
    noise_kept = torch.where(t_next < 1, t_next * (1.0 - t) / (t * (1.0 - t_next).clamp(min=1e-12)), 1.0)
    std = _host(noise_level) * t_next * (1.0 - noise_kept**2).clamp(min=0.0).sqrt()
    return _transition(x, velocity, t, t_next, c1=(t_next**2 - std**2).clamp(min=0.0).sqrt(), std=std)


def ddim(
    x: Tensor,
    model_output: Tensor,
    alpha_bar: Scalar,
    alpha_bar_next: Scalar,
    *,
    eta: Scalar,
    prediction_type: PredictionType,
    clip_range: float | None = None,
    threshold: tuple[float, float] | None = None,
    recompute_noise: bool = False,
) -> Transition:
    """DDIM step (arXiv 2010.02502, eq. 12 and 16), the policy of DDPO (arXiv 2305.13301); eta = 1 is ancestral DDPM.

    `var = (1 - ab') / (1 - ab) (1 - ab / ab')`, s = eta sqrt(var), mean = sqrt(ab') x0_hat + sqrt(1 - ab' - s^2) e_hat;
    ab = alpha_bar at the present timestep, ab' = alpha_bar_next at the next one (0 <= ab <= ab' <= 1, ab < 1).

    x, model_output [B, ...]; alpha_bars and eta a float, [] or [B]. x0_hat is eq. 9 for a prediction of the noise.
    clip_range: clamp x0_hat to +-clip_range. threshold (ratio, max): dynamic thresholding by the per-sample quantile,
    used instead of clip_range. e_hat is that of the unclipped prediction unless recompute_noise.
    Latent-diffusion models use none of the three.
    """
    dtype = compute_dtype(x, model_output)
    x, output = x.to(dtype), model_output.to(dtype)
    ab, ab_next = _alpha_bars(alpha_bar, alpha_bar_next, prediction_type)
    signal, noise = (per_sample(c.sqrt(), x, dtype) for c in (ab, 1.0 - ab))
    if prediction_type == "epsilon":
        clean, noise_hat = (x - noise * output) / signal, output
    elif prediction_type == "v_prediction":
        clean, noise_hat = signal * x - noise * output, signal * output + noise * x
    else:
        clean, noise_hat = output, (x - signal * output) / noise
    if threshold is not None:
        clean = _dynamic_threshold(clean, *threshold)
    elif clip_range is not None:
        clean = clean.clamp(-clip_range, clip_range)
    # The clamped data and the old noise no longer add up to x.
    if recompute_noise:
        noise_hat = (x - signal * clean) / noise
    # Rounding may leave a step between two equal levels below 0, and its root NaN.
    variance = ((1.0 - ab_next) / (1.0 - ab) * (1.0 - ab / ab_next)).clamp(min=0.0)
    std = _host(eta) * variance.sqrt()
    direction = (1.0 - ab_next - std**2).clamp(min=0.0).sqrt()
    mean = per_sample(ab_next.sqrt(), x, dtype) * clean + per_sample(direction, x, dtype) * noise_hat
    return Transition.known(mean, *_spread(std, x, dtype))


def _euler_maruyama(x: Tensor, velocity: Tensor, t: Tensor, t_next: Tensor, b: Tensor) -> Transition:
    """`dx = (v + b^2 x1_hat / (2 sigma)) dsigma + b dw` over one step: the score of the path is -x1_hat / sigma.

    The reverse-time SDE of arXiv 2011.13456, eq. 6.
    """
    step = t - t_next
    return _transition(x, velocity, t, t_next, c1=t_next - b**2 * step / (2.0 * t), std=b * step.sqrt())


def _transition(x: Tensor, velocity: Tensor, t: Tensor, t_next: Tensor, *, c1: Tensor, std: Tensor) -> Transition:
    """The canonical form, gathered by x and velocity: two multiplications, and only `velocity` keeps a graph."""
    dtype = compute_dtype(x, velocity)
    c0 = 1.0 - t_next
    on_x, on_velocity = per_sample(c0 + c1, x, dtype), per_sample((1.0 - t) * c1 - t * c0, x, dtype)
    return Transition.known(on_x * x.to(dtype) + on_velocity * velocity.to(dtype), *_spread(std, x, dtype))


def transition_of(x: Tensor, mean: Tensor, std: Scalar) -> Transition:
    """What a kernel of a user's own returned, as the others do. mean: as x [B, ...]; std: a float, [], [B] or
    [B, 1, ..., 1]. Raises ValueError for other shapes, and for a std that is negative or not finite."""
    if mean.shape != x.shape:
        raise ValueError(f"the kernel's mean has the shape {tuple(mean.shape)} where the state has {tuple(x.shape)}")
    dtype = compute_dtype(x, mean)
    spread = torch.as_tensor(std).detach().to(x.device, dtype)
    if spread.numel() not in (1, x.shape[0]):
        raise ValueError(f"the kernel's std is one number per sample, [{x.shape[0]}], not {tuple(spread.shape)}")
    if not bool(((spread >= 0) & spread.isfinite()).all()):
        raise ValueError(f"the kernel's std must be 0 or more and finite, got {spread.flatten().tolist()}")
    column = spread.reshape(-1, *[1] * (x.dim() - 1)).expand(x.shape[0], *[1] * (x.dim() - 1))
    return Transition.known(mean.to(dtype), column, bool((spread > 0).all()))


def _spread(std: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """A transition's std on the device of x, and whether all of it, on the host, is above 0."""
    return per_sample(std, x, dtype).expand(x.shape[0], *[1] * (x.dim() - 1)), bool((std > 0).all())


def _host(value: Scalar) -> Tensor:
    """A few scalars are cheaper and exact on the CPU in float64, and some accelerators have no float64."""
    if isinstance(value, Tensor):
        return value.detach().cpu().double()  # in this order: MPS cannot convert to float64 on the way
    return torch.tensor(value, dtype=torch.float64)


def _times(sigma: Scalar, sigma_next: Scalar) -> tuple[Tensor, Tensor]:
    t, t_next = _host(sigma), _host(sigma_next)
    if not bool(((t > 0) & (t <= 1 + _ROUNDING)).all() and ((t_next >= 0) & (t_next <= t)).all()):
        raise ValueError(
            "a denoising step must go from sigma to a smaller sigma_next with 1 >= sigma > 0 and sigma_next >= 0; got "
            f"sigma {t.tolist()}, sigma_next {t_next.tolist()} (is the grid a flow-matching one?)"
        )
    # A level of 1 + 1e-7 would put the root of a negative number into flow_sde.
    return t.clamp(max=1.0), t_next.clamp(max=1.0)


def _alpha_bars(alpha_bar: Scalar, alpha_bar_next: Scalar, prediction_type: PredictionType) -> tuple[Tensor, Tensor]:
    if prediction_type not in ("epsilon", "v_prediction", "sample"):
        raise ValueError(f"prediction_type must be epsilon, v_prediction or sample, got {prediction_type!r}")
    ab, ab_next = _host(alpha_bar), _host(alpha_bar_next)
    if not bool(((ab >= 0) & (ab < 1) & (ab <= ab_next) & (ab_next > 0) & (ab_next <= 1)).all()):
        raise ValueError(
            "alpha_bar must be in [0, 1) and alpha_bar_next in [alpha_bar, 1]; got "
            f"{ab.tolist()} and {ab_next.tolist()}"
        )
    if prediction_type == "epsilon" and bool((ab == 0).any()):
        raise ValueError("an epsilon prediction says nothing about the data at alpha_bar = 0 (zero terminal SNR)")
    return ab, ab_next


def _dynamic_threshold(clean: Tensor, ratio: float, largest: float) -> Tensor:
    """Clamp each sample to its own quantile of |x0| and rescale to +-1 (Imagen, arXiv 2205.11487, section 2.3)."""
    quantile = clean.abs().reshape(clean.shape[0], -1).quantile(ratio, dim=1).clamp(min=1.0, max=largest)
    limit = quantile.view(-1, *[1] * (clean.dim() - 1))
    return torch.minimum(torch.maximum(clean, -limit), limit) / limit


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is float64, else float32: bf16 and fp16 are never computed in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def per_sample(value: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` (a float, [], [B] or already [B, ...]) on the device of `like` [B, ...], ready to broadcast against it.

    Raises ValueError where a vector is not one value per sample.
    """
    tensor = value.to(dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
    tensor = tensor.to(like.device)  # only now: MPS has no float64
    if tensor.dim() in (0, like.dim()):
        return tensor
    if tensor.dim() == 1 and tensor.shape[0] in (1, like.shape[0]):
        return tensor.view(-1, *[1] * (like.dim() - 1))
    raise ValueError(
        f"a value per sample must have shape [] or [{like.shape[0]}] beside samples of shape "
        f"{list(like.shape)}; got {list(tensor.shape)}"
    )


def reduce_elements(elements: Tensor, reduction: Reduction) -> Tensor:
    """[B, ...] -> [B]: "mean" or "sum" over the D elements of each sample, never over the batch."""
    flat = elements.reshape(elements.shape[0], -1)
    if reduction == "mean":
        return flat.mean(dim=1)
    if reduction == "sum":
        return flat.sum(dim=1)
    raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


def sample(mean: Tensor, std: Tensor, noise: Tensor) -> Tensor:
    """`mean + std noise`, [B, ...] in the dtype of `mean`: the next state for a standard normal `noise` [B, ...]."""
    return mean + std * noise.to(mean)


def log_prob(
    x: Tensor, mean: Tensor, std: Tensor | float, reduction: Reduction = "mean", *, checked: bool = False
) -> Tensor:
    """Log-density of `x` under N(mean, std^2 I), in nats, constants included.

    `log p = -(x - mean)^2 / (2 std^2) - ln std - ln(2 pi) / 2`, per element, then reduced over the D elements of a
    sample: "mean" is the convention of Flow-GRPO (arXiv 2505.05470, released code) and DDPO (arXiv 2305.13301,
    released code), so that the ratio of two policies is the joint ratio to the power 1/D; "sum" is the joint density.

    Shapes: x, mean [B, ...]; std a float, [], [B], [B, 1, ..., 1] or [B, ...]; returns [B].
    `x` is an action that was taken: it is detached, gradients flow through mean (and std) only.
    float32 whatever comes in, float64 if any of x and mean is.
    Raises ValueError where a std is not positive: a deterministic step has no log-probability. The check waits for the
    device; with `checked` the caller has made it.
    """
    dtype = compute_dtype(x, mean)
    scale = per_sample(std, mean, dtype)
    if not checked:
        _require_positive(scale)
    z = (x.detach().to(dtype) - mean.to(dtype)) / scale
    return reduce_elements(-0.5 * z * z - scale.log() - _HALF_LOG_TWO_PI, reduction)


def _require_positive(std: Tensor) -> None:
    if not bool((std > 0).all()):
        raise ValueError(
            "a transition with std 0 (an ODE step, noise level 0, or the last CPS/DDIM step) is not an action and has "
            f"no log-probability; leave it out of the trained steps (smallest std: {float(std.min())})"
        )
