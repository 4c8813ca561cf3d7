"""GARDO: Flow-GRPO in which samples whose score is not to be trusted are held back (arXiv 2512.24138).

As Flow-GRPO, but for

3. estimate  A_i = (r_i - mean_G r), times d_i / mean_G d where it is above 0; d_i: distance from the nearest of G
4. update    clipped surrogate + beta KL of the samples with u_i above the (1 - b) quantile of all u >= 0
5. follow    the reference of the KL becomes the model, where KL > reset_kl or every so many iterations

with u_i = W(r)_i - mean over the other rewards of W(r')_i, W the share of samples of the iteration with a lower score.
The released code has the sign of u the other way round, and so holds back what the trained score under-rates; this is
as the paper says it. docs/gardo.md has the equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from genrl.diffusion.methods.gardo.settings import GARDO, Gate, Moving
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import Action, collect, update
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.objectives.groups import group_advantages, group_means
from genrl.runtime.loop.updating import Meter
from genrl.runtime.weights.weights import FOLLOWING

KEPT, HISTORY = "gardo", 20
"""What is remembered between iterations; and of how many, the over-rating."""


def train(run: DiffusionRun, settings: GARDO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        meter, steps = Meter(), Steps.of(run.config, settings, iteration)
        # 1, 2. Collect and score.
        rollouts = collect(run, settings, steps)
        # 3. Estimate.
        advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
        if settings.diversity is not None:
            advantages = diverse(advantages, rollouts.scored.values[settings.diversity], rollouts.group)
        edges = estimate(run, settings, rollouts, steps, advantages, meter)
        # 4. Update.
        pays = torch.ones(rollouts.num_samples)
        if settings.gate is not None:
            pays = gate(run.loop.memory, settings.gate, rollouts, meter).float()

        def further(action: Action, pays: Tensor = pays) -> dict[str, Tensor]:
            return {"pays": pays[action.slots].to(run.policy.device)}

        update(run, settings, rollouts, edges, loss, meter, further=further)
        del rollouts
        metrics = meter.result() | steps.metrics
        # 5. Follow.
        if settings.reference_model is not None:
            metrics["reference/moved"] = float(follow(run, settings.reference_model, metrics.get("kl", 0.0)))
        run.finish(metrics)


def diverse(advantages: Tensor, distance: Tensor, group: Tensor) -> Tensor:
    """Advantages [N], those above 0 times the distance from the nearest sample of the group, over its mean there. A
    sample without a distance, or in a group of equal samples, keeps its advantage."""
    factor = (distance / group_means(distance, group)).nan_to_num(1.0)
    return torch.where(advantages > 0, advantages * factor, advantages)


def overrated(score: Tensor, others: Sequence[Tensor]) -> Tensor:
    """How much better a sample does by the score than by the mean of the others, in -1 .. 1, [N]; NaN without one."""
    return wins(score) - torch.stack([wins(other) for other in others]).mean(0)


def wins(score: Tensor) -> Tensor:
    """Share of the scored samples with a lower score, [N]; NaN without a score."""
    lower = (score[None, :] < score[:, None]).double().sum(1) / (~score.isnan()).sum()
    return torch.where(score.isnan(), torch.nan, lower)


def paying(over: Tensor, share: float) -> Tensor:
    """Samples above the (1 - share) quantile of those that are over-rated at all, bool [N]."""
    candidates = over[over >= 0]
    return over > candidates.quantile(1 - share) if len(candidates) else torch.zeros_like(over, dtype=torch.bool)


def next_share(settings: Gate, share: float, mean: float, before: Sequence[float]) -> float:
    """A tenth more where over-rating is larger than in all iterations before, a tenth less where it is smaller."""
    if before and mean > max(before):
        share *= 1.1
    elif before and mean < min(before):
        share *= 0.9
    return min(max(share, settings.between[0]), settings.between[1])


def gate(memory: dict[str, Any], settings: Gate, rollouts: Rollouts, meter: Meter) -> Tensor:
    """Samples that pay the divergence, bool [N]; the share is remembered, and how much was over-rated."""
    over = overrated(rollouts.total, [rollouts.scored.values[label] for label in settings.rewards])
    kept = memory.get(KEPT, {})
    before, candidates = kept.get("over", []), over[over >= 0]
    mean = float(candidates.mean()) if len(candidates) else 0.0
    share = next_share(settings, kept.get("share", settings.share), mean, before)
    memory[KEPT] = kept | {"share": share, "over": [*before, mean][-HISTORY:]}
    pays = paying(over, share)
    most = float(candidates.max()) if len(candidates) else 0.0
    meter.note({"gate/share": share, "gate/gated": float(pays.double().mean()), "gate/most": most})
    return pays


def follow(run: DiffusionRun, settings: Moving, kl: float) -> int:
    """Let the reference be the present model where it is due; how often it has been."""
    kept = run.loop.memory.get(KEPT, {})
    since, moved = kept.get("since", 0) + 1, int(kept.get("moved", 0))
    if kl > settings.reset_kl or since >= settings.reset_every:
        run.weights.snapshot(FOLLOWING)
        since, moved = 0, moved + 1
    run.loop.memory[KEPT] = kept | {"since": since, "moved": moved}
    return moved
