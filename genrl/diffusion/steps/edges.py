"""Advantages and weights of the trained transitions of an iteration, as tables over (step, slot).

An edge of a tree is known by its step and the slot of the first leaf below it (`forest`), so one table [T, N] serves
all structures. Of independent samples every row is the advantages of the samples. All is a pure function of what every
process knows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from genrl.diffusion.steps.layout import Prune, Tree, pruned_depths
from genrl.mdp import tree as trees
from genrl.mdp.plan import SamplingPlan, extreme_count, pruning_is_on
from genrl.objectives.advantages.credit import (
    edge_weights,
    leaf_counts,
    level_softmax,
    mean_of_leaves,
    normalise_per_depth,
    path_softmax,
)
from genrl.objectives.advantages.pruning import best_siblings, depth_pruned, extreme_leaves, width_pruned
from genrl.objectives.surrogates.layer_tuning import progress_weights


class Edges(NamedTuple):
    """Tables [T, N]; 0 where there is no trained edge."""

    advantage: Tensor
    weight: Tensor
    """In the loss, which is divided by the sum over an update."""
    moves: Tensor
    """Whether a sample below has an advantage. An edge whose samples' advantages cancel still belongs to the loss, with
    its divergence from the reference; one without any (no score, no spread) does not."""
    skipped: list[int]
    """Depths with too few nodes to be normalised alone."""


def independent_edges(advantages: Tensor, plan: SamplingPlan, trained: tuple[int, ...]) -> Edges:
    """Of samples that share nothing: advantages [N], weight 1."""
    table = torch.zeros(plan.steps, len(advantages), dtype=advantages.dtype)
    weight = torch.zeros_like(table)
    table[list(trained)], weight[list(trained)] = advantages, 1.0
    return Edges(table, weight, table != 0, [])


def tree_edges(
    settings: Tree,
    plan: SamplingPlan,
    trained: tuple[int, ...],
    rewards: Tensor,
    advantages: Tensor,
    log_probs: Tensor,
    *,
    clip: float,
    iteration: int,
    iterations: int,
) -> Edges:
    """Of samples that are leaves. rewards, advantages: [N], of the leaves by slot; log_probs: [T, N], of sampling.

    A leaf without a score (NaN reward) is left out of the values above it.
    """
    tree = trees.grow(plan)
    parent, leaves = tree.parent, tree.num_slots
    scored = ~rewards.isnan()
    score = rewards if settings.normalise == "depth" else torch.where(scored, advantages.double(), torch.nan)
    leaf_values = score.view(-1, leaves)
    if settings.credit == "mean":
        values = mean_of_leaves(parent, leaf_values)
    else:
        backup = path_softmax if settings.credit == "path_softmax" else level_softmax
        values = backup(parent, leaf_values, from_table(log_probs, tree), settings.sharpness)
    skipped: list[int] = []
    if settings.normalise == "depth":
        values, skipped = normalise_per_depth(values, tree.depth)
        values = values.clamp(-clip, clip)
        skipped = [depth for depth in skipped if depth - 1 in trained]
    counts = leaf_counts(parent, scored.view(-1, leaves))
    kept = torch.isin(tree.depth - 1, torch.tensor(trained)) & (counts > 0)
    if settings.prune is not None and pruning_is_on(iteration, iterations, settings.prune.until):
        rewards = rewards.view(-1, leaves)
        kept = kept & unpruned(settings.prune, tree, plan, rewards, iteration=iteration, iterations=iterations)
    moves = leaf_counts(parent, (advantages != 0).view(-1, leaves)) > 0
    return Edges(
        to_table(values.nan_to_num(0.0) * kept, tree).to(advantages.dtype),
        to_table(edge_weights(kept, counts, settings.weight), tree).to(advantages.dtype),
        to_table(moves, tree),
        skipped,
    )


def unpruned(
    settings: Prune, tree: trees.Tree, plan: SamplingPlan, rewards: Tensor, *, iteration: int, iterations: int
) -> Tensor:
    """Edges that pruning leaves, bool [P, nodes]. rewards: [P, leaves]."""
    depths = pruned_depths(settings, plan, iteration=iteration, iterations=iterations)
    kept = depth_pruned(tree.depth, depths).expand(len(rewards), -1)
    if settings.width is None:
        return kept
    last_split = max(plan.splits)
    if settings.width == "best_sibling":
        good = best_siblings(tree.parent, tree.depth, rewards, last_split=last_split)
    else:
        good = extreme_leaves(rewards, extreme_count(rewards.shape[-1], settings.keep))
    good = good | rewards.isnan().all(-1, keepdim=True)  # without any score there is nothing to choose by, or to train
    return kept & width_pruned(tree.parent, tree.depth, good, last_split=last_split)


def progress_table(tree: trees.Tree, rewards: Tensor) -> Tensor:
    """How far the leaves below an edge fall short of their group's best, in [0, 1], [T, N] (Dynamic-TreeRPO)."""
    return to_table(mean_of_leaves(tree.parent, progress_weights(rewards.view(-1, tree.num_slots))), tree)


def to_table(values: Tensor, tree: trees.Tree) -> Tensor:
    """Values of nodes [P, nodes] by step and slot of the edge into them, [T, P * leaves]."""
    groups, edges = len(values), tree.depth > 0
    table = torch.zeros(tree.steps, groups, tree.num_slots, dtype=values.dtype)
    table[tree.depth[edges] - 1, :, tree.first_leaf[edges]] = values[:, edges].T
    return table.flatten(1)


def from_table(table: Tensor, tree: trees.Tree) -> Tensor:
    """The reverse of `to_table`, [P, nodes]; NaN for roots."""
    grid = table.view(tree.steps, -1, tree.num_slots)
    values = grid[(tree.depth - 1).clamp(min=0), :, tree.first_leaf].T
    return torch.where(tree.depth > 0, values, torch.nan)
