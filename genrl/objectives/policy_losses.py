"""Policy-gradient losses on log-probabilities, and the reference KLs of the field under their own names.

Shapes: log-probabilities and advantages [B] (any one shape, elementwise); means and velocities [B, ...].
The losses are per sample: take their mean. A log-probability that is a mean over D elements makes every ratio here the
joint ratio to the power 1/D, which is why clip ranges of 1e-4 are common for images.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genrl.objectives import LARGEST_STALENESS_WEIGHT

Reduction = Literal["mean", "sum"]

LARGEST_LOG_RATIO = 80.0
"""Beyond e^88 a ratio is infinite in float32, and infinity times an advantage or a gradient of 0 is NaN."""


class SurrogateOutput(NamedTuple):
    """loss [B], ratio [B] and clipped [B] (bool: the clip is active, this sample has no gradient)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def gated_surrogate(ratio: Tensor, advantage: Tensor, far: Tensor) -> SurrogateOutput:
    """`-A rho`, and 0 where a step would lead further away of what is far already: A (rho - 1) > 0 and `far`, which
    `clipped` marks. ratio with gradient, advantage without, of one dtype; shapes that broadcast to the ratio's."""
    dropped = far & (advantage * (ratio.detach() - 1.0) > 0)
    # where, not a product: 0 times an infinite ratio would be NaN
    return SurrogateOutput(torch.where(dropped, 0.0, -advantage * ratio), ratio, dropped)


def importance_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """`exp(l - l_old)`, elementwise: 1 on policy, gradient through `log_prob` only."""
    return torch.exp(log_prob - old_log_prob.detach())


def staleness_weight(
    proximal_log_prob: Tensor, behaviour_log_prob: Tensor, *, largest: float = LARGEST_STALENESS_WEIGHT
) -> Tensor:
    """`w = pi_proximal / pi_behaviour` of a sample that older weights drew, elementwise, without gradient; 0 above
    `largest`: its reward is not learned from.

    A surrogate of `w A` whose ratio is to the proximal policy is decoupled PPO (arXiv 2110.00641, eq. 3): the clip is
    around the policy before the update and not around the one that drew. Of log-probabilities that are means over D
    numbers it is, as every ratio here, the weight of the sample to the power 1/D.
    """
    weight = torch.exp(proximal_log_prob.detach() - behaviour_log_prob.detach())
    # Dropped, not capped: a capped weight would still push by an action that the policy hardly makes any more.
    return torch.where(weight <= largest, weight, 0.0)


def truncated_weight(proximal_log_prob: Tensor, behaviour_log_prob: Tensor) -> Tensor:
    """`min(pi_proximal / pi_behaviour, 1)`, elementwise, without gradient: V-trace's weight (arXiv 1802.01561, eq. 1).

    In the place of `staleness_weight` where the ratio of a sample is wide: what older weights drew too often counts
    less, and nothing counts more than once, so the weights add little to the spread of the gradient.
    """
    return torch.exp((proximal_log_prob.detach() - behaviour_log_prob.detach()).clamp(max=0.0))


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_low: Tensor | float,
    clip_high: Tensor | float,
) -> SurrogateOutput:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`: PPO's objective (arXiv 1707.06347, eq. 7) as a loss.

    The per-step policy loss of DDPO (arXiv 2305.13301), Flow-GRPO (arXiv 2505.05470) and DanceGRPO (arXiv 2505.07818).
    The clip range may differ by sample: two tensors of the shape of the advantage (DynamicTreeRPO).
    A finite log-ratio above LARGEST_LOG_RATIO counts as that where it has no gradient: with an advantage of 0 or more.
    Raises ValueError for a negative clip range.
    """
    if bool(torch.as_tensor(clip_low).lt(0).any()) or bool(torch.as_tensor(clip_high).lt(0).any()):
        raise ValueError(f"a clip range cannot be negative, got {clip_low} below and {clip_high} above 1")
    log_ratio = log_prob - old_log_prob.detach()
    weight = advantage.detach().to(log_ratio.dtype)
    # With A < 0 the unclipped branch is the loss and wants its gradient, however large: only the other side is held.
    overflows = log_ratio.isfinite() & (log_ratio > LARGEST_LOG_RATIO)
    ratio = torch.exp(log_ratio.masked_fill(overflows & (weight >= 0), LARGEST_LOG_RATIO))
    lowest, highest = 1.0 - clip_low, 1.0 + clip_high
    clipped = torch.clamp(ratio, lowest, highest)  # type: ignore[arg-type]  # two numbers or two tensors
    # The maximum of two losses is the minimum of PPO's two objectives.
    loss = torch.maximum(-weight * ratio, -weight * clipped)
    # Where the maximum takes the clipped branch, which is constant: no gradient.
    too_high = (weight > 0) & (ratio > highest)
    too_low = (weight < 0) & (ratio < lowest)
    return SurrogateOutput(loss, ratio, (too_high | too_low).detach())


def score_function_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """`-A l`, elementwise; its gradient is the policy gradient: DDPO-SF (arXiv 2305.13301), REINFORCE for each step.

    Unbiased for one update of the policy that sampled; later updates of one iteration need `clipped_surrogate`.
    """
    return -advantage.detach().to(log_prob.dtype) * log_prob


def kl_gaussian(
    mean: Tensor, ref_mean: Tensor, std: Tensor, *, eps: float = 0.0, reduction: Reduction = "mean"
) -> Tensor:
    """`(mu - mu_ref)^2 / (2 s^2 + eps)`: the exact KL of two transitions of std s from one state (eps = 0), as in
    DDPM's bound (arXiv 2006.11239, eq. 8).

    s is the transition std, [B, 1, ..., 1]. Per dimension ("mean") or of the whole step ("sum"); Flow-GRPO's Wan path
    and TempFlow-GRPO use it. Returns [B]; gradient through `mean` only.
    Raises ValueError where s is 0: such a step is not an action.
    """
    if not bool((std > 0).all()):
        raise ValueError("a deterministic step (std 0) is not an action and has no KL: leave it out")
    squares = _squares(mean, ref_mean)
    return _reduce(squares / (2.0 * std.to(squares) ** 2 + eps), reduction)


def kl_gaussian_dt(
    mean: Tensor,
    ref_mean: Tensor,
    std: Tensor,
    delta: Tensor | float,
    *,
    eps: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`(mu - mu_ref)^2 / (2 b^2 + eps)`, b = s / sqrt(delta): delta = sigma - sigma' times the exact KL (eps = 0).

    What Flow-GRPO's code computes (repository issue 78); it weights small steps less than `kl_gaussian`. PaCo-RL has
    eps = 1e-7. delta a float, [] or [B]; the rest as in `kl_gaussian`.
    """
    step = torch.as_tensor(delta, dtype=std.dtype, device=std.device).reshape(-1, *[1] * (std.dim() - 1))
    return kl_gaussian(mean, ref_mean, std / step.sqrt(), eps=eps, reduction=reduction)


def kl_mean_square(mean: Tensor, ref_mean: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """`(mu - mu_ref)^2`, no variance: Adv-GRPO's KL and Flow-Factory's "x-based". [B]; gradient through `mean` only."""
    return _reduce(_squares(mean, ref_mean), reduction)


def kl_velocity(velocity: Tensor, ref_velocity: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """`(v - v_ref)^2`, [B]: Flow-Factory's "v-based" KL, DiffusionNFT's regulariser (arXiv 2509.16117)."""
    return _reduce(_squares(velocity, ref_velocity), reduction)


def kl_x_prediction(
    velocity: Tensor, ref_velocity: Tensor, sigma: Tensor | float, *, reduction: Reduction = "mean"
) -> Tensor:
    """`(x0 - x0_ref)^2` of the predicted data `x0 = x - sigma v` at one state: sigma^2 times `kl_velocity`. [B].

    sigma a float, [] or [B] in [0, 1].
    """
    squares = kl_velocity(velocity, ref_velocity, reduction=reduction)
    return torch.as_tensor(sigma, dtype=squares.dtype, device=squares.device) ** 2 * squares


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """`(l - l_ref)^2 / 2`, elementwise: the k2 estimate of KL(policy || reference) from one sample of the policy.

    Its gradient is an unbiased one of the KL. MixGRPO's code (arXiv 2507.21802) takes it to the policy that sampled.
    """
    return 0.5 * (log_prob - ref_log_prob.detach()).square()


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """`exp(d) - d - 1`, d = l_ref - l, elementwise: never negative, unbiased for KL(policy || reference) in value.

    The estimate of GRPO (arXiv 2402.03300, eq. 4) and of PromptRL's language model.
    """
    difference = ref_log_prob.detach() - log_prob
    return difference.expm1() - difference


def _squares(value: Tensor, reference: Tensor) -> Tensor:
    """Squared differences in float32, float64 if either is; nothing flows into the reference."""
    dtype = torch.promote_types(torch.promote_types(value.dtype, reference.dtype), torch.float32)
    return (value.to(dtype) - reference.detach().to(dtype)).square()


def _reduce(elements: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "mean":
        return elements.flatten(1).mean(dim=1)
    if reduction == "sum":
        return elements.flatten(1).sum(dim=1)
    raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
