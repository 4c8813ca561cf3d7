"""MiniTable as a world to make data in (`demonstrations.World`): players, what they see, and what is fulfilled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.minitable import INSTRUCTIONS, MiniTable, expert_chunk, render, task
from genrl.playground.minitable.demonstrations import minitable_rest
from genrl.playground.minitable.hazard import HazardTable, mixed_quality
from genrl.playground.minitable.play import Walk, play, seen, table_of, walk
from genrl.playground.minitable.task import Floats, episode_keys
from genrl.vla.config.schema import VLAConfig
from genrl.vla.offline import transitions
from genrl.vla.offline.transitions import Reader, Transitions
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch
from genrl.vla.simulators.contract import Observation, Step

NOISE, CARELESS_NOISE = 0.3, 0.35
"""Standard deviations of what is added to the moves of the wayward player, and of the careless one."""


class TableWorld:
    """Tables with some tasks ("put", "touch", instructions); see `demonstrations.World`."""

    def __init__(self, tasks: Sequence[str] = (), max_steps: int | None = None) -> None:
        self.tasks, self.max_steps = task.task_numbers(tasks), max_steps or task.MAX_STEPS
        self.lines, self.known, self.action_dim = [INSTRUCTIONS[number] for number in self.tasks], INSTRUCTIONS, 3
        self.rest, self.play = minitable_rest, play

    def expert_data(self, config: VLAConfig, episodes: int, policy: Any, gamma: float) -> Transitions:
        """The expert's decisions, with pictures and points for a policy that looks."""
        chunk = config.environment.chunk or policy.horizon
        table = self._table(episodes, chunk, image_size=policy.image_size, points=policy.points)

        def behave(observation: Batch, decision: int) -> Tensor:
            return torch.from_numpy(expert_chunk(table.state, policy.horizon))

        return self._played(table, behave, policy, config.seed, gamma)

    def wayward_data(self, config: VLAConfig, settings: Any, reads: Reader, horizon: int) -> Transitions:
        """Episodes of a player who does what it is told in a share `right` of them, and else something else; with
        pictures for a policy that looks at them. Reward is 1 at success."""
        episodes, new = settings.episodes, config.policy.new
        table = self._table(
            episodes, config.environment.chunk or horizon, image_size=0 if new is None else new.image_size
        )
        seed = derive_seed(config.seed, "wayward")
        rng = np.random.default_rng([seed, 0])
        does_right, other = rng.random(episodes) < settings.right, rng.integers(len(self.tasks), size=episodes)

        def behave(observation: Batch, decision: int) -> Tensor:
            state = table.state
            aims = np.where(does_right, state.task, np.array(self.tasks)[other])
            chunk = expert_chunk(state._replace(task=aims), horizon)
            noise = np.random.default_rng([seed, 1, decision]).normal(0.0, NOISE, chunk[..., :2].shape)
            chunk[..., :2] += noise.astype(np.float32)
            return torch.from_numpy(np.clip(chunk, -1.0, 1.0))

        return self._played(table, behave, reads, seed, settings.critics.gamma)

    def careless_data(self, config: VLAConfig, settings: Any, reads: Reader, horizon: int) -> Transitions:
        """Episodes of a seeded player who reaches its goal and is careful in a share `careful` of them."""
        table = self.with_hazards(settings.episodes, config.environment.chunk or horizon)
        seed = derive_seed(config.seed, "behaviour")
        careful = np.random.default_rng([seed, 0]).random(settings.episodes) < settings.careful

        def behave(observation: Batch, decision: int) -> Tensor:
            state, chunk = table.state, []
            noise = np.random.default_rng([seed, 1, decision]).normal(0.0, CARELESS_NOISE, (horizon, len(careful), 2))
            for k in range(horizon):
                chunk.append(mixed_quality(state, careful, noise[k]))
                state = task.step(state, chunk[-1])
            return torch.from_numpy(np.stack(chunk, 1))

        return self._played(table, behave, reads, seed, settings.critics.gamma)

    def with_hazards(self, num_envs: int, chunk: int) -> HazardTable:
        """Tables whose other discs must be kept away from."""
        return HazardTable(num_envs, tasks=self.tasks, image_size=0, chunk=chunk, max_steps=self.max_steps)

    def pictures(self, observation: Batch, size: int) -> Tensor:
        """What the table looked like, uint8 [N, S, S, 3], from the numbers in an observation."""
        return torch.from_numpy(self.draw(torch.cat([observation[STATE], observation[ENVIRONMENT]], 1).numpy(), size))

    def instructions(self, observation: Batch, reads: Reader) -> list[str]:
        """The instruction of each row, by its tokens."""
        line_of = {}
        for line in INSTRUCTIONS:
            try:
                line_of[tuple(reads.tokenise([line])[0].tolist())] = line
            except ValueError:  # the policy has not learned its words, so it is in no row either
                continue
        return [line_of[tuple(int(n) for n in row if n)] for row in observation[TOKENS].tolist()]

    def draw(self, numbers: Floats, size: int) -> NDArray[np.uint8]:
        """Tables of `play.seen` [N, 9] from above."""
        return render(table_of(numbers), size)

    def walk(self, count: int, *, seed: int, horizon: int, still: int) -> Walk:
        """Episodes of the expert that no environment begins with."""
        return walk(episode_keys(seed, np.arange(count), np.zeros(count)), self.tasks, horizon=horizon, still=still)

    def fulfilled(self, numbers: Floats) -> Tensor:
        """Of tables as `play.seen` shows them [B, 9], bool [B, tasks]."""
        tables = table_of(numbers)
        flags = [task.is_success(tables._replace(task=np.full(len(numbers), number))) for number in self.tasks]
        return torch.from_numpy(np.stack(flags, 1))

    def seen_by(self, model: Any, num_envs: int, chunk: int) -> LatentTable:
        """The real table, shown as latents."""
        return LatentTable(model, num_envs, tasks=self.tasks, chunk=chunk, max_steps=self.max_steps)

    def _table(self, num_envs: int, chunk: int, **shown: int) -> MiniTable:
        return MiniTable(num_envs, tasks=self.tasks, chunk=chunk, max_steps=self.max_steps, **shown)

    def _played(
        self, table: MiniTable, behave: transitions.Behaviour, reads: Reader, seed: int, gamma: float
    ) -> Transitions:
        """The first episode of every table."""
        decisions = -(-table.max_steps // table.chunk)
        return transitions.play(table, behave, reads, decisions=decisions, seed=seed, gamma=gamma, one_episode=True)


class LatentTable(MiniTable):
    """The real table, shown as latents: the world model looks after every executed action. For evaluation."""

    def __init__(self, world: Any, num_envs: int, *, tasks: Sequence[int], chunk: int, max_steps: int) -> None:
        super().__init__(num_envs, tasks=tasks, image_size=0, chunk=chunk, max_steps=max_steps)
        self.world, self.latent = world, world.start(num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """As `MiniTable.reset`."""
        _, info = super().reset(seed=seed, options=options)
        self.latent = self.world.first(torch.from_numpy(seen(self.state)))
        return self.latent.shown(), info

    def step(self, actions: Floats, /) -> Step:
        """As `MiniTable.step`."""
        state, resetting = self.state, ~self._running
        _, rewards, terminated, truncated, info = super().step(actions)
        chunks = torch.from_numpy(np.asarray(actions, dtype=np.float32)).clamp(-1.0, 1.0)
        for k in range(self.chunk):  # the executed actions once more: the table is deterministic
            executed = k < info["n_executed"]
            if not executed.any():
                break
            state = state.replaced(executed, task.step(state.rows(executed), actions[executed, k]))
            at = torch.from_numpy(np.flatnonzero(executed))
            shown = torch.from_numpy(seen(state.rows(executed)))
            after = self.world.look(self.latent.rows(at), chunks[at, k], shown)
            self.latent.h[at], self.latent.z[at] = after.h, after.z
        if resetting.any():
            at = torch.from_numpy(np.flatnonzero(resetting))
            begun = self.world.first(torch.from_numpy(seen(self.state.rows(resetting))))
            self.latent.h[at], self.latent.z[at] = begun.h, begun.z
        return self.latent.shown(), rewards, terminated, truncated, info
