"""Rollouts of chunks: what a policy decided in simulators, and all that a learner needs of it.

Memory: a rollout of T decisions of B slots is time first. One row of it is an observation (the policy's inputs only; a
picture stays uint8, S S 3 bytes), N (2 H A + 1) numbers of the chain (N = 1 for one sampled step, K for a learned
noise), M H A log-probabilities, and the rewards of C actions. Observations have T + 1 rows: that after the last
decision closes the values. They are on the CPU; choose rows (`training_rows`) and send those.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.objectives import episodes
from genrl.objectives.episodes import executed_mask
from genrl.vla.policies.policy import Batch, joined_batches, rows
from genrl.vla.rollout.sampling import Sampler


class ChunkRollout(NamedTuple):
    """T decisions of B slots; a row is one decision.

    observations: name -> [T + 1, B, ...]. contexts: the same of the contexts [T, B, ...], empty unless kept.
    states, next_states [T, B, N, H, A], step_index int64 [T, B, N], log_prob float32 [T, B, M, H, A]: see `sampling`.
    importance: of a rollout of earlier weights, [T, B, M] and the shape of a ratio's level: how much less
    likely the decision was before the first update than when it was sampled, 1 where it was not; log_prob is then that
    before it. None: not earlier.
    rewards float32 [T, B, C], n_executed int64, terminated, truncated, success, dropped bool [T, B].
    values float32 [T, B, V], of the observation: see `Policy.value`; next_values [T, B], the first one of the true next
    observation, the final one where an episode ended; None for a policy without critic.
    valid bool [T, B]: the row is a decision of an episode (not a reset, nor after the only one that is wanted, nor of
    an episode that was dropped with its simulator: `dropped` where it ended, so its sum counts them).
    episode int64 [T, B]: number of the episode in its slot. What it began from: `first_episodes` (uint64 [B]) for 0,
    later ones are functions of env_seed, the group int64 [B] and this number.
    instruction: of the first episode of every slot. action_dim: numbers of an action that the robot is given.
    shared: what the loss reads of every decision alike; a method puts it in.
    """

    sampler: Sampler
    observations: Batch
    contexts: Batch
    states: Tensor
    next_states: Tensor
    step_index: Tensor
    log_prob: Tensor
    rewards: Tensor
    n_executed: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    dropped: Tensor
    values: Tensor | None
    next_values: Tensor | None
    valid: Tensor
    episode: Tensor
    group: Tensor
    env_seed: int
    first_episodes: NDArray[np.uint64]
    instruction: list[str]
    action_dim: int
    shared: Batch = {}
    importance: Tensor | None = None

    @property
    def done(self) -> Tensor:
        """bool [T, B]."""
        return self.terminated | self.truncated


class TrainingRows(NamedTuple):
    """Some rows of a rollout, [n, ...]: an observation, its record, its log-probability then."""

    observation: Batch
    context: Batch
    states: Tensor
    next_states: Tensor
    step_index: Tensor
    log_prob: Tensor


def episode_returns(rollout: ChunkRollout) -> Tensor:
    """Undiscounted sum of the rewards of the first episode of each slot, float64 [B]: GRPO's score.

    Means nothing for a slot without valid rows (`rollout.valid.any(0)`), whose episode was dropped: leave those out.
    """
    size = rollout.rewards.shape[-1]
    # The episode ends with the last action that was executed, not with the last of the chunk.
    last = executed_mask(rollout.n_executed, size).sum(-1, keepdim=True) - 1 == torch.arange(size)
    return episodes.first_episode_returns(rollout.rewards, last & rollout.done[..., None])


def joined(parts: Sequence[ChunkRollout]) -> ChunkRollout:
    """Rollouts of neighbouring slots as one. Those that ended sooner (one_episode) get rows that are not valid."""
    longest = max(len(part.valid) for part in parts)
    # Counted anew over the padding, whose rows would else carry on as episode 0.
    episode = [_longer(part.done, longest).long().cumsum(0) for part in parts]
    done = [_longer(part.done, longest).long() for part in parts]
    values: dict[str, Any] = {
        "observations": _side_by_side([part.observations for part in parts], longest + 1),
        "contexts": _side_by_side([part.contexts for part in parts], longest),
        "episode": torch.cat([count - now for count, now in zip(episode, done, strict=True)], 1),
        "group": torch.cat([part.group for part in parts]),
        "first_episodes": np.concatenate([part.first_episodes for part in parts]),
        "instruction": sum((part.instruction for part in parts), []),
    }
    for name, value in parts[0]._asdict().items():
        if isinstance(value, Tensor) and name not in values:
            values[name] = torch.cat([_longer(getattr(part, name), longest) for part in parts], 1)
    return parts[0]._replace(**values)


def training_rows(rollout: ChunkRollout, index: Tensor) -> TrainingRows:
    """The rows `index` int64 [n], counted over [T B], slots innermost: `rollout.valid.flatten().nonzero()[:, 0]`."""
    last = len(rollout.valid)
    observation = rows({name: value[:last].flatten(0, 1) for name, value in rollout.observations.items()}, index)
    context = rows({name: value.flatten(0, 1) for name, value in rollout.contexts.items()}, index)
    record = (rollout.states, rollout.next_states, rollout.step_index, rollout.log_prob)
    return TrainingRows(observation, context, *(value.flatten(0, 1)[index] for value in record))


def _longer(rows: Tensor, count: int) -> Tensor:
    """rows [T, B, ...] and zeros, [count, B, ...]."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _side_by_side(batches: list[Batch], count: int) -> Batch:
    """[T, B, ...] of each as one of `count` rows."""
    longer = [{name: _longer(value, count) for name, value in batch.items()} for batch in batches]
    return joined_batches(longer, partial(torch.cat, dim=1))
