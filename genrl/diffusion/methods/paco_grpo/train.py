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
from genrl.diffusion.steps.edges import estimate
from genrl.diffusion.steps.plans import Steps
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.diffusion.steps.transitions import collect, update
from genrl.objectives.advantages.aggregation import LogTame, log_tame_advantages
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
    """Of every sample, float64 [N]; 0 without a score, or in a group without spread."""
    weights = list(rollouts.weights.values())
    if not any(weights):  # a schedule may have all of them at 0 for a while
        return torch.zeros_like(rollouts.total)
    parts = [rollouts.parts[label] for label in rollouts.weights]
    variant: LogTame = "paper" if settings.aggregate == "log_tame" else "released"
    return log_tame_advantages(parts, weights, rollouts.group, variant=variant, scale=settings.advantage_scale)
