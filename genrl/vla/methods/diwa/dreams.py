"""Imagination as an environment (DiWA, arXiv 2508.03645).

It shows latents, "agent_pos" the deterministic h and "environment_state" the sampled z of `rssm.Latent`, and is a
`contract.Environment`, as the real world is that the same model looks at (`demonstrations.World.seen_by`): a policy on
latents acts in either, and what trains on tables trains in dreams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.vla.methods.diwa.rssm import Latent, WorldModel
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, Inputs

Shown = dict[str, NDArray[Any]]
Floats = NDArray[np.float32]


def latent_inputs(world: WorldModel, vocabulary: tuple[str, ...]) -> Inputs:
    """What a policy on latents reads: h, z and the instruction."""
    return Inputs(state=world.deterministic, vocabulary=vocabulary, environment=world.stochastic)


def as_observation(latent: Latent, tokens: Tensor) -> Batch:
    """A latent and its instruction under the policy's names."""
    return {STATE: latent.h, ENVIRONMENT: latent.z, TOKENS: tokens}


class Starts(NamedTuple):
    """Where dreams begin: latents of real beginnings [S, ..], and instructions of them [S]."""

    latent: Latent
    instructions: Sequence[str]


class Dream:
    """`num_envs` dreams: chunks are executed in the frozen world model, one latent step per action.

    draw: pictures of the observations that latents stand for. judge: says after every step whether the instruction is
    fulfilled, which is reward 1 and ends the dream; max_steps actions without it truncate. Next-step auto-reset,
    "rewards", "n_executed" and "is_success" as in `contract.Environment`.
    Episode k of dream i begins from a start, and draws z with noise, that are functions of (seed, i // group_size, k);
    actions are clipped to [-1, 1].
    """

    in_order = False

    def __init__(
        self,
        world: WorldModel,
        judge: Any,
        starts: Starts,
        *,
        draw: Callable[[Floats, int], NDArray[np.uint8]],
        num_envs: int,
        chunk: int,
        max_steps: int,
        group_size: int = 1,
    ) -> None:
        places, lines = len(starts.latent.h), len(starts.instructions)
        if places != lines or not lines:
            raise ValueError(f"{places} starts have {lines} instructions: one each, and one at least")
        self.world, self.judge, self.starts, self.draw = world, judge, starts, draw
        self.num_envs, self.chunk, self.group_size, self._limit = num_envs, chunk, group_size, max_steps
        self.max_steps: int | None = max_steps
        self.waited_s, self.dropped, self.restarts, self.action_dim, self.first_slot = 0.0, 0, 0, 3, 0
        self._latent = world.start(num_envs)
        self._start = np.zeros(num_envs, dtype=np.int64)
        self._count = np.zeros(num_envs, dtype=np.int64)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.zeros(num_envs, dtype=np.bool_)
        self._rngs: list[torch.Generator] = []
        self._first: NDArray[np.uint64] | None = None

    @property
    def task_description(self) -> list[str]:
        """The instruction of each dream."""
        return [self.starts.instructions[place] for place in self._start.tolist()]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Shown, dict[str, Any]]:
        """Begin episode 0 of the seed everywhere, or the numbered ones of options["episodes"] (uint64 [n])."""
        groups = np.arange(self.num_envs, dtype=np.uint64) // np.uint64(self.group_size)
        chosen = (options or {}).get("episodes")
        self._first = groups + np.uint64(derive_seed(seed or 0, "dreams")) if chosen is None else np.asarray(chosen)
        self._count[:] = 0
        self._rngs = [torch.Generator() for _ in range(self.num_envs)]
        self._begin(np.ones(self.num_envs, dtype=np.bool_))
        empty = np.zeros((self.num_envs, self.chunk), dtype=np.float32)
        return self._latent.shown(), self._info(empty, np.zeros(self.num_envs, dtype=np.int64))

    def step(self, actions: Floats, /) -> tuple[Shown, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Imagine a chunk in every dream that goes on; begin the next one in the others."""
        if self._first is None:
            raise RuntimeError("call reset before step")
        chunks = torch.from_numpy(np.asarray(actions, dtype=np.float32)).clamp(-1.0, 1.0)
        if chunks.shape != (self.num_envs, self.chunk, self.action_dim):
            raise ValueError(
                f"actions must have shape [{self.num_envs}, {self.chunk}, {self.action_dim}], got {list(chunks.shape)}"
            )
        resetting = self._ended
        alive = ~resetting
        rewards = np.zeros((self.num_envs, self.chunk), dtype=np.float32)
        executed = np.zeros(self.num_envs, dtype=np.int64)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        tokens = self.judge.tokenise(self.task_description)
        for k in range(self.chunk):
            at = torch.from_numpy(np.flatnonzero(alive))
            if not len(at):
                break
            # Each dream by its own generator: what it dreams does not depend on how long the others last.
            noise = torch.stack([torch.randn(self.world.stochastic, generator=self._rngs[i]) for i in at.tolist()])
            after = self.world.imagine(self._latent.rows(at), chunks[at, k], noise)
            self._latent.h[at], self._latent.z[at] = after.h, after.z
            executed += alive
            self._elapsed += alive
            done = np.zeros(self.num_envs, dtype=np.bool_)
            done[at.numpy()] = self.judge.fulfilled(as_observation(after, tokens[at])).numpy()
            rewards[done, k] = 1.0
            terminated |= done
            alive = alive & ~done & (self._elapsed < self._limit)
        truncated = ~resetting & ~terminated & (self._elapsed >= self._limit)
        if resetting.any():
            self._count[resetting] += 1
            self._begin(resetting)
        self._ended = terminated | truncated
        return self._latent.shown(), rewards.sum(1), terminated, truncated, self._info(rewards, executed)

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """What some dreams look like: the tables that their latents stand for, [n, 128, 128, 3]."""
        pictures = self.world.decode(self._latent.rows(torch.tensor(list(slots)))).detach().numpy()
        pictures[:, 2] -= 0.5  # a number, not a flag: held from the half on
        return self.draw(pictures, 128)

    def close(self) -> None:
        """Nothing was started."""

    def _begin(self, chosen: NDArray[np.bool_]) -> None:
        assert self._first is not None
        for slot in np.flatnonzero(chosen).tolist():
            self._rngs[slot].manual_seed(derive_seed(int(self._first[slot]), "dream", int(self._count[slot])))
            self._start[slot] = int(torch.randint(len(self.starts.instructions), (), generator=self._rngs[slot]))
        at, start = torch.from_numpy(chosen), torch.from_numpy(self._start[chosen])
        self._latent.h[at], self._latent.z[at] = self.starts.latent.h[start], self.starts.latent.z[start]
        self._elapsed[chosen] = 0
        self._ended = self._ended & ~chosen

    def _info(self, rewards: Floats, executed: NDArray[np.int64]) -> dict[str, Any]:
        return {"rewards": rewards, "n_executed": executed, "is_success": rewards.any(1)}
