"""DDPO: policy gradient on denoising steps, each reward against the last ones of its prompt (arXiv 2305.13301).

1. collect   samples x_0 of each prompt c by the stochastic sampler
2. score     R(x_0, c)
3. estimate  A = (R - mean) / std over the last rewards of the prompt, or of the iteration while there are few
4. update    clipped importance ratios (DDPO-IS)

docs/ddpo.md has the equations, metrics and curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from genrl.diffusion.methods.ddpo.settings import DDPO
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.diffusion.steps.transitions import collect, update
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
    """Advantage of every sample, float64 [N]; the rewards of a prompt are remembered."""
    histories, memory = run.loop.memory.get("prompt_rewards", {}), settings.history
    advantages, run.loop.memory["prompt_rewards"] = prompt_advantages(
        rollouts.total, rollouts.prompts, histories, buffer_size=memory.size, min_count=memory.min_count
    )
    return advantages


# DDPO's advantages: each reward against the recent rewards of its prompt (arXiv 2305.13301, section 4.3; code).
#
# For sampling without groups: a prompt that comes up now and then is compared with its rewards in earlier iterations.

History = dict[str, list[float]]
"""Prompt -> its last rewards, oldest first. Plain JSON, so that a checkpoint can hold it."""


def prompt_advantages(
    rewards: Tensor,
    prompts: Sequence[str],
    history: Mapping[str, Sequence[float]],
    *,
    buffer_size: int = 16,
    min_count: int = 8,
    eps: float = 1e-6,
) -> tuple[Tensor, History]:
    """`(r - mean) / (std + eps)` by the prompt's last buffer_size rewards; returns (float64 [N] on the host, the new
    history).

    rewards [N] of all processes, NaN = no score: advantage 0, not remembered. This iteration's rewards join the history
    first. A prompt with fewer than min_count rewards is measured against this whole iteration. Population std.
    Equal rewards give exactly 0. `history` itself is not changed. Defaults: the released configuration's.
    Raises ValueError where lengths differ, a reward is infinite, or a size is below 1.
    """
    if rewards.dim() != 1 or len(prompts) != rewards.numel():
        raise ValueError(f"one prompt per reward is needed; got {len(prompts)} and rewards {list(rewards.shape)}")
    if buffer_size < 1 or min_count < 1:
        raise ValueError(f"buffer_size and min_count must be at least 1, got {buffer_size} and {min_count}")
    values = rewards.detach().double().cpu()
    if bool(values.isinf().any()):
        where = values.isinf().nonzero()[:, 0].tolist()
        raise ValueError(f"the rewards of samples {where} are infinite; a sample without a score must be NaN")
    new = {prompt: list(past) for prompt, past in history.items()}
    for prompt, value in zip(prompts, values.tolist(), strict=True):
        if value == value:
            new[prompt] = [*new.get(prompt, []), value][-buffer_size:]
    everyone = _moments(values[~values.isnan()])
    measures = {
        prompt: everyone
        if len(new.get(prompt, [])) < min_count
        else _moments(torch.tensor(new[prompt], dtype=torch.float64))
        for prompt in set(prompts)
    }
    mean, std = (torch.stack([measures[prompt][k] for prompt in prompts]) for k in (0, 1))
    return torch.where(values.isnan(), 0.0, (values - mean) / (std + eps)), new


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population std; relative to one of the values, which makes both exact where all are equal."""
    if values.numel() == 0:
        return values.new_zeros(()), values.new_ones(())
    offset = values - values[0]
    return values[0] + offset.mean(), offset.std(unbiased=False)
