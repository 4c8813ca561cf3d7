"""Flow-GRPO: policy gradient on the steps of the sampler (arXiv 2505.05470).

One iteration, with the paper's symbols:

1. collect   G samples x_0 of each prompt c from pi_old, every (windowed) step sampled from N(mu, s^2 I)
2. score     R(x_0, c)
3. estimate  A_i = (R_i - mean_G R) / std, the group-relative advantage                              (eq. 4)
4. update    r_i = p_theta(x_{t-1} | x_t, c) / p_old(x_{t-1} | x_t, c), clipped surrogate, KL         (eq. 5)

Settings make it Dance-GRPO (`kernel: dance_sde`), Flow-CPS (`flow_cps`), or Flow-GRPO-Fast / MixGRPO's window
(`window`), and trees (`tree`). docs/flow_grpo.md has the equations, metrics and curves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.diffusion.steps.transitions import collect, update
from genrl.objectives.groups import gdpo_advantages, group_advantages
from genrl.runtime.loop.updating import Meter


def train(run: DiffusionRun, settings: FlowGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        meter, steps = Meter(), Steps.of(run.config, settings, iteration)
        # 1, 2. Collect and score.
        rollouts = collect(run, settings, steps)
        # 3. Estimate.
        edges = estimate(run, settings, rollouts, steps, advantages_of(settings, rollouts), meter)
        # 4. Update.
        update(run, settings, rollouts, edges, loss, meter)
        del rollouts  # states and pictures: not beside those of an evaluation
        run.finish(meter.result() | steps.metrics)


def advantages_of(settings: FlowGRPO, rollouts: Rollouts) -> Tensor:
    """Advantage of every sample, float64 [N]; 0 without a score, or in a group without spread (eq. 4)."""
    if settings.aggregate == "sum":
        return group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
    weights = list(rollouts.weights.values())
    if not any(weights):  # a schedule may have all of them at 0 for a while
        return torch.zeros_like(rollouts.total)
    return gdpo_advantages([rollouts.parts[label] for label in rollouts.weights], weights, rollouts.group)
