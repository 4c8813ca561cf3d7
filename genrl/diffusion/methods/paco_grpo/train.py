"""PaCo-GRPO: Flow-GRPO on several rewards, of which those that vary most are log-tamed (arXiv 2512.04784).

As Flow-GRPO, but for the advantage: rewards whose coefficient of variation is above the mean of all enter the sum as
log(1 + r). docs/paco_grpo.md has the equations and curves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.methods.paco_grpo.settings import PaCoGRPO
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.diffusion.steps.transitions import flow_grpo_update, train_policy_gradient
from genrl.mdp.plan import SamplingPlan
from genrl.objectives.advantages.aggregation import LogTame, log_tame_advantages

__all__ = ["loss", "train"]


def train(run: DiffusionRun, settings: PaCoGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    train_policy_gradient(run, settings, learn)


def learn(run: DiffusionRun, settings: PaCoGRPO, rollouts: Rollouts, plan: SamplingPlan) -> dict[str, float]:
    """Steps 3 and 4 on the samples of one iteration; returns its metrics."""
    return flow_grpo_update(run, settings, rollouts, plan, advantages_of(settings, rollouts))


def advantages_of(settings: PaCoGRPO, rollouts: Rollouts) -> Tensor:
    """Of every sample, float64 [N]; 0 without a score, or in a group without spread."""
    weights = list(rollouts.weights.values())
    if not any(weights):  # a schedule may have all of them at 0 for a while
        return torch.zeros_like(rollouts.total)
    parts = [rollouts.parts[label] for label in rollouts.weights]
    variant: LogTame = "paper" if settings.aggregate == "log_tame" else "released"
    return log_tame_advantages(parts, weights, rollouts.group, variant=variant, scale=settings.advantage_scale)
