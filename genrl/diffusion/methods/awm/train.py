"""AWM: advantage weighted matching, a policy gradient on the forward process (arXiv 2509.25050).

One iteration, with the paper's symbols (sigma is its t):

1. collect   x_0 of each prompt from the present policy, by any solver; no log-probabilities
2. score     R(x_0, c)
3. estimate  A~ = clip(A, -5, 5) / 5, the group-relative advantage in [-1, 1]
4. update    x_t = (1 - t) x_0 + t eps;  log p(x_0) = -w(t, m),  w = ghuber,  m = <(v_theta(x_t, t) - (eps - x_0))^2>
             rho = p_theta / p_old;  minimise  max(-A~ rho, -A~ clip(rho, 1 +- c))
                                              + b |v_theta - v_ref|^2 + b_ema |v_theta - v_ema|^2
5. follow    v_ema <- d v_ema + (1 - d) v_theta,  d = min(.001 n, .3) after n optimiser steps

docs/awm.md has the equations, metrics and figures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.forward import noising
from genrl.diffusion.forward.noising import REFERENCE, Tensors, noised, under, update
from genrl.diffusion.methods.awm.settings import AWM
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.levels import stratified_steps
from genrl.mdp.noise import generator
from genrl.objectives.groups import informative
from genrl.objectives.matching import awm_advantage, awm_log_prob, matching_error, ramp
from genrl.objectives.policy_losses import clipped_surrogate, kl_velocity
from genrl.runtime.loop.recorded import Recorded

EMA, OLD = "ema_reference", "old"


def train(run: DiffusionRun, settings: AWM) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    weights = run.weights
    noising.require_flow(run)
    if EMA not in weights.snapshots:  # a resumed run has it
        weights.snapshot(EMA)

    for _ in run.iterations():
        # 1, 2. Collect and score.
        rollouts = run.collect(noising.solved)
        # Before the only update of an iteration the old policy is the present one: no copy of it is needed.
        if settings.updates * settings.epochs > 1:
            weights.snapshot(OLD)
        metrics = learn(run, settings, rollouts)
        del rollouts
        # 5. The slow copy follows.
        decay = ramp(run.loop.optimizer_steps, slope=0.001, maximum=0.3)
        weights.blend(EMA, decay)
        run.finish(metrics | {"policy/ema_decay": decay})


def learn(run: DiffusionRun, settings: AWM, rollouts: Rollouts) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    config = run.config

    # 3. Estimate.
    advantages, meter = noising.estimate(settings, rollouts)
    trained = informative(rollouts.total, rollouts.group)

    # 4. Update.
    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors]:
        clean, batch = micro_batch.final, micro_batch.batch
        levels_generator = generator(config.seed, run.iteration, "levels", epoch)  # the same levels for all samples
        sigma = levels(settings, micro_batch.sigmas, levels_generator)[k].to(clean)
        tensors = noised(clean, noising.own_noise(micro_batch, epoch, k), sigma)
        tensors["trained"] = trained[micro_batch.slots].to(clean.device)
        tensors["advantage"] = awm_advantage(advantages[micro_batch.slots], clip=settings.advantage_clip).to(clean)
        if run.loop.updates > 0:  # until then the old policy is the present one
            tensors["old"] = under(run, OLD, batch, tensors["noisy"], sigma)
        if settings.kl_weight > 0:
            tensors["reference"] = under(run, REFERENCE, batch, tensors["noisy"], sigma)
        if settings.ema_kl_weight > 0:
            tensors["ema"] = under(run, EMA, batch, tensors["noisy"], sigma)
        return batch, tensors

    update(run, settings, rollouts, settings.timesteps_per_sample, prepare, loss, meter)
    return meter.result()


def levels(settings: AWM, grid: Tensor, rng: torch.Generator) -> Tensor:
    """Noise levels of one pass over the samples, [K]; grid: the levels of sampling, [T + 1]."""
    count = settings.timesteps_per_sample
    # Neither the first level, at which the state says nothing of the sample, nor the last tenth.
    return grid[stratified_steps(count, 1, max(1, int(0.9 * (len(grid) - 1))), rng)]


def loss(settings: AWM, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each sample, [B], and metrics."""
    velocity = policy.velocity(given.batch, given["noisy"], given["sigma"])
    target, sigma, advantage = given["target"], given["sigma"], given["advantage"]
    log_prob = awm_log_prob(velocity, target, sigma)
    old = log_prob.detach()
    if "old" in given:
        old = awm_log_prob(given["old"], target, sigma)
    surrogate = clipped_surrogate(log_prob, old, advantage, settings.clip_range, settings.clip_range)
    value, terms = surrogate.loss, {}
    for name, metric, weight in (("reference", "kl", settings.kl_weight), ("ema", "kl/ema", settings.ema_kl_weight)):
        if weight > 0:
            terms[metric] = kl_velocity(velocity, given[name])
            value = value + weight * terms[metric]
    return terms | {
        "loss": value * given["trained"],  # no score, or a group without spread: no update, by its KL neither
        "loss/policy": surrogate.loss,
        "ratio/mean": surrogate.ratio,
        "ratio/std": surrogate.ratio - 1.0,
        "ratio/max_abs_dev": (surrogate.ratio - 1.0).abs(),
        "forward/error": matching_error(velocity, target),
        "model_output": velocity,
    }
