"""DDPO: policy gradient on denoising steps, each reward against the last ones of its prompt (arXiv 2305.13301).

1. collect   samples x_0 of each prompt c by the stochastic sampler
2. score     R(x_0, c)
3. estimate  A = (R - mean) / std over the last rewards of the prompt, or of the iteration while there are few
4. update    clipped importance ratios (DDPO-IS)

docs/ddpo.md has the equations, metrics and curves.
"""

from __future__ import annotations

from torch import Tensor

from genrl.diffusion.methods.ddpo.settings import DDPO
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.edges import estimate
from genrl.diffusion.steps.plans import Steps
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.diffusion.steps.transitions import collect, update
from genrl.objectives.advantages.prompt_statistics import prompt_advantages
from genrl.runtime.loop.updating import Meter


def train(run: DiffusionRun, settings: DDPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        meter, steps = Meter(), Steps.of(run.config, settings, iteration)
        # 1, 2. Collect and score.
        rollouts = collect(run, settings, steps)
        # 3. Estimate.
        edges = estimate(run, settings, rollouts, steps, advantages_of(run, settings, rollouts), meter, grouped=False)
        # 4. Update.
        update(run, settings, rollouts, edges, loss, meter)
        del rollouts
        run.finish(meter.result() | steps.metrics)


def advantages_of(run: DiffusionRun, settings: DDPO, rollouts: Rollouts) -> Tensor:
    """Of every sample, float64 [N]; the rewards of a prompt are remembered."""
    seen, memory = run.loop.memory.get("prompt_rewards", {}), settings.history
    advantages, run.loop.memory["prompt_rewards"] = prompt_advantages(
        rollouts.total, rollouts.prompts, seen, buffer_size=memory.size, min_count=memory.min_count
    )
    return advantages
