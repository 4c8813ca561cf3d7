"""The rollout tree of one prompt as flat arrays in level order.

A node is a state x_i at depth i; the edge into it is the transition of step i - 1 that sampled it; a leaf is a node
without children. Roots come first, the nodes of one depth are contiguous, and so are the children of one node.

Random numbers. Leaves are numbered in depth-first order; a node's slot is that of the first leaf below it. The edge
into node c at step i takes its noise from `(seed, iteration, slot of c)` and "step", i: so siblings differ (their
leaves do), depths differ (the step does), a tree of branching 1 is independent rollouts bit for bit, and a leaf can be
made again alone by walking its path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.mdp.noise import generator, keyed_noise
from genrl.mdp.plan import SamplingPlan

NoiseKey = tuple[int | str, ...]


class Segment(NamedTuple):
    """Steps [start, stop) that are run in one go: one model call per row and step.

    Only the last step branches. Before it, row r is node `tree.level(d)[r]` at every depth d, and its slot stays.
    """

    start: int
    stop: int
    rows: Tensor
    """Nodes at depth `start`, int64 [R]: the states to resume from."""
    children: Tensor
    """Nodes at depth `stop`, int64 [C]: what the last step samples."""
    parent_row: Tensor
    """Row whose last model output each child is sampled from, int64 [C]."""


@dataclass(frozen=True)
class Tree:
    """All tensors int64 [N], on the CPU."""

    parent: Tensor
    """-1 for a root."""
    depth: Tensor
    """0 for a root; the edge into a node is of step depth - 1."""
    first_child: Tensor
    """First of the contiguous children; meaningless without any."""
    num_children: Tensor
    first_leaf: Tensor
    """Slot: number of the first leaf below the node, leaves counted in depth-first order."""
    num_leaves: Tensor
    """Leaves below the node, itself included if it is one."""

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def steps(self) -> int:
        return int(self.depth[-1])

    @property
    def leaves(self) -> Tensor:
        """Nodes without children, int64 [L], in level order: the order of leaf values in
        `genrl.objectives.credit`.
        Where all are of one depth, leaf k has slot k."""
        return (self.num_children == 0).nonzero()[:, 0]

    @property
    def num_slots(self) -> int:
        """Leaves of the tree: slots that it takes up."""
        return int(self.num_leaves[self.depth == 0].sum())

    def level(self, depth: int) -> range:
        """Nodes at this depth."""
        first, last = torch.searchsorted(self.depth, torch.tensor([depth, depth + 1])).tolist()
        return range(first, last)

    def children(self, node: int) -> range:
        first = int(self.first_child[node])
        return range(first, first + int(self.num_children[node]))

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while int(self.parent[nodes[-1]]) >= 0:
            nodes.append(int(self.parent[nodes[-1]]))
        return nodes[::-1]

    def keys(self, nodes: Iterable[int], *, seed: int, iteration: int, prompt_slot: int = 0) -> list[NoiseKey]:
        """Key of the edge into each node (of the initial noise, for a root): (seed, iteration, slot).

        The trees of an iteration's prompts lie one after another: tree p begins at slot p * num_slots.
        """
        offset = prompt_slot * self.num_slots
        return [(seed, iteration, offset + int(self.first_leaf[node])) for node in nodes]

    def segments(self) -> list[Segment]:
        """The steps of the tree, cut after every step at which some node has more or fewer than one child."""
        pieces, start = [], 0
        for step in range(self.steps):
            level, below = self.level(step), self.level(step + 1)
            if step + 1 < self.steps and bool((self.num_children[level.start : level.stop] == 1).all()):
                continue
            rows, children = self.level(start), torch.arange(below.start, below.stop)
            parent_row = self.parent[children] - level.start
            pieces.append(Segment(start, step + 1, torch.arange(rows.start, rows.stop), children, parent_row))
            start = step + 1
        return pieces


def from_parents(parent: Sequence[int] | Tensor) -> Tree:
    """The tree of the parents, integers [N] (-1 for roots). Raises ValueError unless the nodes are in level order.

    Level order: depths never fall, and the children of one node are contiguous, in the order of their parents.
    """
    parents = torch.as_tensor(parent, dtype=torch.int64).cpu()
    if parents.dim() != 1 or len(parents) == 0 or int(parents[0]) != -1:
        raise ValueError(f"parent must be a vector that begins with a root (-1), got {parents.tolist()[:8]}")
    if bool((parents[1:] < parents[:-1]).any()) or bool((parents >= torch.arange(len(parents))).any()):
        raise ValueError("parent must be in level order: it never falls, and a parent comes before its children")
    nodes = len(parents)
    roots = int((parents == -1).sum())
    levels = [range(0, roots)]  # children of one level are the next: parents never fall
    while levels[-1].stop < nodes:
        last = levels[-1]
        levels.append(range(last.stop, int(torch.searchsorted(parents, last.stop))))
    depth = torch.cat([torch.full((len(level),), d) for d, level in enumerate(levels)])
    edges = parents[roots:]
    num_children = torch.zeros(nodes, dtype=torch.int64).index_add(0, edges, torch.ones_like(edges))
    first_child = roots + num_children.cumsum(0) - num_children
    num_leaves = (num_children == 0).to(torch.int64)
    for level in reversed(levels[1:]):
        inside = slice(level.start, level.stop)
        num_leaves = num_leaves.index_add(0, parents[inside], num_leaves[inside])
    first_leaf = torch.zeros(nodes, dtype=torch.int64)
    before = num_leaves.cumsum(0) - num_leaves  # leaves below earlier nodes, of any depth
    first_leaf[:roots] = before[:roots]
    for level in levels[1:]:
        inside = slice(level.start, level.stop)
        mother = parents[inside]
        # Below a mother the leaves of earlier sisters come first.
        first_leaf[inside] = first_leaf[mother] + before[inside] - before[first_child[mother]]
    return Tree(parents, depth, first_child, num_children, first_leaf, num_leaves)


def grow(plan: SamplingPlan, *key: int | str) -> Tree:
    """The tree of a plan: arrays [N] of its `sum(plan.nodes)` nodes.

    With `continue_one`, the key (run seed, iteration, prompt slot) decides which candidates continue.
    """
    parents = [torch.full((plan.roots,), -1)]
    alive = torch.arange(plan.roots)
    total = plan.roots
    for step, ways in enumerate(plan.branching):
        parents.append(alive.repeat_interleave(ways))
        alive = total + torch.arange(len(parents[-1]))
        total += len(alive)
        if plan.continue_one and ways > 1:
            chosen = torch.randint(ways, (plan.roots,), generator=generator(*key, "continue", step))
            # The others stay in the tree, without children: SPO compares all candidates, and one goes on.
            alive = alive.view(plan.roots, ways)[torch.arange(plan.roots), chosen]
    return from_parents(torch.cat(parents))


def edge_noise(
    shape: Sequence[int],
    key: NoiseKey,
    step: int,
    *,
    parent_key: NoiseKey | None = None,
    spread: float | None = None,
) -> Tensor:
    """Standard normal noise [shape] of the edge with this key at `step`: that of an independent rollout.

    With `spread` (a split with correlated siblings), `correlated_noise` of it and of a part that all children of the
    parent share, keyed by `parent_key`.
    """
    independent = keyed_noise(shape, *key, "step", step)
    if spread is None:
        return independent
    if parent_key is None:
        raise ValueError("correlated siblings need parent_key, the key of the node they share")
    return correlated_noise(keyed_noise(shape, *parent_key, "step", step, "base"), independent, spread)


def correlated_noise(base: Tensor, own: Tensor, spread: float) -> Tensor:
    """`(base + s own) / sqrt(1 + s^2)`: BranchGRPO's branch noise (arXiv 2509.06040), standard normal for any s.

    base, own: tensors that broadcast, standard normal; the result has their common shape. Siblings with one `base` have
    correlation 1 / (1 + s^2). s = 0 makes them equal.
    """
    return (base + spread * own) / math.sqrt(1.0 + spread**2)
