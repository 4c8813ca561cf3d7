"""Advantage and weight of every trained transition of a policy gradient, from the rewards of finished samples."""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.metering import Meter
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.edges import Edges, independent_edges, tree_edges
from genrl.diffusion.steps.layout import Contrast
from genrl.diffusion.steps.layout import Tree as TreeSettings
from genrl.diffusion.steps.plans import trained_steps
from genrl.diffusion.steps.settings import PolicyGradient
from genrl.mdp.plan import SamplingPlan
from genrl.objectives.advantages.credit import PromptHistory, branch_extremes, signed_advantage
from genrl.objectives.advantages.groups import group_statistics


def estimate(
    run: DiffusionRun,
    settings: PolicyGradient,
    rollouts: Rollouts,
    plan: SamplingPlan,
    advantages: Tensor,
    meter: Meter,
    *,
    grouped: bool = True,
) -> Edges:
    """Advantage and weight of every trained transition, from the advantages of the samples, float64 [N].

    grouped: whether these compare the samples of a prompt, whose spread is then logged.
    """
    config, iteration = run.config, run.iteration
    advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
    meter.add_advantages(advantages, settings.advantage_clip)
    if grouped:
        meter.add_spread(group_statistics(rollouts.total, rollouts.group))
    trained = trained_steps(config, settings, iteration)
    if settings.layout.tree is None:
        return independent_edges(advantages, plan, trained)
    rewards = rollouts.total
    if settings.layout.tree.contrast is not None:
        advantages = contrasted(run, settings, settings.layout.tree, settings.layout.tree.contrast, rollouts)
        rewards = torch.where(advantages != 0, rewards, torch.nan)  # the others have no part in what is above them
    log_probs = torch.full((plan.steps, rollouts.num_samples), torch.nan)
    if settings.layout.tree.credit != "mean":
        pieces = [piece for micro_batch in rollouts.mine.values() for piece in micro_batch.pieces]
        mine = [(i, p.slots[i], log) for p in pieces for i, log in p.trajectory.log_probs.items()]
        log_probs = run.gather(mine, log_probs)
    edges = tree_edges(
        settings.layout.tree, plan, trained, rewards, advantages, log_probs,
        clip=settings.advantage_clip, iteration=iteration, iterations=config.iterations,
    )  # fmt: skip
    meter.add_advantages(edges.advantage[edges.weight > 0], settings.advantage_clip)
    if edges.skipped and iteration == 0:
        run.process.progress.say(
            f"depths {', '.join(map(str, edges.skipped))} have fewer than 4 states: measured against the leaves"
        )
    return edges


def contrasted(
    run: DiffusionRun, settings: PolicyGradient, tree: TreeSettings, contrast: Contrast, rollouts: Rollouts
) -> Tensor:
    """B2-DiffuRL's advantages: scores over the prompt's history, of the best and worst leaf of each split, [N]."""
    history = PromptHistory(contrast.history)
    history.rewards = run.loop.memory.setdefault("prompt_history", {})
    scores = history.normalise(rollouts.total, rollouts.prompts)
    branch = torch.arange(rollouts.num_samples) // tree.ways
    chosen = branch_extremes(scores, branch, high=contrast.high, low=contrast.low)
    clip = settings.advantage_clip
    return torch.where(chosen != 0, signed_advantage(scores, clip=clip), 0.0)
