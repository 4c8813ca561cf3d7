"""Imagination as an environment, and the real table seen through the same model: DiWA's two worlds (arXiv 2508.03645).

Both show latents, "agent_pos" the deterministic h and "environment_state" the drawn z of `rssm.Latent`, and both
follow the contract of `rollout.Tables`: a policy on latents acts in either, and trainers of tables train in dreams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from genrl.mdp.noise import derive_seed, generator
from genrl.vla.methods.diwa.rssm import Latent, WorldModel
from genrl.vla.methods.diwa.settings import Classifier
from genrl.vla.methods.play import seen
from genrl.vla.policies.encoder import Inputs, ObservationEncoder
from genrl.vla.policies.normalise import statistics
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, Statistics, tokenise
from genrl.vla.simulators.contract import Step
from genrl.vla.simulators.minitable import MiniTable, State, task
from genrl.vla.simulators.minitable import render as draw
from genrl.vla.simulators.minitable.task import INSTRUCTIONS, Floats

Shown = dict[str, NDArray[Any]]

CONTRAST, TEMPERATURE = 0.5, 0.5
"""Weight of the classifier's contrastive loss, and its temperature."""


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

    judge: says after every step whether the instruction is fulfilled, which is reward 1 and ends the dream; max_steps
    actions without it truncate. Next-step
    auto-reset, "rewards", "n_executed" and "is_success" as in `minitable.MiniTable`. Episode k of dream i begins from a
    start, and draws z with noise, that are functions of (seed, i // group_size, k); actions are clipped to [-1, 1].
    """

    def __init__(
        self,
        world: WorldModel,
        judge: RewardClassifier,
        starts: Starts,
        *,
        num_envs: int,
        chunk: int,
        max_steps: int,
        group_size: int = 1,
    ) -> None:
        places, lines = len(starts.latent.h), len(starts.instructions)
        if places != lines or not lines:
            raise ValueError(f"{places} starts have {lines} instructions: one each, and one at least")
        self.world, self.judge, self.starts = world, judge, starts
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
        return self._show(), self._info(empty, np.zeros(self.num_envs, dtype=np.int64))

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
        return self._show(), rewards.sum(1), terminated, truncated, self._info(rewards, executed)

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """What some dreams look like: the tables that their latents stand for, [n, 128, 128, 3]."""
        shown = self.world.decode(self._latent.rows(torch.tensor(list(slots)))).detach().numpy()
        gripper, discs = shown[:, :2], shown[:, 3:].reshape(-1, 3, 2)
        nearest = np.linalg.norm(discs - gripper[:, None], axis=-1).argmin(1)
        held = np.where(shown[:, 2] > 0.5, nearest, -1)
        return draw(State(gripper, discs, held, np.zeros(len(held), dtype=np.int64)), 128)

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

    def _show(self) -> Shown:
        return {"agent_pos": self._latent.h.numpy().copy(), "environment_state": self._latent.z.numpy().copy()}

    def _info(self, rewards: Floats, executed: NDArray[np.int64]) -> dict[str, Any]:
        return {"rewards": rewards, "n_executed": executed, "is_success": rewards.any(1)}


class LatentTable(MiniTable):
    """The real table, shown as latents: the world model looks after every executed action. For evaluation."""

    def __init__(self, world: WorldModel, num_envs: int, *, tasks: Sequence[int], chunk: int, max_steps: int) -> None:
        super().__init__(num_envs, tasks=tasks, image_size=0, chunk=chunk, max_steps=max_steps)
        self.world, self.latent = world, world.start(num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Shown, dict[str, Any]]:
        """As `MiniTable.reset`."""
        _, info = super().reset(seed=seed, options=options)
        self.latent = self.world.first(torch.from_numpy(seen(self.state)))
        return self._latents(), info

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
        return self._latents(), rewards, terminated, truncated, info

    def _latents(self) -> Shown:
        return {"agent_pos": self.latent.h.numpy().copy(), "environment_state": self.latent.z.numpy().copy()}


class Encoded(NamedTuple):
    """Demonstrations in latents, frames by frames: observation (h, z, instruction) [F, ..]; action [F, H, 3], the
    expert's chunk from there; done bool [F]: the instruction is fulfilled; first bool [F]: a beginning; lines [F]."""

    observation: Batch
    action: Tensor
    done: Tensor
    first: Tensor
    lines: list[str]


def encode_demonstrations(
    world: WorldModel, keys: task.Keys, tasks: Sequence[int], words: Sequence[str], *, horizon: int, still: int
) -> Encoded:
    """The expert's episodes as the world model sees them, `still` more steps after each success."""
    state = task.initial_state(keys, tasks)
    latent = world.first(torch.from_numpy(seen(state)))
    lines = [INSTRUCTIONS[number] for number in state.task]
    tokens, columns, after = tokenise(lines, words), [], np.zeros(len(keys), dtype=np.int64)
    while (after <= still).any():
        done = task.is_success(state)
        chunk = task.expert_chunk(state, horizon)
        columns.append((latent, torch.from_numpy(chunk), torch.from_numpy(done), torch.from_numpy(after <= still)))
        after += done
        state = task.step(state, chunk[:, 0])
        latent = world.look(latent, torch.from_numpy(chunk[:, 0]), torch.from_numpy(seen(state)))
    kept = torch.stack([column[3] for column in columns], 1)
    joined = Latent(
        torch.stack([column[0].h for column in columns], 1)[kept],
        torch.stack([column[0].z for column in columns], 1)[kept],
    )
    episode = kept.nonzero()[:, 0]
    first = torch.zeros_like(kept)
    first[:, 0] = True
    return Encoded(
        as_observation(joined, tokens[episode]),
        torch.stack([column[1] for column in columns], 1)[kept],
        torch.stack([column[2] for column in columns], 1)[kept],
        first[kept],
        [lines[number] for number in episode.tolist()],
    )


class RewardClassifier(nn.Module):
    """Latent and instruction -> is it fulfilled: two classes on an embedding, the reward is the likelier one."""

    def __init__(self, world: WorldModel, observation: Batch, words: tuple[str, ...], *, width: int = 128) -> None:
        super().__init__()
        stats: Statistics = {name: statistics(observation[name]) for name in (STATE, ENVIRONMENT)}
        for found in stats.values():
            found["std"] = found["std"].clamp(min=0.02)
        self.words = words
        self.encoder = ObservationEncoder(latent_inputs(world, words), stats)
        self.embed = nn.Sequential(
            nn.Linear(self.encoder.size, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64)
        )
        self.classes = nn.Sequential(nn.SiLU(), nn.Linear(64, 2))

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return tokenise(instructions, self.words)

    def forward(self, observation: Batch) -> tuple[Tensor, Tensor]:
        """Embedding of length 1 [B, 64] and logits [B, 2]."""
        found = self.embed(self.encoder(observation))
        return functional.normalize(found, dim=1), self.classes(found)

    @torch.no_grad()
    def fulfilled(self, observation: Batch) -> Tensor:
        """bool [B]."""
        logits: Tensor = self(observation)[1]
        return logits.argmax(1) == 1


def supervised_contrastive(embedding: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Mean over anchors of `-mean_p log softmax(e_i e_p / t)`, p the others of its class: [] (arXiv 2004.11362, eq. 2).

    embedding [B, E] of length 1, label int64 [B]. Anchors without another of their class do not count; 0 if none does.
    """
    alike = embedding @ embedding.T / temperature
    itself = torch.eye(len(label), dtype=torch.bool)
    log_share = alike - alike.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    same = (label[:, None] == label[None]) & ~itself
    anchors = same.any(1)
    each = -(log_share.masked_fill(~same, 0.0)).sum(1) / same.sum(1).clamp(min=1)
    return each[anchors].sum() / anchors.sum().clamp(min=1)


def train_classifier(
    judge: RewardClassifier,
    world: WorldModel,
    encoded: Encoded,
    background: Latent,
    settings: Classifier,
    *,
    seed: int,
    batch_size: int = 256,
) -> Iterator[dict[str, float]]:
    """Cross-entropy and `CONTRAST` times the contrastive loss; yields {"loss", "accuracy"} of each step.

    A quarter of a batch are fulfilled frames of demonstrations. The others are not: an eighth each frames before it
    and ends of demonstrations of something else, and half latents of play (`background`) under any instruction, a few
    of which do fulfil it, unknown to anybody. Without play a policy finds latents that no demonstration has shown, and
    that pay. z is drawn anew from the prior in every second frame: dreams show no other.
    """
    optimiser = torch.optim.Adam(judge.parameters(), lr=settings.lr)
    observation, eighth = encoded.observation, max(1, batch_size // 8)
    tokens = observation[TOKENS]
    yes, no = encoded.done.nonzero()[:, 0], (~encoded.done).nonzero()[:, 0]
    for step in range(settings.steps):
        rng = generator(seed, "classifier", step)

        def some(numbers: Tensor, count: int, rng: torch.Generator = rng) -> Tensor:
            return numbers[torch.randint(len(numbers), (count,), generator=rng)]

        good, before, swapped, lent = some(yes, 2 * eighth), some(no, eighth), some(yes, eighth), some(yes, eighth)
        differ = (tokens[swapped] != tokens[lent]).any(1)
        swapped, lent = swapped[differ], lent[differ]
        play = torch.randint(len(background.h), (4 * eighth,), generator=rng)
        shown = torch.cat([good, before, swapped])
        h = torch.cat([observation[STATE][shown], background.h[play]])
        z = torch.cat([observation[ENVIRONMENT][shown], background.z[play]])
        told = torch.cat([tokens[good], tokens[before], tokens[lent], tokens[some(no, 4 * eighth)]])
        with torch.no_grad():
            prior = world.expected(h)
        noise, redrawn = torch.randn(z.shape, generator=rng), torch.rand(len(z), 1, generator=rng) < 0.5
        z = torch.where(redrawn, prior.mean + prior.std * noise, z)
        label = (torch.arange(len(h)) < len(good)).long()
        embedding, logits = judge(as_observation(Latent(h, z), told))
        cross = functional.cross_entropy(logits, label)
        loss = cross + CONTRAST * supervised_contrastive(embedding, label, TEMPERATURE)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        yield {"loss": loss.item(), "accuracy": (logits.argmax(1) == label).float().mean().item()}


@torch.no_grad()
def encode_play(world: WorldModel, observations: Tensor, actions: Tensor) -> Latent:
    """Play as the world model sees it: observations [E, T + 1, O], actions [E, T, A] -> E (T + 1) latents."""
    latent = world.first(observations[:, 0])
    found = [latent]
    for t in range(actions.shape[1]):
        latent = world.look(latent, actions[:, t], observations[:, t + 1])
        found.append(latent)
    return Latent(torch.cat([one.h for one in found]), torch.cat([one.z for one in found]))
