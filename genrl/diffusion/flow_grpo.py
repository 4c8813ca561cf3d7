"""Flow-GRPO: policy gradient on the steps of the sampler (arXiv 2505.05470), and what became of it.

One iteration, with the paper's symbols:

1. collect   G samples x_0 of each prompt c from pi_old, every (windowed) step drawn from N(mu, s^2 I)
2. score     R(x_0, c)
3. estimate  A_i = (R_i - mean_G R) / std, the group-relative advantage                              (eq. 4)
4. update    r_i = p_theta(x_{t-1} | x_t, c) / p_old(x_{t-1} | x_t, c), clipped surrogate, KL         (eq. 5)

Settings make it Dance-GRPO (`kernel: dance_sde`), Flow-CPS (`flow_cps`), DDPO-style training of an epsilon model
(`ddim`) or Flow-GRPO-Fast / MixGRPO's window (`window`). docs/flow_grpo.md has the equations, metrics and curves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.config import FlowGRPO
from genrl.diffusion.metering import Meter
from genrl.diffusion.policy import Batch, Kernel, Replayed
from genrl.diffusion.rollout import MicroBatch, Rollouts
from genrl.diffusion.session import Session
from genrl.mdp.kernels import FLOW_KERNELS
from genrl.mdp.schedules import window_steps
from genrl.objectives.advantages import group_advantages, group_statistics
from genrl.objectives.policy_losses import (
    clipped_surrogate,
    importance_ratio,
    kl_gaussian,
    kl_gaussian_dt,
    kl_mean_square,
    kl_velocity,
)


def train(session: Session, settings: FlowGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    kernel = choose_kernel(session, settings)
    checked = False
    for iteration in session.iterations():
        steps = stochastic_steps(settings, session.config.sampling.num_inference_steps, session.config.seed, iteration)
        # 1, 2. Collect and score.
        rollouts = session.collect(partial(session.policy.roll_out, kernel=kernel, stochastic=steps))
        if not checked:
            check_on_policy(session, settings, rollouts)
            checked = True
        metrics = learn(session, settings, rollouts)
        del rollouts
        session.finish(metrics | {"window/first": float(steps[0]), "window/size": float(len(steps))})


def learn(session: Session, settings: FlowGRPO, rollouts: Rollouts) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    policy, weights = session.policy, session.weights
    old_log_probs = old_policy(session, settings, rollouts)

    # 3. Estimate.
    advantages = group_advantages(
        rollouts.total, rollouts.group, scale=settings.advantage_scale, clip=settings.advantage_clip
    )
    meter = Meter()
    meter.add_groups(group_statistics(rollouts.total, rollouts.group), advantages, settings.advantage_clip)

    # 4. Update.
    low, high = settings.clip_bounds
    for _ in range(settings.inner_epochs):
        for micro_batches, num_samples in rollouts.updates(settings.updates_per_iteration):
            for micro_batch in micro_batches:
                trajectory, batch = micro_batch.trajectory, judged_under(settings, micro_batch.batch)
                advantage = advantages[micro_batch.slots].to(policy.device)
                for i, old_log_prob in old_log_probs[micro_batch.slots[0]].items():
                    reference = None
                    if settings.kl_weight > 0:
                        with torch.no_grad(), weights.reference():
                            reference = policy.replay(trajectory, i, batch)
                    new = policy.replay(trajectory, i, batch)
                    surrogate = clipped_surrogate(new.log_prob, old_log_prob, advantage, low, high)
                    loss = surrogate.loss
                    if reference is not None:
                        kl = reference_kl(settings.kl, new, reference)
                        loss = loss + settings.kl_weight * kl
                        meter.add("kl", kl)
                    loss = loss * (advantage != 0)  # no score, or a group without spread: no update
                    session.backward(
                        loss,
                        batch,
                        {
                            "step": torch.tensor(i),
                            "state": trajectory.states[i],
                            "next_state": trajectory.next_states[i],
                            "advantage": advantage,
                            "old_log_prob": old_log_prob,
                            "model_output": new.model_output,
                            "log_prob": new.log_prob,
                        },
                        num_samples=num_samples,
                        passes=len(trajectory.log_probs),
                    )
                    meter.add_surrogate(surrogate, advantage)
                    meter.add("loss", loss)
            meter.add("grad_norm", torch.tensor([session.step()]))
    return meter.result()


def choose_kernel(session: Session, settings: FlowGRPO) -> Kernel:
    """The configured transition. Raises ValueError where it is not one for what the model predicts."""
    is_flow = session.policy.head.parametrisation == "flow"
    if is_flow == (settings.kernel == "ddim"):
        predicts = "a velocity (flow matching)" if is_flow else session.policy.prediction_type
        legal = ", ".join(FLOW_KERNELS[1:]) if is_flow else "ddim"
        raise ValueError(
            f"trainer.kernel: {settings.kernel} is no transition for {session.config.model.path}, which predicts "
            f"{predicts}; use {legal}"
        )
    return Kernel(settings.kernel, settings.noise_level or 0.0)


def stochastic_steps(settings: FlowGRPO, num_steps: int, seed: int, iteration: int) -> range:
    """The steps that are actions in this iteration: the window, or all but the last, which is deterministic."""
    if settings.window is None:
        return range(num_steps - 1)
    window = settings.window
    return window_steps(window.size, window.low, window.high or num_steps - 1, seed=seed, iteration=iteration)


def judged_under(settings: FlowGRPO, batch: Batch) -> Batch:
    """The conditions of the policy that is trained: those of sampling, or the same without guidance."""
    if settings.guidance_in_training:
        return batch
    return replace(batch, sampling={**batch.sampling, "guidance_scale": 1.0})


@torch.no_grad()
def old_policy(session: Session, settings: FlowGRPO, rollouts: Rollouts) -> dict[int, dict[int, Tensor]]:
    """First slot of a micro-batch -> step -> log p_old, [B]. As recorded; or, where the trained policy goes without the
    guidance that sampled, evaluated before the first update under the conditions it is trained in."""
    recorded = {m.slots[0]: m.trajectory.log_probs for m in rollouts.mine.values()}
    if settings.guidance_in_training:
        return recorded
    return {
        m.slots[0]: {
            i: session.policy.replay(m.trajectory, i, judged_under(settings, m.batch)).log_prob
            for i in m.trajectory.log_probs
        }
        for m in rollouts.mine.values()
    }


def reference_kl(kind: str, new: Replayed, reference: Replayed) -> Tensor:
    """Distance of the policy from the reference at the same state, [B], by its configured name."""
    if kind == "gaussian":
        return kl_gaussian(new.mean, reference.mean, new.std)
    if kind == "gaussian_dt":
        return kl_gaussian_dt(new.mean, reference.mean, new.std, new.step.sigma - new.step.sigma_next)
    if kind == "mean_square":
        return kl_mean_square(new.mean, reference.mean)
    return kl_velocity(new.model_output, reference.model_output)


@torch.no_grad()
def check_on_policy(session: Session, settings: FlowGRPO, rollouts: Rollouts) -> None:
    """Replay the first micro-batch before any update: the ratio must be 1.

    An exact 1 passes in silence; a deviation below a tenth of the clip range passes with a warning; anything above
    raises RuntimeError in all processes, since the clip would cut numerical noise.
    """
    deviations = [torch.zeros(1)]
    first: MicroBatch | None = next(iter(rollouts.mine.values()), None)
    if first is not None:
        with session.policy.uncounted():
            for i, old in first.trajectory.log_probs.items():
                ratio = importance_ratio(session.policy.replay(first.trajectory, i).log_prob, old)
                deviations.append((ratio - 1.0).abs().cpu())
    everyone = gather_object([float(torch.cat(deviations).max())])
    problem = off_policy(float(torch.tensor(everyone).max()), min(settings.clip_bounds))  # tensor: NaN is the largest
    if problem is not None:
        session.progress.say(problem)


def off_policy(worst: float, clip: float) -> str | None:
    """What to say of the largest |ratio - 1| before the first update. Raises RuntimeError above a tenth of `clip`."""
    if worst == 0.0:
        return None
    found = f"before the first update the ratio of the replayed to the recorded policy is off 1 by {worst:.3g}"
    if worst > clip / 10 or math.isnan(worst):
        raise RuntimeError(
            f"{found}, more than a tenth of trainer.clip_range ({clip:g}): training does not replay what sampling "
            "did. Usual causes: a pipeline option that depends on the position in the loop (skip-layer guidance, "
            "guidance intervals: take it out of sampling.pipeline_args), low precision (model.dtype float32 or "
            "float16 instead of bfloat16), kernels that are not deterministic. Or widen trainer.clip_range."
        )
    return f"{found}; below a tenth of the clip range ({clip:g}): rounding of the kernels in use"
