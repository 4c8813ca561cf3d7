"""DGPO: direct group preference optimisation, the preference of a whole group at once (arXiv 2510.08425).

One iteration, with m the matching error <(v(x_t, t) - (eps - x_0))^2> and sigma the paper's t:

1. collect   x_0 of each prompt by the deterministic solver, from theta, later from its slow average theta_ema
2. score     R(x_0, c)
3. estimate  A, the group-relative advantage
4. update    one t and one eps for a group g of K samples;  S_g = beta / K sum_i A_i (m_theta,i - m_ref,i)
             minimise  sigmoid(S_g) A_i m_theta,i + b |v_theta - v_ref|^2, whose gradient is that of
             -log sigmoid(-S_g); a sample whose ratio exp(m_ema - m_theta) has gone beyond 1 +- c has none
5. follow    theta_ema <- d theta_ema + (1 - d) theta,  d = min(.001 n, .3) after n optimiser steps

docs/dgpo.md has the equations, metrics and figures.
"""

from __future__ import annotations

import torch

from genrl.diffusion.forward import noising
from genrl.diffusion.forward.noising import REFERENCE, Tensors, noised, under, update
from genrl.diffusion.methods.dgpo.settings import DGPO
from genrl.diffusion.policy.policy import Policy, without_guidance
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator
from genrl.objectives.groups import informative
from genrl.objectives.matching import dgpo_clipped, dgpo_group_weight, dgpo_loss, matching_error, ramp
from genrl.objectives.policy_losses import kl_velocity
from genrl.runtime.loop.recorded import Recorded

EMA = "ema_reference"
SWITCH_AFTER = 200
"""Optimiser steps after which the slow average draws the samples (DGPO: 200)."""


def train(run: DiffusionRun, settings: DGPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    weights = run.weights
    noising.require_flow(run)
    if EMA not in weights.snapshots:  # a resumed run has it
        weights.snapshot(EMA)

    for _ in run.iterations():
        # 1, 2. Collect and score.
        late = run.loop.optimizer_steps > SWITCH_AFTER
        rollouts = run.collect(noising.solved, under=EMA if late else None)
        metrics = learn(run, settings, rollouts)
        del rollouts
        # 5. The slow average follows.
        decay = ramp(run.loop.optimizer_steps, slope=0.001, maximum=0.3)
        weights.blend(EMA, decay)
        run.finish(metrics | {"policy/ema_decay": decay})


def learn(run: DiffusionRun, settings: DGPO, rollouts: Rollouts) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    config = run.config

    # 3. Estimate.
    advantages, meter = noising.estimate(settings, rollouts)
    trained = informative(rollouts.total, rollouts.group)

    # 4. Update.
    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors]:
        clean, group = micro_batch.final, rollouts.group[micro_batch.slots]
        batch = micro_batch.batch
        batch = batch if settings.guidance_in_training else without_guidance(run.policy, batch)
        steps = torch.randperm(settings.first_steps, generator=generator(config.seed, run.iteration, "levels", epoch))
        sigma = micro_batch.sigmas[steps[k]].to(clean)  # the same levels for all samples
        tensors = noised(clean, noising.group_noise(micro_batch, group, epoch, k), sigma)
        tensors["trained"] = trained[micro_batch.slots].to(clean.device)
        tensors |= {"advantage": advantages[micro_batch.slots].to(clean), "group": group}
        tensors["ema"] = under(run, EMA, batch, tensors["noisy"], sigma)
        tensors["reference"] = under(run, REFERENCE, batch, tensors["noisy"], sigma)
        return batch, tensors

    update(run, settings, rollouts, settings.timesteps_per_sample, prepare, loss, meter)
    return meter.result()


def loss(settings: DGPO, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each sample, [B], of whole groups, and metrics."""
    velocity = policy.velocity(given.batch, given["noisy"], given["sigma"])
    target, advantage = given["target"], given["advantage"]
    error, old_error = matching_error(velocity, target), matching_error(given["ema"], target)
    ref_error = matching_error(given["reference"], target)
    weight = dgpo_group_weight(error, ref_error, advantage, given["group"], beta=settings.beta)
    value, terms = dgpo_loss(error, old_error, advantage, weight, clip=settings.clip_range), {}
    if settings.kl_weight > 0:
        terms["kl"] = kl_velocity(velocity, given["reference"])
        value = value + settings.kl_weight * terms["kl"]
    return terms | {
        "loss": value * given["trained"],  # no score, or a group without spread: no update, by its KL neither
        "forward/error": error,
        "dgpo/group_weight": weight,
        "dgpo/clip_frac": dgpo_clipped(error, old_error, advantage, clip=settings.clip_range),
        "model_output": velocity,
    }
