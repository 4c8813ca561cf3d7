"""GRPO-Guard: Flow-GRPO with ratios that are centred and scaled alike at all steps (arXiv 2510.22319).

As Flow-GRPO, but for the update. With mu_old the mean of the policy that sampled, s the std of the step:

    log r = s [log p_theta(x') - log p_old(x')] without its quadratic term (RatioNorm)
    L     = clipped surrogate of r, divided by the step in sigma (gradient reweighting)

docs/grpo_guard.md has the equations and curves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.methods.grpo_guard.settings import GRPOGuard
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import OldMeans, Tensors, actions_of, collect, penalised, replayed, update
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import SurrogateOutput, clipped_surrogate
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter


def train(run: DiffusionRun, settings: GRPOGuard) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        meter, steps = Meter(), Steps.of(run.config, settings, iteration)
        # 1, 2. Collect and score.
        rollouts = collect(run, settings, steps, scaled=True)
        # 3. Estimate.
        advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
        edges = estimate(run, settings, rollouts, steps, advantages, meter)
        # 4. Update.
        actions = actions_of(run, settings, rollouts, edges)
        means = OldMeans.of(run, settings, rollouts, actions)
        update(run, settings, rollouts, edges, loss, meter, actions=actions, further=means.known, seen=means.note)
        del rollouts, actions, means
        run.finish(meter.result() | steps.metrics)


def loss(settings: GRPOGuard, policy: Policy, given: Recorded) -> Tensors:
    """The guarded surrogate of one transition and its divergence from the reference, [B]."""
    new = replayed(settings, policy, given)
    old_mean = given["old_mean"] if "old_mean" in given else new.mean.detach()
    log_ratio = guard_log_ratio(given["next_state"], new.mean, old_mean, new.std)
    low, high = settings.clip_bounds
    step = new.step.sigma - new.step.sigma_next
    surrogate = guard_surrogate(log_ratio, given["advantage"], step, low, high)
    return penalised(settings, surrogate, new, given)


# GRPO-Guard: importance ratios that are comparable between the steps of a chain (arXiv 2510.22319).
#
# The log-ratio of a Gaussian step under the policy that sampled it has the mean -KL, and a spread that changes from
# step to step with 1 / s: the upper clip bound is rarely reached. The guarded log-ratio removes the mean and multiplies
# by s (ratio normalisation); the loss is then divided by the step size (gradient reweighting).
# Shapes: states and means [B, ...], std [B, 1, ...], delta a float, [] or [B]; log-ratios and advantages [B].


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
