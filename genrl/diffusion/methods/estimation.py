"""Advantage and weight of every trained transition of a policy gradient, from the rewards of finished samples."""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.methods.edges import Edges, independent_edges, tree_edges
from genrl.diffusion.methods.flow_grpo.settings import Contrast, FlowGRPO
from genrl.diffusion.methods.flow_grpo.settings import Tree as TreeSettings
from genrl.diffusion.methods.metering import Meter
from genrl.diffusion.methods.plans import trained_steps
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.plan import SamplingPlan
from genrl.mdp.tree import Tree
from genrl.objectives.advantages.aggregation import LogTame, log_tame_advantages
from genrl.objectives.advantages.credit import PromptHistory, branch_extremes, signed_advantage
from genrl.objectives.advantages.groups import gdpo_advantages, group_advantages, group_statistics
from genrl.objectives.advantages.prompt_statistics import prompt_advantages


def estimate(
    run: DiffusionRun, settings: FlowGRPO, rollouts: Rollouts, plan: SamplingPlan, tree: Tree, meter: Meter
) -> Edges:
    """Advantage and weight of every trained transition, from the rewards of the samples."""
    config, iteration = run.config, run.iteration
    advantages = advantages_of(run, settings, rollouts).clamp(-settings.advantage_clip, settings.advantage_clip)
    meter.add_advantages(advantages, settings.advantage_clip)
    if settings.advantage_scale != "prompt_history":  # there no group is compared
        meter.add_spread(group_statistics(rollouts.total, rollouts.group))
    trained = trained_steps(config, settings, iteration)
    if settings.tree is None:
        return independent_edges(advantages, plan, trained)
    rewards = rollouts.total
    if settings.tree.contrast is not None:
        advantages = contrasted(run, settings.tree, settings.tree.contrast, rollouts)
        rewards = torch.where(advantages != 0, rewards, torch.nan)  # the others have no part in what is above them
    log_probs = torch.full((plan.steps, rollouts.num_samples), torch.nan)
    if settings.tree.credit != "mean":
        pieces = [piece for micro_batch in rollouts.mine.values() for piece in micro_batch.pieces]
        mine = [(i, p.slots[i], log) for p in pieces for i, log in p.trajectory.log_probs.items()]
        log_probs = run.gather(mine, log_probs)
    edges = tree_edges(
        settings.tree, tree, plan, trained, rewards, advantages, log_probs,
        clip=settings.advantage_clip, iteration=iteration, iterations=config.iterations,
    )  # fmt: skip
    meter.add_advantages(edges.advantage[edges.weight > 0], settings.advantage_clip)
    if edges.skipped and iteration == 0:
        run.process.progress.say(
            f"depths {', '.join(map(str, edges.skipped))} have fewer than 4 states: measured against the leaves"
        )
    return edges


def advantages_of(run: DiffusionRun, settings: FlowGRPO, rollouts: Rollouts) -> Tensor:
    """Of every sample, float64 [N]; 0 without a score, or in a group without spread."""
    total, group, scale = rollouts.total, rollouts.group, settings.advantage_scale
    if scale == "prompt_history":
        seen = run.loop.memory.get("prompt_rewards", {})
        keep = settings.history
        advantages, run.loop.memory["prompt_rewards"] = prompt_advantages(
            total, rollouts.prompts, seen, buffer_size=keep.size, min_count=keep.min_count
        )
        return advantages
    if settings.aggregate == "sum":
        return group_advantages(total, group, scale=scale)
    weights = list(rollouts.weights.values())
    if not any(weights):  # a schedule may have all of them at 0 for a while
        return torch.zeros_like(total)
    parts = [rollouts.parts[label] for label in rollouts.weights]
    if settings.aggregate == "gdpo":
        return gdpo_advantages(parts, weights, group)
    variant: LogTame = "paper" if settings.aggregate == "log_tame" else "released"
    return log_tame_advantages(parts, weights, group, variant=variant, scale=scale)


def contrasted(run: DiffusionRun, tree: TreeSettings, contrast: Contrast, rollouts: Rollouts) -> Tensor:
    """B2-DiffuRL's advantages: scores over the prompt's history, of the best and worst leaf of each split, [N]."""
    history = PromptHistory(contrast.history)
    history.rewards = run.loop.memory.setdefault("prompt_history", {})
    scores = history.normalise(rollouts.total, rollouts.prompts)
    branch = torch.arange(rollouts.num_samples) // tree.ways
    chosen = branch_extremes(scores, branch, high=contrast.high, low=contrast.low)
    clip = run.config.trainer.advantage_clip
    return torch.where(chosen != 0, signed_advantage(scores, clip=clip), 0.0)
