"""Data of mixed quality on MiniTable: a player who often does something else than it is told."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from genrl.config.vla import VLAConfig
from genrl.mdp.noise import derive_seed
from genrl.vla.methods.offline import Reader, Transitions, play
from genrl.vla.policies.policy import Batch
from genrl.vla.simulators.minitable import MiniTable, expert_chunk
from genrl.vla.simulators.minitable.task import MAX_STEPS, task_numbers

NOISE = 0.3
"""Standard deviation of what is added to the player's moves."""


def wayward_data(
    config: VLAConfig, reads: Reader, horizon: int, *, episodes: int, right: float, gamma: float, image_size: int = 0
) -> Transitions:
    """Episodes of a player who does what it is told in a share `right` of them, and else something else."""
    env = config.environment
    tasks = task_numbers(env.tasks or ())
    chunk, limit = env.chunk or horizon, env.max_steps or MAX_STEPS
    table = MiniTable(episodes, tasks=tasks, image_size=image_size, chunk=chunk, max_steps=limit)
    seed = derive_seed(config.seed, "wayward")
    rng = np.random.default_rng([seed, 0])
    does_right, other = rng.random(episodes) < right, rng.integers(len(tasks), size=episodes)

    def behave(observation: Batch, decision: int) -> Tensor:
        state = table.state
        chunk = expert_chunk(state._replace(task=np.where(does_right, state.task, np.array(tasks)[other])), horizon)
        noise = np.random.default_rng([seed, 1, decision]).normal(0.0, NOISE, chunk[..., :2].shape)
        chunk[..., :2] += noise.astype(np.float32)
        return torch.from_numpy(np.clip(chunk, -1.0, 1.0))

    decisions = -(-table.max_steps // table.chunk)
    return play(table, behave, reads, decisions=decisions, seed=seed, gamma=gamma, one_episode=True)
