"""Demonstrations of scripted experts by the simulator's name, and worlds in which methods make data themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genrl.config.plugins import find
from genrl.vla.config.names import EXPERTS, WORLDS
from genrl.vla.data.frames import Shown

if TYPE_CHECKING:
    from torch import Tensor

    from genrl.vla.config.schema import VLAConfig
    from genrl.vla.offline.transitions import Reader, Transitions
    from genrl.vla.policies.policy import Batch
    from genrl.vla.simulators.contract import Environment

Numbers = NDArray[np.float32]


def demonstrated(
    name: str,
    tasks: Sequence[str],
    count: int,
    *,
    seed: int,
    max_steps: int | None = None,
    image_size: int = 0,
    points: int = 0,
) -> Shown:
    """`count` successful episodes of a simulator's expert, of each task where it has several, with LeRobot's columns.

    max_steps: the longest that counts, None for the simulator's own limit; image_size, points: 0 for none.
    Raises ValueError for a simulator without an expert.
    """
    if name not in EXPERTS.built_in:
        known = ", ".join(EXPERTS.built_in)
        raise ValueError(
            f"demonstrations.expert: {name} has no scripted expert; give a dataset instead ({known} have one)"
        )
    how = {"seed": seed, "max_steps": max_steps, "image_size": image_size, "points": points}
    shown: Shown = find(name, EXPERTS)(tasks, count, **how)
    return shown


class World(Protocol):
    """A simulator whose rules are known, so that methods can play in it, look at it, and say what is fulfilled.

    lines: the instructions of its tasks; known: all that it may say. max_steps: actions of an episode at most.
    """

    lines: list[str]
    known: Sequence[str]
    action_dim: int
    max_steps: int

    def rest(self, actions: Numbers) -> Sequence[float]:
        """The action that stands still after an episode's actions [T, A]."""
        ...

    def expert_data(self, config: VLAConfig, episodes: int, policy: Any, gamma: float) -> Transitions:
        """The expert's decisions as transitions, with what the policy reads."""
        ...

    def wayward_data(
        self, config: VLAConfig, episodes: int, right: float, reads: Reader, horizon: int, gamma: float
    ) -> Transitions:
        """Episodes of a player who does what it is told in a share `right` of them, and else something else."""
        ...

    def careless_data(
        self, config: VLAConfig, episodes: int, careful: float, reads: Reader, horizon: int, gamma: float
    ) -> Transitions:
        """Episodes of a player who avoids hazards in a share `careful` of them, with their costs."""
        ...

    def with_hazards(self, num_envs: int, chunk: int) -> Environment:
        """An environment whose info has "costs" of hazards."""
        ...

    def pictures(self, observation: Batch, size: int) -> Tensor:
        """What an observation looked like, uint8 [N, S, S, 3]."""
        ...

    def instructions(self, observation: Batch, reads: Reader) -> list[str]:
        """The instruction of each row, from its tokens."""
        ...

    def draw(self, numbers: Numbers, size: int) -> NDArray[np.uint8]:
        """Pictures [N, S, S, 3] of the world as numbers [N, O]."""
        ...

    def play(self, count: int, steps: int, *, seed: int) -> Any:
        """Somebody plays without being told to: `observations` [N, T + 1, O], `actions` [N, T, A]."""
        ...

    def walk(self, count: int, *, seed: int, horizon: int, still: int) -> Any:
        """The expert's episodes and `still` more steps: `observations` [N, T + 1, O], `chunks` [N, T, H, A], `done` and
        `counted` bool [N, T], `lines` [N]."""
        ...

    def fulfilled(self, numbers: Numbers) -> Tensor:
        """Which of `lines` the world fulfils, as numbers [N, O]: bool [N, lines]."""
        ...

    def seen_by(self, model: Any, num_envs: int, chunk: int) -> Environment:
        """The real world as the latents of a world model, which looks after every action."""
        ...


def world_of(config: VLAConfig, default: Sequence[str] = ()) -> World:
    """The world of a configuration; default: its tasks, where the configuration names none."""
    env = config.environment
    made: World = find(env.name, WORLDS)(env.tasks or default, env.max_steps)
    return made
