"""Rollouts with the samples of each group that are trained on, where these are not all (PODS, arXiv 2504.13818)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from genrl.diffusion.policy.trajectory import Trajectory
from genrl.diffusion.rollout.forest import Piece
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.objectives.advantages.pruning import max_variance


def downsampled(rollouts: Rollouts, keep: int) -> Rollouts:
    """Without the states of the samples that are left out. Their totals are NaN, so advantages are those of the samples
    that are kept, among themselves. Every micro-batch holds whole groups of independent samples."""
    groups = int(rollouts.group.max()) + 1
    kept = max_variance(rollouts.total.view(groups, -1), keep).flatten()
    slots = set(kept.nonzero()[:, 0].tolist())
    return replace(
        rollouts,
        mine={position: _micro_batch(one, slots) for position, one in rollouts.mine.items()},
        total=torch.where(kept, rollouts.total, math.nan),
        parts={label: torch.where(kept, values, math.nan) for label, values in rollouts.parts.items()},
        slots=[[slot for slot in some if slot in slots] for some in rollouts.slots],
    )


def _micro_batch(one: MicroBatch, slots: Collection[int]) -> MicroBatch:
    rows = [row for row, slot in enumerate(one.slots) if slot in slots]
    pieces = [_piece(piece, slots) for piece in one.pieces if piece.slots]  # the others have nothing to train
    return MicroBatch(
        [one.slots[r] for r in rows], one.batch.take(rows), one.final[rows], one.sigmas, pieces, one.images[rows]
    )


def _piece(piece: Piece, slots: Collection[int]) -> Piece:
    drawn = next(iter(piece.slots.values()))  # the same at all steps: nothing branches
    rows = [row for row, slot in enumerate(drawn) if slot in slots]
    return Piece(_trajectory(piece.trajectory, rows), dict.fromkeys(piece.slots, [drawn[r] for r in rows]))


def _trajectory(whole: Trajectory, rows: list[int]) -> Trajectory:
    def some(values: dict[int, Tensor]) -> dict[int, Tensor]:
        return {step: value[rows] for step, value in values.items()}

    return replace(
        whole,
        batch=whole.batch.take(rows),
        states=some(whole.states),
        next_states=some(whole.next_states),
        log_probs=some(whole.log_probs),
        final=whole.final[rows],
        initial=whole.initial[rows],
        predicted=None if whole.predicted is None else whole.predicted[rows],
    )
