"""Trust regions that know the Gaussian of a step. GRPO-Guard: importance ratios that are comparable between the steps
of a chain (arXiv 2510.22319). Flow-DPPO: the KL of a step in the place of a clip (arXiv 2606.11025).

The log-ratio of a Gaussian step under the policy that sampled it has the mean -KL, and a spread that changes from step
to step with 1 / s: the upper clip bound is rarely reached. The guarded log-ratio removes the mean and multiplies
by s (ratio normalisation); the loss is then divided by the step size (gradient reweighting).
Shapes: states and means [B, ...], std [B, 1, ...], delta a float, [] or [B]; log-ratios and advantages [B].
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.surrogates.policy_losses import SurrogateOutput, clipped_surrogate, importance_ratio


def guard_log_ratio(next_state: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """`<z (mu - mu_old)>`, z = (x' - mu_old) / s: the normalised log-ratio of the step to x', [B], mean over elements.

    Equal to `s (l - l_old) + <(mu - mu_old)^2> / (2 s)` with l the element mean of the Gaussian log-density, the form
    of the released code; but without its cancellation and its division by a small s. Per sample: the released code of
    Flow-GRPO and PaCo-RL averages the second term over the batch, which adds the same random offset to all samples.
    s is the transition std, `std_dev_t sqrt(delta)` in that code. Exactly 0 on policy; gradient through `mean` only.
    Valid for Gaussian transitions of one std (not for the log-probabilities of released CPS trainers).
    Raises ValueError where s is 0.
    """
    if not bool((std > 0).all()):
        raise ValueError("a deterministic step (std 0) is not an action and has no ratio: leave it out")
    dtype = torch.promote_types(torch.promote_types(mean.dtype, old_mean.dtype), torch.float32)
    old = old_mean.detach().to(dtype)
    z = (next_state.detach().to(dtype) - old) / std.detach().to(dtype)
    return (z * (mean.to(dtype) - old)).flatten(1).mean(dim=1)


def guard_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    delta: Tensor | float,
    clip_low: Tensor | float,
    clip_high: Tensor | float,
) -> SurrogateOutput:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) / delta`, [B]; r = exp(`guard_log_ratio`).

    delta = sigma - sigma': the mean of a Flow-SDE step moves by delta per unit of velocity: dividing by it weights the
    velocity error of all steps alike. Released clip ranges: 2e-6 (OCR, GenEval), 4e-6 (PickScore). Raises ValueError
    for a negative clip range or a step that does not denoise.
    """
    step = torch.as_tensor(delta, dtype=log_ratio.dtype, device=log_ratio.device)
    if not bool((step > 0).all()):
        raise ValueError(f"a denoising step lowers sigma: delta must be positive, got {step.tolist()}")
    plain = clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantage, clip_low, clip_high)
    return plain._replace(loss=plain.loss / step)


def divergence_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, divergence: Tensor, *, threshold: float
) -> SurrogateOutput:
    """`-A r`; 0 where the divergence has reached the threshold and A (r - 1) > 0: Flow-DPPO, [B].

    divergence: KL(new || old) of the transition, [B] (`kl_gaussian`). The sign of r - 1 says whether the update would
    lead further away; `clipped` marks those that are left out.
    """
    ratio = importance_ratio(log_prob, old_log_prob)
    weight = advantage.detach().to(ratio.dtype)
    dropped = (divergence.detach() >= threshold) & (weight * (ratio.detach() - 1.0) > 0)
    # where, not a product: 0 times an infinite ratio would be NaN
    return SurrogateOutput(torch.where(dropped, 0.0, -weight * ratio), ratio, dropped)
