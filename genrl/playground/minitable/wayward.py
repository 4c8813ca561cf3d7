"""Data of mixed quality on MiniTable: a player who often does something else than it is told."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.minitable import INSTRUCTIONS, MiniTable, expert_chunk, render
from genrl.playground.minitable.play import table_of
from genrl.playground.minitable.task import MAX_STEPS, task_numbers
from genrl.vla import setup
from genrl.vla.config.schema import VLAConfig
from genrl.vla.offline.settings import Critics
from genrl.vla.offline.transitions import Reader, Transitions, Words, frames_of, play
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, vocabulary

NOISE = 0.3
"""Standard deviation of what is added to the player's moves."""


class Recording(Protocol):
    """Settings of a method that learns from these data."""

    episodes: int
    right: float
    """Share of them in which the player does what it is told."""
    critics: Critics
    """Settings of the critics, which hold the discount."""


def new_policy(config: VLAConfig, settings: Recording, inputs: tuple[str, ...]) -> Any:
    """A policy for the data (`wayward_data`), which reads these inputs, with weights by the seed."""
    assert config.policy.new is not None
    words = vocabulary([INSTRUCTIONS[number] for number in task_numbers(config.environment.tasks or ())])
    data = wayward_data(config, settings, Words(words, inputs), config.policy.new.horizon)
    return setup.new_policy(config, frames_of(data), words)


def wayward_data(config: VLAConfig, settings: Recording, reads: Reader, horizon: int) -> Transitions:
    """Episodes of a player who does what it is told in a share of them, and else something else; with pictures for a
    policy that looks at them. Reward is 1 at success."""
    env, episodes, right = config.environment, settings.episodes, settings.right
    image_size = config.policy.new.image_size if config.policy.new is not None else 0
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
    return play(table, behave, reads, decisions=decisions, seed=seed, gamma=settings.critics.gamma, one_episode=True)


def pictures(observation: Batch, size: int) -> Tensor:
    """What the table looked like, uint8 [N, S, S, 3], from the numbers in an observation."""
    numbers = torch.cat([observation[STATE], observation[ENVIRONMENT]], 1).numpy()
    return torch.from_numpy(render(table_of(numbers), size))


def instructions(observation: Batch, reads: Reader) -> list[str]:
    """The instruction of each row, found again from its tokens."""
    known = {}
    for line in INSTRUCTIONS:
        try:
            known[tuple(reads.tokenise([line])[0].tolist())] = line
        except ValueError:  # the policy has not learned its words, so it is in no row either
            continue
    return [known[tuple(int(n) for n in row if n)] for row in observation[TOKENS].tolist()]
