"""MiniTable as a world to make data in (`demonstrations.World`): players, what they see, and what is fulfilled.

Play is somebody who moves discs about without an instruction, which is what a world model learns from; a hazard is a
disc that the instruction does not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.minitable import INSTRUCTIONS, MiniTable, expert_chunk, render, task
from genrl.playground.minitable.demonstrations import minitable_rest
from genrl.playground.minitable.task import PUT, TOUCH, Flags, Floats, State, episode_keys
from genrl.vla.config.schema import VLAConfig
from genrl.vla.offline import transitions
from genrl.vla.offline.transitions import Reader, Transitions
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch
from genrl.vla.simulators.contract import Keys, Observation, Step

NOISE, CARELESS_NOISE = 0.3, 0.35
"""Standard deviations of what is added to the moves of the wayward player, and of the careless one."""
HAZARD = 0.2
"""A gripper nearer than this to another disc than the instruction's does damage; discs begin .36 apart or more."""


class TableWorld:
    """Tables with some tasks ("put", "touch", instructions).

    lines: the instructions of its tasks; known: all that it may say. max_steps: actions of an episode at most.
    """

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

    def wayward_data(
        self, config: VLAConfig, episodes: int, right: float, reads: Reader, horizon: int, gamma: float
    ) -> Transitions:
        """Episodes of a player who does what it is told in a share `right` of them, and else something else; with
        pictures for a policy that looks at them. Reward is 1 at success."""
        new = config.policy.new
        table = self._table(
            episodes, config.environment.chunk or horizon, image_size=0 if new is None else new.image_size
        )
        seed = derive_seed(config.seed, "wayward")
        rng = np.random.default_rng([seed, 0])
        does_right, other = rng.random(episodes) < right, rng.integers(len(self.tasks), size=episodes)

        def behave(observation: Batch, decision: int) -> Tensor:
            state = table.state
            aims = np.where(does_right, state.task, np.array(self.tasks)[other])
            chunk = expert_chunk(state._replace(task=aims), horizon)
            noise = np.random.default_rng([seed, 1, decision]).normal(0.0, NOISE, chunk[..., :2].shape)
            chunk[..., :2] += noise.astype(np.float32)
            return torch.from_numpy(np.clip(chunk, -1.0, 1.0))

        return self._played(table, behave, reads, seed, gamma)

    def careless_data(
        self, config: VLAConfig, episodes: int, careful: float, reads: Reader, horizon: int, gamma: float
    ) -> Transitions:
        """Episodes of a seeded player who reaches its goal and is careful in a share `careful` of them."""
        table = self.with_hazards(episodes, config.environment.chunk or horizon)
        seed = derive_seed(config.seed, "behaviour")
        takes_care = np.random.default_rng([seed, 0]).random(episodes) < careful

        def behave(observation: Batch, decision: int) -> Tensor:
            state, chunk = table.state, []
            noise = np.random.default_rng([seed, 1, decision]).normal(0.0, CARELESS_NOISE, (horizon, episodes, 2))
            for k in range(horizon):
                chunk.append(mixed_quality(state, takes_care, noise[k]))
                state = task.step(state, chunk[-1])
            return torch.from_numpy(np.stack(chunk, 1))

        return self._played(table, behave, reads, seed, gamma)

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
        """Tables of `seen` [N, 9] from above."""
        return render(table_of(numbers), size)

    def walk(self, count: int, *, seed: int, horizon: int, still: int) -> Walk:
        """Episodes of the expert that no environment begins with."""
        return walk(episode_keys(seed, np.arange(count), np.zeros(count)), self.tasks, horizon=horizon, still=still)

    def fulfilled(self, numbers: Floats) -> Tensor:
        """Which of the tasks are fulfilled in tables of `seen` [B, 9], bool [B, tasks]."""
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
        """Resets as `MiniTable` does."""
        _, info = super().reset(seed=seed, options=options)
        self.latent = self.world.first(torch.from_numpy(seen(self.state)))
        return self.latent.shown(), info

    def step(self, actions: Floats, /) -> Step:
        """Steps as `MiniTable` does."""
        state, resetting = self.state, ~self._running
        _, rewards, terminated, truncated, info = super().step(actions)
        chunks = torch.from_numpy(np.asarray(actions, dtype=np.float32)).clamp(-1.0, 1.0)
        for k in range(self.chunk):  # the executed actions once more: the table is deterministic
            executed = k < info["n_executed"]
            if not executed.any():
                break
            state = state.replaced(executed, task.step(state.rows(executed), actions[executed, k]))
            at = torch.from_numpy(np.flatnonzero(executed))
            observed = torch.from_numpy(seen(state.rows(executed)))
            after = self.world.look(self.latent.rows(at), chunks[at, k], observed)
            self.latent.h[at], self.latent.z[at] = after.h, after.z
        if resetting.any():
            at = torch.from_numpy(np.flatnonzero(resetting))
            begun = self.world.first(torch.from_numpy(seen(self.state.rows(resetting))))
            self.latent.h[at], self.latent.z[at] = begun.h, begun.z
        return self.latent.shown(), rewards, terminated, truncated, info


class HazardTable(MiniTable):
    """`MiniTable` whose info also has "costs" float32 [n, chunk]: 1 for an executed action that ended in a hazard."""

    def step(self, actions: Floats, /) -> Step:
        """Steps as `MiniTable` does."""
        state = self.state
        observation, rewards, terminated, truncated, info = super().step(actions)
        costs = np.zeros((self.num_envs, self.chunk), dtype=np.float32)
        for k in range(self.chunk):  # the executed actions once more: the table is deterministic
            executed = k < info["n_executed"]
            state = state.replaced(executed, task.step(state.rows(executed), actions[executed, k]))
            costs[:, k] = executed & in_hazard(state)
        return observation, rewards, terminated, truncated, info | {"costs": costs}


def in_hazard(state: State) -> Flags:
    """Whether the gripper is nearer than `HAZARD` to a disc that the instruction does not name. [n]."""
    dangerous: Flags = nearest_hazard(state) < HAZARD
    return dangerous


def nearest_hazard(state: State) -> Floats:
    """Distance of the gripper to the nearest disc that the instruction does not name. [n]."""
    distance = np.linalg.norm(state.discs - state.gripper[:, None], axis=-1)
    distance[np.arange(len(distance)), _named(state)] = np.inf
    nearest: Floats = distance.min(1)
    return nearest


def mixed_quality(state: State, careful: Flags, noise: Floats) -> Floats:
    """A behaviour to learn from that is not safe: actions [n, 3] towards the disc of a `TOUCH` instruction.

    Straight there, or, where careful [n], turned aside by other discs in the way; noise [n, 2] is added to the move.
    """
    rows = np.arange(len(state.task))
    disc = state.discs[rows, _named(state)]
    way = disc - state.gripper
    unit = way / np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 1e-6)
    aside = np.zeros_like(way)
    for other in range(3):
        apart = state.gripper - state.discs[:, other]
        distance = np.maximum(np.linalg.norm(apart, axis=1), 1e-6)
        push = np.where(_named(state) == other, 0.0, np.clip((0.45 - distance) / 0.2, 0.0, 1.5))
        away = apart / distance[:, None]
        side = np.stack([-away[:, 1], away[:, 0]], 1)  # along the hazard's edge, the way that leads on
        side *= np.where((side * unit).sum(1, keepdims=True) >= 0, 1.0, -1.0)
        in_the_way = (away * unit).sum(1) < 0.3
        aside += (push * in_the_way)[:, None] * (away + 0.8 * side)
    move = unit + np.where(careful[:, None], aside, 0.0)
    short = np.minimum(np.linalg.norm(way, axis=1, keepdims=True) / task.REACH, 1.0)
    move = short * move / np.maximum(np.abs(move).max(1, keepdims=True), 1.0) + noise
    return np.concatenate([np.clip(move, -1.0, 1.0), np.full((len(move), 1), -1.0)], 1).astype(np.float32)


def _named(state: State) -> NDArray[np.int64]:
    """The disc of each instruction."""
    return np.where(np.isin(state.task, TOUCH), state.task - len(PUT), state.task // 3)


class Play(NamedTuple):
    """observations float32 [n, T + 1, 9] (gripper, whether it holds, discs), actions float32 [n, T, 3]."""

    observations: Floats
    actions: Floats


class Walk(NamedTuple):
    """The expert's episodes: observations float32 [n, T + 1, 9], chunks float32 [n, T, H, 3] from each of the first T;
    done bool [n, T]: fulfilled; counted bool [n, T]: not yet over; lines: the instruction of each."""

    observations: Floats
    chunks: Floats
    done: Flags
    counted: Flags
    lines: list[str]


def seen(state: State) -> Floats:
    """The whole table as numbers, [n, 9]: "agent_pos" and "environment_state" of `MiniTable` in one."""
    holding = (state.held >= 0)[:, None].astype(np.float32)
    return np.concatenate([state.gripper, holding, state.discs.reshape(-1, 6)], 1)


def table_of(numbers: Floats) -> State:
    """The tables of `seen` [n, 9], without their instructions; a disc that is held is the nearest to the gripper."""
    gripper, discs = numbers[:, :2], numbers[:, 3:].reshape(-1, 3, 2)
    nearest = np.linalg.norm(discs - gripper[:, None], axis=-1).argmin(1)
    held = np.where(numbers[:, 2] > 0, nearest, -1)
    return State(gripper, discs, held, np.zeros(len(held), dtype=np.int64))


def play(tables: int, steps: int, *, seed: int, noise: float = 0.3) -> Play:
    """A clumsy player on `tables` tables for `steps` actions, a function of the seed.

    It follows one `PUT` goal after the other, or, one time in three, wanders to a zone or anywhere with an open hand;
    changes its mind now and then, moves with Gaussian noise and lets go, or grasps, by mistake in one action of twenty,
    and closes its hand too early in one of three where a disc is near: what a missed grasp is like must be seen to be
    foretold. There are no instructions, rewards or ends in what it leaves behind.
    """
    rng = np.random.default_rng([seed, 0x91A7])
    state = task.initial_state(task.episode_keys(seed, np.arange(tables), np.zeros(tables)), PUT)
    wanders = np.zeros(tables, dtype=np.bool_)
    aim = np.zeros((tables, 2), dtype=np.float32)
    observations, actions = [seen(state)], []
    for _ in range(steps):
        arrived = wanders & (np.linalg.norm(aim - state.gripper, axis=1) < task.REACH)
        bored = np.where(wanders, arrived, task.is_success(state)) | (rng.random(tables) < 0.03)
        state = state._replace(task=np.where(bored, rng.integers(len(PUT), size=tables), state.task))
        wanders = np.where(bored, rng.random(tables) < 1 / 3, wanders)
        near_zone = task.ZONE_CENTRES[rng.integers(3, size=tables)] + rng.normal(0.0, 0.1, (tables, 2))
        anywhere = rng.uniform(-1.0, 1.0, (tables, 2))
        targets = np.where(rng.random((tables, 1)) < 0.5, near_zone, anywhere)
        aim = np.where(bored[:, None], targets, aim).astype(np.float32)
        action = task.expert(state)
        way = aim - state.gripper
        stroll = np.concatenate(
            [way / np.maximum(np.abs(way).max(1, keepdims=True), task.REACH), -np.ones((tables, 1))], 1
        )
        action = np.where(wanders[:, None], stroll, action).astype(np.float32)
        action[:, :2] += rng.normal(0.0, noise, (tables, 2)).astype(np.float32)
        near = np.linalg.norm(state.discs - state.gripper[:, None], axis=-1).min(1) < 0.35
        early = near & (state.held < 0) & (rng.random(tables) < 1 / 3)
        action[:, 2] = np.where(early, 1.0, action[:, 2]) * np.where(rng.random(tables) < 0.05, -1.0, 1.0)
        action = np.clip(action, -1.0, 1.0)
        state = task.step(state, action)
        observations.append(seen(state))
        actions.append(action)
    return Play(np.stack(observations, 1), np.stack(actions, 1))


def walk(keys: Keys, tasks: Sequence[int], *, horizon: int, still: int) -> Walk:
    """The expert's episodes, `still` more steps after each success; all go on until the last one is over."""
    state = task.initial_state(keys, tasks)
    lines, after = [INSTRUCTIONS[number] for number in state.task], np.zeros(len(keys), dtype=np.int64)
    observations, chunks, dones, counted = [seen(state)], [], [], []
    while (after <= still).any():
        chunks.append(task.expert_chunk(state, horizon))
        dones.append(task.is_success(state))
        counted.append(after <= still)
        after += dones[-1]
        state = task.step(state, chunks[-1][:, 0])
        observations.append(seen(state))
    return Walk(np.stack(observations, 1), np.stack(chunks, 1), np.stack(dones, 1), np.stack(counted, 1), lines)
