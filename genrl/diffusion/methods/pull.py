"""The pull towards the best sample of a group: LayerTuning-RL of Dynamic-TreeRPO (objectives/layer_tuning.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from genrl.diffusion.methods.edges import Edges, progress_table
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.methods.old_policy import judged_under, rows_of
from genrl.diffusion.rollout.forest import Piece
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.tree import Tree
from genrl.objectives.surrogates.layer_tuning import velocity_towards


@dataclass(frozen=True)
class Pull:
    """Towards the best sample of each group (Dynamic-TreeRPO's LayerTuning-RL)."""

    weight: Tensor
    """By step and slot, [T, N]."""
    targets: dict[tuple[int, int], Tensor]
    """(step, group) -> velocity on the best path, or (-1, group) -> the best sample itself, [...]."""
    leaves: int
    """Samples of a group."""

    def target(self, piece: Piece, step: int) -> Tensor:
        """Velocity that each action of this step is pulled to, [B, ...]."""
        groups = [slot // self.leaves for slot in piece.slots[step]]
        if (step, groups[0]) in self.targets:
            return torch.stack([self.targets[step, group] for group in groups])
        trajectory, rows = piece.trajectory, piece.trajectory.rows(step)
        state = trajectory.states[step]
        clean = torch.stack([self.targets[-1, group] for group in groups])
        state = state if rows is None else state[rows.to(state.device)]
        return velocity_towards(state, clean, float(trajectory.sigmas[step]))


@torch.no_grad()
def pull_to_best(run: DiffusionRun, settings: FlowGRPO, rollouts: Rollouts, tree: Tree, edges: Edges) -> Pull | None:
    """Weights and targets of the pull, made before the first update. A group is whole within a micro-batch.

    The velocity on the best path is evaluated once more, for one state per group and trained step.
    """
    if settings.layer_tuning is None:
        return None
    leaves, targets = tree.num_slots, {}
    rewards = rollouts.total.view(-1, leaves)
    best = rewards.nan_to_num(-torch.inf).argmax(1).tolist()
    paths = [tree.first_leaf[tree.path(int(tree.leaves[leaf]))].tolist() for leaf in best]  # slots by depth
    for micro_batch in rollouts.mine.values():
        if settings.layer_tuning.target == "best_image":
            finals = zip(micro_batch.slots, micro_batch.final, strict=True)
            targets |= {(-1, s // leaves): x for s, x in finals if s % leaves == best[s // leaves]}
            continue
        for piece in micro_batch.pieces:
            trajectory = piece.trajectory
            for i, slots in piece.slots.items():
                chosen = [k for k, slot in enumerate(slots) if slot % leaves == paths[slot // leaves][i + 1]]
                if not chosen or not bool(edges.weight[i].any()):
                    continue
                rows = rows_of(trajectory, i)[chosen]
                batch = judged_under(run.policy, settings, trajectory.batch.take(rows.tolist()))
                states = trajectory.states[i][rows.to(trajectory.states[i].device)]
                outputs = run.policy.velocity(batch, states, trajectory.sigmas[i])
                targets |= {(i, slots[k] // leaves): v for k, v in zip(chosen, outputs, strict=True)}
    return Pull(progress_table(tree, rollouts.total), targets, leaves)
