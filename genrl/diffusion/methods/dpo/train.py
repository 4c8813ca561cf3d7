"""Diffusion-DPO, online and from a preference data set (arXiv 2311.12908).

One iteration, with e = <(v_theta(x_t, t) - target)^2> the denoising error and pairs (w, l), w preferred to l:

1. collect   online: samples x_0 of each prompt from the present policy, by the deterministic solver;
             offline: pairs of images of the data set, encoded
2. compare   online: the best and the worst sample of each group, by reward; offline: as the data set has it
3. update    one t and one eps for both of a pair;  d = (e_w - e_l) - (e_w^ref - e_l^ref)
             minimise  -log sigmoid(-beta/2 d)                                                        (eq. 14)

Flows and epsilon, v and sample prediction alike: the target is what the network predicts. The reference is the model
before training, or the trained one every `reference_every` optimiser steps. docs/dpo.md has the equations,
metrics and figures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from genrl.diffusion.forward.noising import (
    REFERENCE,
    Tensors,
    noised_by,
    random_level,
    solved,
    under,
    update,
)
from genrl.diffusion.forward.settings import DiffusionDPO
from genrl.diffusion.methods.dpo.settings import DPO
from genrl.diffusion.policy.policy import Policy, without_guidance
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator, keyed_noise
from genrl.objectives.groups import best_and_worst
from genrl.objectives.matching import matching_error
from genrl.objectives.preferences import pair_loss
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter

__all__ = ["loss", "train"]

REFRESHED = "refreshed_reference"


def train(run: DiffusionRun, settings: DPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    train_on(run, settings, lambda: run.collect(solved))


def train_on(run: DiffusionRun, settings: DiffusionDPO, samples: Callable[[], Rollouts]) -> None:
    """Train on the best and the worst sample of each group of what `samples` gives in each iteration."""
    for _ in run.iterations():
        refresh_reference(run, settings.reference_every)
        # 1. Collect.
        rollouts = samples()
        # 2. Compare.
        sign = best_and_worst(rollouts.total, rollouts.group)
        # 3. Update.
        metrics = learn(run, settings, rollouts, sign)
        del rollouts
        run.finish(metrics)


def refresh_reference(run: DiffusionRun, every: int | None) -> None:
    """Make the present policy the reference, where its turn has come since the last iteration began."""
    if every is None:
        return
    settings, step = run.settings, run.loop.optimizer_steps
    # `learn` makes so many optimiser steps in an iteration, so a multiple of `every` may lie within and not at its end.
    before = step - settings.updates * settings.epochs
    if step == 0 or step // every > before // every:
        run.weights.snapshot(REFRESHED)


def learn(run: DiffusionRun, settings: DiffusionDPO, rollouts: Rollouts, sign: Tensor) -> dict[str, float]:
    """Step 3 of the algorithm; returns the iteration's metrics. sign: +1 for a winner, -1 for its loser, [N]."""
    policy = run.policy
    reference = REFERENCE if settings.reference_every is None else REFRESHED
    meter = Meter()
    meter.add("preference/pairs", (sign > 0).view(-1, run.config.sampling.group_size).any(1))

    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors] | None:
        rows = pair_rows(sign[micro_batch.slots], rollouts.group[micro_batch.slots])
        counts = torch.ones(len(rows))
        # As many passes as the other processes make: a group without a pair gets one of weight 0.
        if run.weights.in_step:
            missing = len(micro_batch.slots) // run.config.sampling.group_size - len(rows)
            rows = torch.cat([rows, rows.new_zeros(missing, 2)])
            counts = torch.cat([counts, torch.zeros(missing)])
        if len(rows) == 0:
            return None
        # Winners, then losers: `loss` halves the model's output by that.
        both = rows.T.flatten().tolist()
        batch, clean = micro_batch.batch.take(both), micro_batch.final[both]
        batch = batch if settings.guidance_in_training else without_guidance(policy, batch)
        seed, iteration, _ = batch.keys[0]
        groups = [int(rollouts.group[micro_batch.slots[row]]) for row in rows[:, 0].tolist()]
        keys = [(seed, iteration, "group", g, "forward", epoch, k) for g in groups]
        # Both of a pair are noised alike, by the same noise at the same level: only the samples differ.
        noises = torch.stack([keyed_noise(clean.shape[1:], *key) for key in keys]).to(clean)
        levels = torch.stack([random_level(policy, generator(*key, "level")) for key in keys]).to(clean.device)
        noise, level = torch.cat([noises, noises]), torch.cat([levels, levels])
        tensors = noised_by(policy, clean, noise, level)
        tensors["reference"] = under(run, reference, batch, tensors["noisy"], level)
        tensors["counts"] = counts.to(clean)
        return batch, tensors

    def count(slots: list[int]) -> int:
        return int((sign[slots] > 0).sum()) * settings.timesteps_per_sample

    pairs = settings.timesteps_per_sample
    update(run, settings, rollouts, pairs, prepare, loss, meter, count=count)
    return meter.result()


def pair_rows(sign: Tensor, group: Tensor) -> Tensor:
    """Rows of winner and loser of each pair, int64 [P, 2]; both are in the micro-batch, which holds whole groups."""
    win, lose = (sign > 0).nonzero()[:, 0], (sign < 0).nonzero()[:, 0]
    return torch.stack([win[group[win].argsort()], lose[group[lose].argsort()]], dim=1)


def loss(settings: DiffusionDPO, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each pair, [P], and metrics. target, reference: winners, then their losers, [2 P, ...]."""
    output = policy.velocity(given.batch, given["noisy"], given["sigma"])
    errors = matching_error(output, given["target"]).chunk(2)
    ref_errors = matching_error(given["reference"], given["target"]).chunk(2)
    # half of beta as in eq. 14 and SDXL's 5000; the script for SD 1.5 has the whole
    gain = (ref_errors[0] - ref_errors[1]).detach() - (errors[0] - errors[1])
    out = pair_loss("sigmoid", gain, torch.zeros_like(gain), beta=settings.beta / 2)
    return {
        "loss": out.loss * given["counts"],
        "preference/correct": out.correct,
        "preference/logit": out.logit,
        "forward/error": torch.stack(errors),
        "model_output": output,
    }
