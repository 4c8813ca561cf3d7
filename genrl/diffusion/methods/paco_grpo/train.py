"""PaCo-GRPO: Flow-GRPO on several rewards, of which those that vary most are log-tamed (arXiv 2512.04784).

As Flow-GRPO, but for the advantage: rewards whose coefficient of variation is above the mean of all enter the sum as
log(1 + r). docs/paco_grpo.md has the equations and curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from genrl.diffusion.methods.paco_grpo.settings import PaCoGRPO
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.diffusion.steps.transitions import collect, update
from genrl.objectives.groups import Scale, complete_rewards, group_advantages
from genrl.runtime.loop.updating import Meter


def train(run: DiffusionRun, settings: PaCoGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        meter, steps = Meter(), Steps.of(run.config, settings, iteration)
        # 1, 2. Collect and score.
        rollouts = collect(run, settings, steps)
        # 3. Estimate.
        edges = estimate(run, settings, rollouts, steps, advantages_of(settings, rollouts), meter)
        # 4. Update.
        update(run, settings, rollouts, edges, loss, meter)
        del rollouts
        run.finish(meter.result() | steps.metrics)


def advantages_of(settings: PaCoGRPO, rollouts: Rollouts) -> Tensor:
    """Advantage of every sample, float64 [N]; 0 without a score, or in a group without spread."""
    weights = list(rollouts.weights.values())
    if not any(weights):  # a schedule may have all of them at 0 for a while
        return torch.zeros_like(rollouts.total)
    parts = [rollouts.parts[label] for label in rollouts.weights]
    variant: LogTame = "paper" if settings.aggregate == "log_tame" else "released"
    return log_tame_advantages(parts, weights, rollouts.group, variant=variant, scale=settings.advantage_scale)


# Several rewards to one, or to one advantage: PaCo-GRPO's log-tame and its alternatives (arXiv 2512.04784).
#
# The weighted sum is `sum w r`; GDPO and MixGRPO's sum of normalised rewards are in `groups.py`.
# Shapes: rewards K tensors [N], weights K floats; all are computed in float64 and returned as [N]. NaN means "no
# score": a sample without one of the rewards of weight other than 0 has none. A reward of weight 0 (a monitor) changes
# nothing.

LogTame = Literal["paper", "released"]


def coefficient_of_variation(reward: Tensor, *, eps: float = 1e-6) -> float:
    """`h = std / (mean + eps)` over all scores [N] of the iteration (population std): what log-tame compares."""
    scores = reward[~reward.isnan()].double()
    return float(scores.std(unbiased=False) / (scores.mean() + eps))


def log_tame(rewards: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`sum_k w_k t(r_k)`, t(r) = ln(1 + r) for a reward whose h exceeds the mean of all h, else r: one *reward*, [N].

    Raises ValueError where a reward to be tamed is -1 or less.
    """
    parts = complete_rewards(rewards, weights)
    trained = [k for k, weight in enumerate(weights) if weight != 0]
    variation = torch.tensor([coefficient_of_variation(parts[k]) for k in trained], dtype=torch.float64)
    limit, total = float(variation.mean()), torch.zeros_like(parts[0])
    for k, h in zip(trained, variation.tolist(), strict=True):
        part = parts[k]
        if h > limit:
            if bool((part <= -1).any()):
                raise ValueError(
                    f"reward {k} varies enough to be tamed (h = {h:.3g} > {limit:.3g}), but ln(1 + r) needs r > -1 and "
                    f"its smallest score is {float(part[~part.isnan()].min()):.3g}: shift it"
                )
            part = part.log1p()
        total += weights[k] * part
    return total


def log_tame_advantages(
    rewards: Sequence[Tensor],
    weights: Sequence[float],
    group: Tensor,
    *,
    variant: LogTame = "paper",
    scale: Scale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """PaCo-GRPO's advantages under log-tame: of the tamed rewards, normalised in their group ("paper"), [N].

    "released" is what its tracker does with the function: the aggregated rewards *are* the advantages, without mean or
    std, so that rewards that are never negative reinforce every sample. Without a score: 0.
    """
    tamed = log_tame(rewards, weights)
    if variant == "paper":
        return group_advantages(tamed, group, scale=scale, eps=eps, eps_mode="floor")
    if variant == "released":
        return tamed.nan_to_num(nan=0.0)
    raise ValueError(f"variant must be 'paper' or 'released', got {variant!r}")
