"""Rollouts as trees: one pipeline run segment by segment, each shared prefix once.

Slots number the samples of an iteration; the tree of prompt p has the slots p L .. p L + L - 1 of its L leaves, in
depth-first order. A node is known by its depth and the slot of the first leaf below it, so an edge is (step, slot): the
transition of that step which ends in the node. Independent rollouts are the trees of branching 1, whose edges have the
slots of their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel, NoiseKey, Trajectory
from genrl.mdp.dpm import solve
from genrl.mdp.levels import compressed_tail
from genrl.mdp.plan import SamplingPlan
from genrl.mdp.tree import Segment, Tree, grow


@dataclass(frozen=True)
class Piece:
    """A recorded segment of the rows that were run together: what training replays together."""

    trajectory: Trajectory
    slots: dict[int, list[int]]
    """Step -> slot of each recorded action."""

    def of(self, slots: Collection[int]) -> Piece:
        """The samples at these slots, of a piece in which nothing branches."""
        every = next(iter(self.slots.values()))  # the same at all steps
        rows = [row for row, slot in enumerate(every) if slot in slots]
        return Piece(self.trajectory.take(rows), dict.fromkeys(self.slots, [every[r] for r in rows]))


@dataclass(frozen=True)
class Samples:
    """Finished ones, and how they came about."""

    slots: list[int]
    """Of the samples."""
    batch: Batch
    final: Tensor
    """Final states in the order of `slots`, float32 [B, ...]."""
    sigmas: Tensor
    """The full schedule, float32 [T + 1] (diffusion: timesteps [T])."""
    pieces: list[Piece]


class Draw(Protocol):
    """How samples are made: a function of the policy and of what it is given, which other processes may call."""

    def __call__(self, policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None]) -> Samples:
        """The samples of these slots, of these prompts and conditions; `beat` is called now and then."""
        ...


def independent(trajectory: Trajectory, slots: list[int]) -> Samples:
    """Rollouts from noise to sample, one per slot, that share nothing."""
    pieces = [Piece(trajectory, dict.fromkeys(trajectory.log_probs, slots))]
    return Samples(slots, trajectory.batch, trajectory.final, trajectory.sigmas, pieces)


def roll_out(
    policy: Policy,
    batch: Batch,
    slots: list[int],
    plan: SamplingPlan,
    kernel: Kernel,
    batch_size: int,
    beat: Callable[[], None] = lambda: None,
    keep: Collection[int] = (),
) -> Samples:
    """The trees of this plan that begin at these roots.

    batch: the roots, with the keys of their initial noise; slots: their slots. kernel: the transition, whose levels are
    those of the plan. batch_size: rows of one model call. Deterministic steps are the ODE's; the tail of the plan, if
    it has one, is DPM-Solver++'s of second order on a grid that ends at sigma 0. `beat` is called after each segment of
    `batch_size` rows. keep: steps whose graphs are kept, for an update under the very weights that drew them.
    """
    if not plan.splits and plan.tail is None and len(slots) <= batch_size:  # no tree: chains in one call
        trajectory = policy.roll_out(batch, kernel, plan.stochastic, keep=keep)
        beat()
        return independent(trajectory, slots)
    tree = grow(plan)
    roots = {int(tree.first_leaf[node]): node for node in tree.level(0)}
    nodes = [roots[slot % tree.num_slots] for slot in slots]
    offsets = [slot - slot % tree.num_slots for slot in slots]
    forest = _Forest(policy, batch, tree, plan, kernel, batch_size, beat, keep, nodes, offsets)
    for segment in tree.segments():
        forest.run(segment)
    return forest.samples()


@dataclass
class _Forest:
    """The states at one depth of several trees, row by row."""

    policy: Policy
    batch: Batch
    tree: Tree
    plan: SamplingPlan
    kernel: Kernel
    batch_size: int
    beat: Callable[[], None]
    keep: Collection[int]
    nodes: list[int]
    offsets: list[int]
    """Slot at which the tree of each row begins."""
    states: Tensor | None = None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def slots(self) -> list[int]:
        return [offset + int(self.tree.first_leaf[node]) for offset, node in zip(self.offsets, self.nodes, strict=True)]

    def run(self, segment: Segment) -> None:
        solver_from = self.plan.steps - (self.plan.tail.steps if self.plan.tail else 0)
        if segment.start >= solver_from:
            return  # all of it is the solver's
        stop = min(segment.stop, solver_from)
        # A segment branches at its last step if at all, so that each row has one node before that step.
        last = [self._down(node, stop - 1 - segment.start) for node in self.nodes]
        branches = any(int(self.tree.num_children[node]) > 1 for node in last)
        # Nodes without children are candidates with which no chain goes on.
        chosen = [row for row, node in enumerate(last) if int(self.tree.num_children[node]) > 0]
        nodes: list[int] = []
        parents: list[int] = []
        finals: list[Tensor] = []
        # A tree widens on its way down: what began as one call of a few roots becomes several of `batch_size` rows.
        for first in range(0, len(chosen), self.batch_size):
            rows = chosen[first : first + self.batch_size]
            children = [(k, child) for k, row in enumerate(rows) for child in self.tree.children(last[row])]
            piece = self._roll(rows, last, children if branches else None, segment.start, stop)
            self.sigmas = piece.trajectory.sigmas
            if piece.slots:  # of deterministic steps nothing is trained
                self.pieces.append(piece)
            finals.append(piece.trajectory.final)
            self.beat()
            nodes += [child for _, child in children]
            parents += [rows[k] for k, _ in children]
        self.states, self.nodes = finals[0] if len(finals) == 1 else torch.cat(finals), nodes
        self.offsets = [self.offsets[row] for row in parents]
        self.batch = self._keyed(self.batch.take(parents), self.slots)

    def _roll(
        self, rows: list[int], last: list[int], children: list[tuple[int, int]] | None, start: int, stop: int
    ) -> Piece:
        """Run these rows together; `last` are the nodes before the step that may branch."""
        batch, every = self.batch.take(rows), self.slots
        slots = [every[row] for row in rows]
        recorded = dict.fromkeys(range(start, stop), slots)
        branching = None
        if children is not None:
            child_slots = [self.offsets[rows[k]] + int(self.tree.first_leaf[child]) for k, child in children]
            keys = self._keyed(batch.take([k for k, _ in children]), child_slots).keys
            bases = [batch.keys[k] for k, _ in children] if self.plan.spread is not None else None
            branching = Children(torch.tensor([k for k, _ in children]), keys, bases, self.plan.spread)
            recorded[stop - 1] = child_slots
        trajectory = self.policy.roll_out(
            batch,
            self.kernel,
            self.plan.stochastic,
            start=start,
            stop=stop,
            # Roots have no state yet: the pipeline makes their noise, from the keys of the batch.
            state=None if self.states is None else self._states_of(rows),
            children=branching,
            keep=self.keep,
        )
        return Piece(trajectory, {i: recorded[i] for i in trajectory.log_probs})

    def _states_of(self, rows: list[int]) -> Tensor:
        """A view where they follow one another: states are kept for training, once."""
        assert self.states is not None
        return self.states[rows[0] : rows[-1] + 1] if rows[-1] - rows[0] + 1 == len(rows) else self.states[rows]

    def _down(self, node: int, steps: int) -> int:
        """The only descendant so many steps below."""
        for _ in range(steps):
            node = int(self.tree.first_child[node])
        return node

    def _keyed(self, batch: Batch, slots: Sequence[int]) -> Batch:
        # The noise of an edge belongs to the slot that it leads to, however trees are cut into calls.
        keys: list[NoiseKey] = [(*key[:-1], slot) for key, slot in zip(batch.keys, slots, strict=True)]
        return Batch(batch.prompts, keys, batch.sampling, batch.initial_keys, batch.inputs)

    def samples(self) -> Samples:
        assert self.states is not None
        sigmas = self.sigmas
        if self.plan.tail is not None:
            # MixGRPO-Flash: after the window nothing is trained, so these steps may be fewer and of a better solver.
            levels = compressed_tail(sigmas, self.plan.steps - self.plan.tail.steps, self.plan.tail.steps)
            self.states = torch.cat(
                [self._solve(rows, levels) for rows in torch.arange(len(self.nodes)).split(self.batch_size)]
            )
        slots = self.slots
        # Rows come as they were run; whoever scores and trains them counts slots.
        order = sorted(range(len(slots)), key=slots.__getitem__)
        return Samples([slots[k] for k in order], self.batch.take(order), self.states[order], sigmas, self.pieces)

    def _solve(self, rows: Tensor, levels: Tensor) -> Tensor:
        assert self.states is not None
        batch = self.batch.take(rows.tolist())
        solved = solve(lambda x, sigma: self.policy.velocity(batch, x, sigma), self.states[rows], levels)
        self.beat()
        return solved
