"""Which samples of a group, and which edges of a tree, are trained: PODS's down-sampling (arXiv 2504.13818), and
BranchGRPO's pruning (arXiv 2509.06040) of depths and of widths.

Pruning removes training edges only: no model call of sampling is saved by it. Trees as in `credit`: `parent`, int64 [N]
in level order, depth int64 [N], leaf values [..., L]; masks are bool [..., N], False for roots. "The last split" is the
last step at which nodes have several children; every edge up to and including it is kept by width pruning.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from genrl.objectives.advantages.credit import edges_to, leaf_nodes, mean_of_leaves


def depth_pruned(depth: Tensor, window: Collection[int]) -> Tensor:
    """Keep the edges into nodes whose depth is not in `window` (depth = step + 1), [N]."""
    dropped = torch.isin(depth, torch.tensor(sorted(window), dtype=depth.dtype, device=depth.device))
    return (depth > 0) & ~dropped


def best_siblings(parent: Tensor, depth: Tensor, leaf_values: Tensor, *, last_split: int) -> Tensor:
    """Parent-Top1: the leaves below the best child of each node that branches at the last split, bool [..., L].

    A child is worth the mean of its leaves (it has one). The first of equals is kept; of several children without a
    score, all are dropped unless none has one.
    """
    values = mean_of_leaves(parent, leaf_values).nan_to_num(-torch.inf)
    children = (depth == last_split + 1).nonzero()[:, 0]
    is_best = torch.zeros_like(values, dtype=torch.bool)
    for mother in sorted(set(parent[children].tolist())):
        siblings = children[parent[children] == mother]
        is_best.scatter_(-1, siblings[values[..., siblings].argmax(-1, keepdim=True)], True)
    return is_best[..., _ancestors(parent, depth, last_split + 1)[leaf_nodes(parent)]]


def extreme_leaves(leaf_values: Tensor, count: int) -> Tensor:
    """Extreme-b: the `count` best and the `count` worst leaves of each tree, bool [..., L] (all, if there are no more).

    The first of equals is better. A leaf without a score is not kept. Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count: keeping the {count} best and worst leaves leaves nothing to train; use 1 or more")
    scored = ~leaf_values.isnan()
    best = leaf_values.nan_to_num(-torch.inf).argsort(dim=-1, descending=True, stable=True)[..., :count]
    # Flipped: of equal leaves the first counts as better, so the worst are looked for from the end.
    worst = leaf_values.nan_to_num(torch.inf).flip(-1).argsort(dim=-1, stable=True)[..., :count]
    is_extreme = torch.zeros_like(scored).scatter(-1, best, True)
    return is_extreme.scatter(-1, leaf_values.shape[-1] - 1 - worst, True) & scored


def max_variance(values: Tensor, count: int) -> Tensor:
    """Mask of the `count` samples of each group whose values have the largest variance, bool [..., G] (PODS, arXiv
    2504.13818).

    They are the k highest and the count - k lowest for some k: all k are tried, by sums over the sorted values, in
    O(G log G). A sample without a value (NaN) is taken only where there are too few others. Raises ValueError for a
    count outside of 1 to G.
    """
    size = values.shape[-1]
    if not 1 <= count <= size:
        raise ValueError(f"count: {count} samples cannot be kept of groups of {size}")
    flat = values.detach().double().reshape(-1, size)
    selected = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    for row, group in zip(selected, flat, strict=True):
        order = group.argsort(stable=True)  # NaN last
        scored = order[: int((~group.isnan()).sum())]
        if len(scored) <= count:
            row[order[:count]] = True
            continue
        x = group[scored] - group[scored].mean()  # for E[x^2] - E[x]^2
        sums = torch.nn.functional.pad(torch.stack([x, x**2]).cumsum(1), (1, 0))  # of the first 0 ... n
        lowest = torch.arange(count + 1, device=x.device)
        first, second = sums[:, lowest] + sums[:, -1:] - sums[:, len(x) - count + lowest]
        k = int((second / count - (first / count) ** 2).argmax())
        row[scored[:k]] = row[scored[len(x) - count + k :]] = True
    return selected.view(values.shape)


def width_pruned(parent: Tensor, depth: Tensor, kept_leaves: Tensor, *, last_split: int) -> Tensor:
    """Keep every edge up to the last split, and below it the paths to the kept leaves, bool [..., N].

    Raises ValueError where no leaf is kept.
    """
    if not bool(kept_leaves.any(-1).all()):
        raise ValueError("width: no leaf of a tree is kept, so nothing below its last split would be trained")
    return (depth > 0) & ((depth <= last_split + 1) | edges_to(parent, kept_leaves))


def _ancestors(parent: Tensor, depth: Tensor, level: int) -> Tensor:
    """The ancestor of each node at this depth, int64 [N]; the node itself where it is not deeper."""
    node = torch.arange(len(parent), device=parent.device)
    while bool((depth[node] > level).any()):
        node = torch.where(depth[node] > level, parent[node], node)
    return node
