"""On-policy distillation: the model draws, frozen teachers say where each step should have gone (arXiv 2605.15055).

One iteration, with mu the mean of a step from a visited state, mu_T the teacher's from the same state, s the std:

1. collect   samples x_0 by the model's own sampler, its states kept
2. route     each row to its teacher, who replays the visited states under its own guidance and prompt
3. update    L = <(mu - mu_T)^2> / (2 s^2), the exact KL of the step to the teacher's (`weight` has others); where
             reward_coef is above 0, beside Flow-GRPO's loss on the rewards

Every row has signal, so none is left out for want of spread or of a score. docs/opd.md has the equations.
"""

from __future__ import annotations

from torch import Tensor

from genrl.diffusion.methods.opd.settings import OPD
from genrl.diffusion.methods.opd.teaching import Teachers
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Replayed
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.edges import estimate
from genrl.diffusion.steps.plans import Steps, Tensors, replayed
from genrl.diffusion.steps.transitions import Action, collect, penalised, update
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import clipped_surrogate, kl_gaussian, kl_gaussian_dt, kl_mean_square
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter, Results


def train(run: DiffusionRun, settings: OPD) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    teachers = Teachers(run, settings)
    try:
        for iteration in run.iterations():
            meter, steps = Meter(), Steps.of(run.config, settings, iteration)
            # 1. Collect, and score: without a coefficient, only to be watched.
            rollouts = collect(run, settings, steps)
            advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
            by_reward = settings.reward_coef * advantages
            edges = estimate(run, settings, rollouts, steps, by_reward, meter, grouped=settings.compares is not None)
            edges = edges._replace(moves=edges.weight > 0)

            def note(action: Action, results: Results, meter: Meter = meter) -> None:
                for name in {teachers.of(slot).name for slot in action.slots}:
                    of_it = [teachers.of(slot).name == name for slot in action.slots]
                    distance = results["distill"].detach()
                    meter.add(f"distill/{name}", distance, distance.new_tensor(of_it))

            # 2, 3. Route and update.
            update(run, settings, rollouts, edges, loss, meter, further=teachers.means, seen=note)
            del rollouts
            run.finish(meter.result() | steps.metrics)
    finally:
        teachers.close()


def loss(settings: OPD, policy: Policy, given: Recorded) -> Tensors:
    """The distance of one transition to its teacher's, beside the clipped surrogate of the rewards, [B]."""
    new = replayed(settings, policy, given)
    low, high = settings.clip_bounds
    surrogate = clipped_surrogate(new.log_prob, given["old_log_prob"], given["advantage"], low, high)
    far = distance(settings, new, given["teacher_mean"])
    return penalised(settings, surrogate, new, given, {"distill": (1.0, far)})


def distance(settings: OPD, new: Replayed, teacher_mean: Tensor) -> Tensor:
    """Of a step from the teacher's, [B]."""
    if settings.weight == "exact":
        return kl_gaussian(new.mean, teacher_mean, new.std)
    if settings.weight == "no_dt":
        return kl_gaussian_dt(new.mean, teacher_mean, new.std, new.step.sigma - new.step.sigma_next)
    return 0.5 * kl_mean_square(new.mean, teacher_mean)
