"""BranchGRPO (arXiv 2509.06040) as its code has it: split points, calls of copied states, width pruning by edges."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from genrl.mdp.plan import SamplingPlan


def copied_calls(plan: SamplingPlan) -> int:
    """Model calls of sampling where a node is copied before its split and each copy is evaluated."""
    nodes = plan.nodes
    return sum(nodes[step + 1] if ways > 1 else nodes[step] for step, ways in enumerate(plan.branching))


def uniform_splits(count: int, steps: int) -> tuple[int, ...]:
    """`count` split steps spread evenly over the schedule from step 0: floor(k steps / count) (BranchGRPO's code)."""
    return tuple(k * steps // count for k in range(count))


def repeated_windows(size: int, stride: int, steps: int) -> tuple[int, ...]:
    """Steps i with i mod stride < size: windows that begin at every multiple of `stride` (BranchGRPO-Mix's code)."""
    return tuple(step for step in range(steps) if step % stride < size)


def released_width_pruned(
    parent: Tensor,
    depth: Tensor,
    advantages: Tensor,
    kept: Tensor,
    *,
    last_split: int,
    mode: Literal["per_branch", "global"],
    rate: float = 0.5,
) -> Tensor:
    """The width pruning of BranchGRPO's released code, edge by edge over a batch of trees, bool [B, N].

    "per_branch" (its mode 1): of the edges below each node that the last split made, the best max(1, floor(n rate)).
    These edges are one chain with one advantage, so it keeps the first half of every chain: depths, not widths.
    "global" (mode 2): of all edges after the last split in the batch, max(2, floor(n rate)), half best and half worst.
    Ties go by the code's order of edges, tree after tree and depth first. advantages, kept: [B, N], `kept` what depth
    pruning has left. For comparison: `best_siblings` and `extreme_leaves` are the paper's.
    """
    trees = len(kept)
    after = kept & (depth > last_split + 1)
    order = _preorder(parent, depth)
    result = kept & ~after
    if mode == "per_branch":
        branch = torch.arange(len(parent))  # the ancestor that the last split made; parents come first
        for node in (depth > last_split + 1).nonzero()[:, 0].tolist():
            branch[node] = branch[parent[node]]
        groups = [
            [(tree, node) for node in order if after[tree, node] and int(branch[node]) == top]
            for tree in range(trees)
            for top in (depth == last_split + 1).nonzero()[:, 0].tolist()
        ]
    else:
        groups = [[(tree, node) for tree in range(trees) for node in order if after[tree, node]]]
    for group in groups:
        ranked = sorted(group, key=lambda edge: -float(advantages[edge]))
        if mode == "per_branch":
            chosen = ranked[: max(1, int(len(group) * rate))]
        else:
            number = min(max(2, int(len(group) * rate)), len(group))
            chosen = ranked[: number // 2] + ranked[len(ranked) - (number - number // 2) :]
        for edge in chosen:
            result[edge] = True
    return result


def _preorder(parent: Tensor, depth: Tensor) -> list[int]:
    """Nodes depth first, children in order."""
    children: dict[int, list[int]] = {}
    for node, mother in enumerate(parent.tolist()):
        children.setdefault(mother, []).append(node)
    stack, order = children[-1][::-1], []
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])[::-1]
    return order
