"""The Gaussian transition: the only density formula of the project.

Every stochastic denoising step samples `x' ~ N(mean, std^2 I)`. A step whose std is 0 is not an action: it has
no density, and asking for one is an error.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum"]

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


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
