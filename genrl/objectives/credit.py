"""Credit in a tree: from the rewards of its leaves to the advantages and weights of its edges, and which of them train.

A tree is `parent`, int64 [N] in level order (-1 for roots, see `genrl.mdp.tree`); entry n of an edge array is the edge
into node n, and roots have none. Values may have leading dimensions, [..., N] (several prompts on trees of one shape);
leaf values are [..., L], one per node without children, in level order. All is computed in float64.

NaN is a leaf without a score: backups leave it out, a node with no scored leaf has no value (NaN), its advantage is 0.
Among log-probabilities NaN is a deterministic edge: it was not sampled and has no weight in a softmax.

Pruning (PODS's down-sampling of a group, arXiv 2504.13818; BranchGRPO's of depths and widths, arXiv 2509.06040) removes
training edges only: no model call of sampling is saved by it. Its masks are bool [..., N], False for roots; "the last
split" is the last step at which nodes have several children, and width pruning keeps every edge up to it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

EdgeWeighting = Literal["per_edge", "leaf_multiplicity"]


class DepthNormalised(NamedTuple):
    """advantages [..., N]; skipped: depths with too few nodes for statistics of their own."""

    advantages: Tensor
    skipped: list[int]


def leaf_nodes(parent: Tensor) -> Tensor:
    """Nodes without children, int64 [L], in level order."""
    has_child = torch.zeros(len(parent), dtype=torch.bool, device=parent.device)
    has_child[parent[parent >= 0]] = True
    return (~has_child).nonzero()[:, 0]


def leaves_below(parent: Tensor) -> Tensor:
    """Whether each leaf is below each node (or is it), bool [N, L]."""
    node = leaf_nodes(parent)
    below = torch.zeros(len(parent), len(node), dtype=torch.bool, device=parent.device)
    leaf = torch.arange(len(node), device=parent.device)
    while bool((node >= 0).any()):
        below[node[node >= 0], leaf[node >= 0]] = True
        node = torch.where(node >= 0, parent[node], -1)
    return below


def leaf_counts(parent: Tensor, counted: Tensor | None = None) -> Tensor:
    """m_e: leaves below each node, itself included if it is one, int64 [..., N]. counted: bool [..., L]; None = all."""
    below = leaves_below(parent)
    return (below if counted is None else below & counted[..., None, :]).sum(-1)


def edges_to(parent: Tensor, leaves: Tensor) -> Tensor:
    """Edges on the paths from the roots to the chosen leaves, bool [..., N]. leaves: bool [..., L]."""
    return (leaves_below(parent) & leaves[..., None, :]).any(-1) & (parent >= 0)


def mean_of_leaves(parent: Tensor, leaf_values: Tensor) -> Tensor:
    """Mean value of the leaves below each node, [..., N].

    With leaf advantages it is the exact credit of a shared edge: the gradient of G rollouts that share edges is
    `sum_e (m_e / G) (mean of A below e) grad l_e`. With rewards it is BranchGRPO's uniform fusion (arXiv 2509.06040).
    """
    return _softmax_mean(parent, leaf_values, torch.zeros_like(leaf_values, dtype=torch.float64))


def path_softmax(parent: Tensor, leaf_values: Tensor, edge_log_prob: Tensor, beta: float = 1.0) -> Tensor:
    """Leaf values below each node weighted by `exp(beta sum of l_e on the path down)`: BranchGRPO's eq. 3, [..., N].

    edge_log_prob: [..., N], the log-probabilities of sampling (a mean over elements: with sums the weights are
    one-hot); entries of roots are not read. beta = 0 is `mean_of_leaves`.
    """
    # The path from a node down is the path from the root less what all its leaves have in common.
    path = _along_path(parent, beta * _nan_as_zero(edge_log_prob))
    return _softmax_mean(parent, leaf_values, path[..., leaf_nodes(parent)])


def level_softmax(parent: Tensor, leaf_values: Tensor, edge_log_prob: Tensor, alpha: float = 1.0) -> Tensor:
    """`value(n) = sum over children of softmax(alpha l_child) value(child)`, from the leaves up, [..., N].

    With leaf rewards it is the probability-weighted fusion of BranchGRPO's released code; with leaf advantages
    TreeGRPO's backup (arXiv 2512.08153), which at alpha = 0 is its uniform one. It equals `path_softmax` only where
    sibling subtrees have equal log-partitions. Sampling has already favoured likely children: alpha = 0 is unbiased.
    """
    path = _along_path(parent, _log_sibling_weights(parent, alpha * _nan_as_zero(edge_log_prob)))
    return _softmax_mean(parent, leaf_values, path[..., leaf_nodes(parent)])


def normalise_per_depth(
    values: Tensor, depth: Tensor, *, min_nodes: int = 4, eps: float = 1e-8, flat: float = 1e-6
) -> DepthNormalised:
    """`(v - mean_d) / (std_d + eps)` over the nodes of one depth, sample std: BranchGRPO's advantage, [..., N].

    Two values always get +-1/sqrt(2) whatever their distance, so a depth of two nodes or more, but fewer than
    `min_nodes`, is skipped: its nodes are measured against the deepest ones (the leaves) instead, and the depth is
    returned to be reported. (The released code normalises every depth of two nodes or more: min_nodes = 2.)
    A depth of one node, or whose std is below `flat`, gets 0. depth: int64 [N].
    """
    last = int(depth.max())
    advantages = torch.zeros_like(values, dtype=torch.float64)
    skipped = []
    for level in range(last + 1):
        inside = depth == level
        count = int(inside.sum())
        if count < 2:
            continue
        alone = count >= min_nodes or level == last
        if not alone:
            skipped.append(level)
        mean, std = _moments(values[..., inside if alone else depth == last].double())
        centred = (values[..., inside].double() - mean) / (std + eps)
        advantages[..., inside] = torch.where((std < flat) | centred.isnan(), 0.0, centred)
    return DepthNormalised(advantages, skipped)


def edge_weights(trained: Tensor, counts: Tensor, weighting: EdgeWeighting) -> Tensor:
    """Weights of the trained edges, float64 [..., N], 0 for the others: the loss of an update is
    `sum of weight x edge loss / sum of weights` over all its edges, of all prompts and processes.

    "per_edge": 1 each, which favours deep edges by 1 / m_e against independent rollouts (BranchGRPO, TreeGRPO).
    "leaf_multiplicity": m_e, the scored leaves below (pruned ones included): with `mean_of_leaves` of leaf advantages
    the gradient is then, on policy, exactly that of the paths as separate rollouts, for which a tree is an unbiased
    stand-in. trained: bool [..., N], False for roots; counts: `leaf_counts` of the scored leaves, int64 [..., N].
    A sum of 0 is an update to be skipped (no branch was chosen). Raises ValueError for another weighting.
    """
    if weighting == "per_edge":
        return trained.double()
    if weighting == "leaf_multiplicity":
        return trained * counts.double()
    raise ValueError(f"edge weighting must be per_edge or leaf_multiplicity, got {weighting!r}")


def signed_advantage(scores: Tensor, *, clip: float = 5.0, positive: float = 1.0, negative: float = 1.0) -> Tensor:
    """`clamp(score, +-clip)` times `positive` above 0, else `negative`: B2-DiffuRL's advantage (arXiv 2503.11240).

    Elementwise, any shape.
    """
    clipped = scores.detach().clamp(-clip, clip)
    return torch.where(scores > 0, positive * clipped, negative * clipped)


def branch_extremes(scores: Tensor, branch: Tensor, *, high: float = 0.5, low: float = -0.5) -> Tensor:
    """+1 for the best sample of a branching point if its score is >= high, -1 for the worst if < low, else 0, [N].

    B2-DiffuRL's contrast within a branch: both, one or none of a group are trained. branch: integers [N], the branching
    point of each sample. The first of equals is taken. NaN = no score.
    """
    chosen = torch.zeros(len(scores), dtype=torch.int64)
    for point in set(branch.tolist()):
        members = ((branch == point) & ~scores.isnan()).nonzero()[:, 0]
        if not len(members):
            continue
        best, worst = members[scores[members].argmax()], members[scores[members].argmin()]
        if scores[best] >= high:
            chosen[best] = 1
        if scores[worst] < low:
            chosen[worst] = -1
    return chosen


class PromptHistory:
    """Rewards of each prompt in the last `stages` iterations that drew it, for scores that need no group: B2-DiffuRL.

    Its state is `rewards`: prompt -> list of one list of rewards per iteration, oldest first.
    """

    def __init__(self, stages: int = 8) -> None:
        if stages < 0:
            raise ValueError(f"a history cannot hold {stages} iterations; use 0 or more")
        self.stages = stages
        self.rewards: dict[str, list[list[float]]] = {}

    def normalise(self, rewards: Tensor, prompts: list[str], *, eps: float = 1e-8) -> Tensor:
        """`(r - mean) / (std + eps)`, float64 [N], per prompt over these rewards and the remembered ones, sample std.

        Then these are remembered. NaN rewards stay NaN and are not remembered; a single reward has score 0.
        """
        values = rewards.detach().double()
        scores = torch.full_like(values, torch.nan)
        # Each prompt once, whatever number of slots it fills: its history grows by one entry an iteration.
        for prompt in dict.fromkeys(prompts):
            rows = [row for row, name in enumerate(prompts) if name == prompt and not values[row].isnan()]
            if not rows:
                continue
            past = self.rewards.get(prompt, [])
            now: list[float] = values[rows].tolist()
            rewards_so_far = torch.tensor([value for stage in [*past, now] for value in stage], dtype=torch.float64)
            std = rewards_so_far.std() if len(rewards_so_far) > 1 else rewards_so_far.new_zeros(())
            scores[rows] = (values[rows] - rewards_so_far.mean()) / (std + eps)
            self.rewards[prompt] = [*past, now][-self.stages :] if self.stages else []
        return scores


def _nan_as_zero(edge_log_prob: Tensor) -> Tensor:
    values = edge_log_prob.detach().double()
    return torch.where(values.isnan(), 0.0, values)


def _log_sibling_weights(parent: Tensor, logits: Tensor) -> Tensor:
    """log softmax of each edge among the children of its parent, [..., N]; 0 for roots."""
    edges = (parent >= 0).nonzero()[:, 0]
    edge_logits = logits[..., edges]
    mother = parent[edges].expand_as(edge_logits)
    empty = torch.zeros_like(logits)
    # Less the largest of the siblings, as in every log-softmax: exp of a log-probability that is a sum would underflow.
    raised = edge_logits - empty.scatter_reduce(-1, mother, edge_logits, "amax", include_self=False).gather(-1, mother)
    weights = torch.zeros_like(logits)
    weights[..., edges] = raised - empty.scatter_add(-1, mother, raised.exp()).gather(-1, mother).log()
    return weights


def _softmax_mean(parent: Tensor, leaf_values: Tensor, leaf_logits: Tensor) -> Tensor:
    """Mean of the scored leaves below each node under the softmax of their logits; NaN where there is none."""
    leaf = leaf_values.detach().double()
    scored = ~leaf.isnan()
    logits = torch.where(leaves_below(parent) & scored[..., None, :], leaf_logits[..., None, :], -torch.inf)
    # A node without a scored leaf has a row of -inf, whose softmax is NaN: that says "no value".
    return (logits.softmax(-1) * torch.where(scored, leaf, 0.0)[..., None, :]).sum(-1)


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sample std over the scored ones of the last dimension, kept; std 0 of fewer than two."""
    scored = ~values.isnan()
    count = scored.sum(-1, keepdim=True)
    mean = values.nansum(-1, keepdim=True) / count
    # In two passes: E[x^2] - E[x]^2 cancels where rewards are close to each other.
    squares = torch.where(scored, values - mean, 0.0).square().sum(-1, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def _along_path(parent: Tensor, values: Tensor) -> Tensor:
    """Sum of the edge values from the root to each node, [..., N]; the roots' own entries count as 0."""
    edge_values = torch.where(parent >= 0, values, 0.0)
    total, node = edge_values.clone(), parent
    while bool((node >= 0).any()):
        total = total + torch.where(node >= 0, edge_values[..., node.clamp(min=0)], 0.0)
        node = torch.where(node >= 0, parent[node], -1)
    return total


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
