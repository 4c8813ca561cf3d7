"""GRPO-Guard: Flow-GRPO with ratios that are centred and scaled alike at all steps (arXiv 2510.22319).

As Flow-GRPO, but for the update. With mu_old the mean of the policy that sampled, s the std of the step:

    log r = s [log p_theta(x') - log p_old(x')] without its quadratic term (RatioNorm)
    L     = clipped surrogate of r, divided by the step in sigma (gradient reweighting)

docs/grpo_guard.md has the equations and curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from genrl.diffusion.methods.grpo_guard.settings import GRPOGuard
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.edges import estimate
from genrl.diffusion.steps.plans import Steps, Tensors, replayed
from genrl.diffusion.steps.transitions import (
    Action,
    Actions,
    actions_of,
    collect,
    penalised,
    replayed_before,
    step_of,
    update,
)
from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.surrogates.guard import guard_log_ratio, guard_surrogate
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
        means = means_before(run, settings, rollouts, actions)
        old_mean, keep_mean = partial(old_mean_of, means), partial(note_mean, means)
        update(run, settings, rollouts, edges, loss, meter, actions=actions, further=old_mean, seen=keep_mean)
        del rollouts, actions, means, old_mean, keep_mean
        run.finish(meter.result() | steps.metrics)


@torch.no_grad()
def means_before(run: DiffusionRun, settings: GRPOGuard, rollouts: Rollouts, actions: Actions) -> dict[int, Tensor]:
    """Number of a transition -> its mean before the first update, [B, ...], but for those of the first update."""
    later = [m for micro_batches, _ in list(rollouts.updates(settings.updates))[1:] for m in micro_batches]
    every = [action for micro_batch in later for action in actions[micro_batch.slots[0]]]
    return {one.number: replayed_before(run, step_of(run, settings, one.piece, one.step)).mean for one in every}


def old_mean_of(means: Mapping[int, Tensor], action: Action) -> dict[str, Tensor]:
    """What the loss reads of the policy that sampled; nothing in the first update, whose own evaluation is that."""
    return {"old_mean": means[action.number]} if action.number in means else {}


def note_mean(means: dict[int, Tensor], action: Action, results: Tensors) -> None:
    """Keep the evaluation of the first update for the epochs that follow."""
    means.setdefault(action.number, results["mean"].detach())


def loss(settings: GRPOGuard, policy: Policy, given: Recorded) -> Tensors:
    """The guarded surrogate of one transition and its divergence from the reference, [B]."""
    new = replayed(settings, policy, given)
    old_mean = given["old_mean"] if "old_mean" in given else new.mean.detach()
    log_ratio = guard_log_ratio(given["next_state"], new.mean, old_mean, new.std)
    low, high = settings.clip_bounds
    step = new.step.sigma - new.step.sigma_next
    surrogate = guard_surrogate(log_ratio, given["advantage"], step, low, high)
    return penalised(settings, surrogate, new, given)
