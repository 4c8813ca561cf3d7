"""Flow-DPPO: Flow-GRPO whose trust region is a divergence instead of a clip of the ratio (arXiv 2606.11025).

As Flow-GRPO, but for the update. With mu_old the mean of the policy that sampled and s the std of the step:

    KL = <(mu - mu_old)^2> / (2 s^2), of the whole distribution, where a ratio is that of the one state that was drawn
    L  = 0 where KL >= tau and A (r - 1) > 0, else -A r

docs/flow_dppo.md has the equations and what is known of it.
"""

from __future__ import annotations

from torch import Tensor

from genrl.diffusion.methods.flow_dppo.settings import FlowDPPO
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import OldMeans, Tensors, actions_of, collect, penalised, replayed, update
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import SurrogateOutput, gated_surrogate, importance_ratio, kl_gaussian
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter


def train(run: DiffusionRun, settings: FlowDPPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        meter, steps = Meter(), Steps.of(run.config, settings, iteration)
        # 1, 2. Collect and score.
        rollouts = collect(run, settings, steps)
        # 3. Estimate.
        advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
        edges = estimate(run, settings, rollouts, steps, advantages, meter)
        # 4. Update.
        actions = actions_of(run, settings, rollouts, edges)
        means = OldMeans.of(run, settings, rollouts, actions)
        update(run, settings, rollouts, edges, loss, meter, actions=actions, further=means.known, seen=means.note)
        del rollouts, actions, means
        run.finish(meter.result() | steps.metrics)


def loss(settings: FlowDPPO, policy: Policy, given: Recorded) -> Tensors:
    """The masked surrogate of one transition and its divergence from the reference, [B]."""
    new = replayed(settings, policy, given)
    old_mean = given["old_mean"] if "old_mean" in given else new.mean.detach()
    moved = kl_gaussian(new.mean.detach(), old_mean, new.std)
    surrogate = divergence_surrogate(
        new.log_prob, given["old_log_prob"], given["advantage"], moved, threshold=settings.threshold
    )
    return penalised(settings, surrogate, new, given, {"old_kl": (0.0, moved)})


def divergence_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, divergence: Tensor, *, threshold: float
) -> SurrogateOutput:
    """`-A r`; 0 where the divergence has reached the threshold and A (r - 1) > 0: Flow-DPPO, [B].

    divergence: KL(new || old) of the transition, [B] (`kl_gaussian`). The sign of r - 1 says whether the update would
    lead further away; `clipped` marks those that are left out.
    """
    ratio = importance_ratio(log_prob, old_log_prob)
    return gated_surrogate(ratio, advantage.detach().to(ratio.dtype), divergence.detach() >= threshold)
