"""CRD: centred reward distillation, the reward that a policy implies, up to a constant of the prompt (2603.14128).

One iteration, with u = eps - x_0, e = <(v(x_t, t) - u)^2> / <|v - u|> the matching error, sigma the paper's t:

1. collect   x_0 of each prompt by the deterministic solver, from the sampling policy
2. score     R(x_0, c)
3. estimate  a = clip(A, -5, 5) / 10 + 1/2 in [0, 1]
4. update    r_theta = e_old - e_theta, the implicit reward: R + constant(c) at the KL-regularised optimum. Minimise
             5 / beta [beta (r_theta - mean_g r_theta) - (a - mean_g a)]^2 + b(a) |v_theta - v_ref|^2,
             means over the prompt's group;  b(a) = m + a (b - m): good samples are held more tightly
5. follow    v_old with d = min(.25 + .005 n, .999), the sampling policy with d = min(.0075 (n - 75), .999)

docs/crd.md has the equations, metrics and figures.
"""

from __future__ import annotations

import torch

from genrl.diffusion.forward import noising
from genrl.diffusion.forward.noising import REFERENCE, Tensors, noised, under, update
from genrl.diffusion.methods.crd.settings import CRD
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator
from genrl.objectives.matching import (
    crd_loss,
    group_centres,
    implicit_reward,
    matching_error,
    nft_reward_weight,
    ramp,
    reward_adaptive_weight,
)
from genrl.objectives.policy_losses import kl_velocity
from genrl.runtime.loop.recorded import Recorded

OLD, SAMPLING = "old", "sampling"


def train(run: DiffusionRun, settings: CRD) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    weights = run.weights
    noising.require_flow(run)
    for name in (OLD, SAMPLING):
        if name not in weights.snapshots:  # a resumed run has them
            weights.snapshot(name)

    for _ in run.iterations():
        # 1, 2. Collect and score.
        rollouts = run.collect(noising.solved, under=SAMPLING)
        metrics = learn(run, settings, rollouts)
        del rollouts
        # 5. The old policy and the one that samples follow the one that is trained.
        step = run.loop.optimizer_steps
        old = ramp(step, start_value=0.25, slope=0.005, maximum=0.999)
        sampling = ramp(step, start_step=75, slope=0.0075, maximum=0.999)
        weights.blend(OLD, old)
        weights.blend(SAMPLING, sampling)
        run.finish(metrics | {"policy/old_decay": old, "policy/sampling_decay": sampling})


def learn(run: DiffusionRun, settings: CRD, rollouts: Rollouts) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    config = run.config
    num_draws = settings.timesteps_per_sample or max(1, config.sampling.num_inference_steps - 1)

    # 3. Estimate.
    advantages, meter = noising.estimate(settings, rollouts)
    aims = nft_reward_weight(advantages, settings.advantage_clip)  # in [0, 1]: what r_theta is to equal
    # Without a score there is nothing to distil: such a sample is a group of its own, whose loss is 0.
    alone = -1 - torch.arange(rollouts.num_samples)
    group = torch.where(rollouts.total.isnan(), alone, rollouts.group)

    # 4. Update.
    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors]:
        clean, batch, slots = micro_batch.final, micro_batch.batch, micro_batch.slots
        grid = micro_batch.sigmas[:-1]
        steps = torch.randperm(len(grid), generator=generator(config.seed, run.iteration, "levels", epoch))
        sigma = grid[steps[k]].to(clean)  # one level for all samples: implicit rewards are compared within it
        tensors = noised(clean, noising.own_noise(micro_batch, epoch, k), sigma)
        tensors |= {"aim": aims[slots].to(clean), "group": group[slots]}
        tensors["old"] = under(run, OLD, batch, tensors["noisy"], sigma)
        if settings.kl_weight > 0:
            tensors["reference"] = under(run, REFERENCE, batch, tensors["noisy"], sigma)
        return batch, tensors

    update(run, settings, rollouts, num_draws, prepare, loss, meter)
    return meter.result()


def loss(settings: CRD, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each sample, [B], of whole groups, and metrics."""
    velocity = policy.velocity(given.batch, given["noisy"], given["sigma"])
    target, aim, group = given["target"], given["aim"], given["group"]
    implicit = implicit_reward(velocity, given["old"], target)
    centres = group_centres(implicit, aim, group)
    distilled = crd_loss(implicit, aim, centres, beta=settings.beta)
    value, terms = settings.advantage_clip / settings.beta * distilled, {}
    if settings.kl_weight > 0:
        terms["kl"] = kl_velocity(velocity, given["reference"])
        weight = reward_adaptive_weight(aim, settings.kl_weight)
        value = value + weight * terms["kl"]
    return terms | {
        "loss": value * (group >= 0).to(value.device),
        "forward/error": matching_error(velocity, target),
        "crd/residual": distilled,
        "crd/implicit_abs": implicit.abs(),
        "model_output": velocity,
    }
