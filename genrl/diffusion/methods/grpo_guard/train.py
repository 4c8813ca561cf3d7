"""GRPO-Guard: Flow-GRPO with ratios that are centred and scaled alike at all steps (arXiv 2510.22319).

As Flow-GRPO, but for the update. With mu_old the mean of the policy that sampled, s the std of the step:

    log r = s [log p_theta(x') - log p_old(x')] without its quadratic term (RatioNorm)
    L     = clipped surrogate of r, divided by the step in sigma (gradient reweighting)

docs/grpo_guard.md has the equations and curves.
"""

from __future__ import annotations

from genrl.diffusion.methods.grpo_guard.settings import GRPOGuard
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.edges import estimate
from genrl.diffusion.steps.old_means import OldMeans
from genrl.diffusion.steps.plans import Steps, Tensors, replayed
from genrl.diffusion.steps.transitions import actions_of, collect, penalised, update
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
