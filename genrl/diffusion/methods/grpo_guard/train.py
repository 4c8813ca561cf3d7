"""GRPO-Guard: Flow-GRPO with ratios that are centred and scaled alike at all steps (arXiv 2510.22319).

As Flow-GRPO, but for the update. With mu_old the mean of the policy that sampled, s the std of the step:

    log r = s [log p_theta(x') - log p_old(x')] without its quadratic term (RatioNorm)
    L     = clipped surrogate of r, divided by the step in sigma (gradient reweighting)

docs/grpo_guard.md has the equations and curves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.metering import Meter
from genrl.diffusion.methods.grpo_guard.settings import GRPOGuard
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.estimation import estimate
from genrl.diffusion.steps.records import replayed
from genrl.diffusion.steps.transitions import (
    Action,
    Results,
    actions_of,
    penalised,
    replayed_before,
    train_policy_gradient,
    trained_under,
    update,
    window_metrics,
)
from genrl.mdp.plan import SamplingPlan
from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.surrogates.guard import guard_log_ratio, guard_surrogate
from genrl.runtime.loop.recorded import Recorded


def train(run: DiffusionRun, settings: GRPOGuard) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    train_policy_gradient(run, settings, learn, scaled=True)


def learn(run: DiffusionRun, settings: GRPOGuard, rollouts: Rollouts, plan: SamplingPlan) -> dict[str, float]:
    """Steps 3 and 4 on the samples of one iteration; returns its metrics."""
    # 3. Estimate.
    meter = Meter()
    advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
    edges = estimate(run, settings, rollouts, plan, advantages, meter)
    actions = actions_of(run, settings, rollouts, edges)
    old_means = means_before(run, settings, rollouts, actions)

    # 4. Update. The first update's own evaluation is that of the policy that sampled.
    def old_mean(action: Action) -> dict[str, Tensor]:
        return {"old_mean": old_means[action.number]} if action.number in old_means else {}

    def keep_mean(action: Action, results: Results) -> None:
        old_means.setdefault(action.number, results["mean"].detach())

    update(run, settings, rollouts, edges, actions, loss, meter, further=old_mean, seen=keep_mean)
    return meter.result() | window_metrics(run, settings)


@torch.no_grad()
def means_before(
    run: DiffusionRun, settings: GRPOGuard, rollouts: Rollouts, actions: dict[int, list[Action]]
) -> dict[int, Tensor]:
    """Number of a transition -> its mean before the first update, [B, ...], but for those of the first update."""
    later = [m for micro_batches, _ in list(rollouts.updates(settings.updates))[1:] for m in micro_batches]
    found = {}
    for action in [action for micro_batch in later for action in actions[micro_batch.slots[0]]]:
        trajectory = action.piece.trajectory
        batch = trained_under(run.policy, settings, trajectory.batch)
        found[action.number] = replayed_before(run, trajectory, action.step, batch).mean
    return found


def loss(settings: GRPOGuard, policy: Policy, given: Recorded) -> Results:
    """The guarded surrogate of one transition and its divergence from the reference, [B]."""
    new = replayed(settings, policy, given)
    old_mean = given["old_mean"] if "old_mean" in given else new.mean.detach()
    log_ratio = guard_log_ratio(given["next_state"], new.mean, old_mean, new.std)
    low, high = settings.clip_bounds
    step = new.step.sigma - new.step.sigma_next
    surrogate = guard_surrogate(log_ratio, given["advantage"], step, low, high)
    return penalised(settings, surrogate, new, given)
