"""Transitions to learn from without acting: recorded decisions of any behaviour.

A transition is one decision: an observation, the chunk that was sent, what it paid, and the true next observation.
Everything random is a function of the seed; nothing here touches a policy's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.objectives.episodes import chunk_rewards
from genrl.runtime.weights.state import Unchanging
from genrl.vla.config import sections
from genrl.vla.data.recordings import Steps, split
from genrl.vla.policies.policy import (
    ACTION,
    ENVIRONMENT,
    STATE,
    TOKENS,
    Batch,
    Policy,
    joined_batches,
    rows,
    tokenise,
)
from genrl.vla.rollout.collect import ENVIRONMENT_NAMES, ChunkRollout, dropped_episodes
from genrl.vla.rollout.sampling import Denoising
from genrl.vla.simulators.contract import Environment


class Transitions(NamedTuple):
    """N decisions. observation, next_observation: name -> [N, ...], the next one final where the episode ended.

    action float32 [N, H, A], the whole chunk in the robot's units, of which n_executed int64 [N] were executed.
    reward float32 [N], `sum_j gamma^j r_j`, and discount [N], gamma^n of what follows (`episodes.chunk_rewards`,
    "smdp").
    cost float32 [N]: the largest cost of an executed action, 0 where the environment knows none.
    terminated, success bool [N]; done bool [N]: the last of its episode; episode int64 [N]: its number in this set.
    """

    observation: Batch
    action: Tensor
    reward: Tensor
    discount: Tensor
    cost: Tensor
    next_observation: Batch
    n_executed: Tensor
    terminated: Tensor
    done: Tensor
    success: Tensor
    episode: Tensor


class Reader(Protocol):
    """What a policy says of its input: the entries of an observation, and its words."""

    @property
    def inputs(self) -> tuple[str, ...]: ...

    def tokenise(self, instructions: Sequence[str]) -> Tensor: ...


class Words:
    """A reader who knows some words: for data that come before their policy."""

    def __init__(self, words: tuple[str, ...], inputs: tuple[str, ...] = (STATE, ENVIRONMENT, TOKENS)) -> None:
        self.words, self.inputs = words, inputs

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return tokenise(instructions, self.words)


Behaviour = Callable[[Batch, int], Tensor]
"""(observation of B tables, number of the decision) -> chunks float32 [B, H, A] in the robot's units."""


def play(
    env: Environment,
    behave: Behaviour,
    reads: Reader,
    *,
    decisions: int,
    seed: int | None = None,
    gamma: float = 0.99,
    one_episode: bool = False,
) -> Transitions:
    """Record up to `decisions` decisions of every table, episode by episode: N is what belongs to an episode.

    seed: of the episodes; None goes on from a reset that the caller made, whose observation is `env.reset` of no seed.
    one_episode: only the first of every table. Episodes that a simulator lost are left out. An environment that knows
    costs has "costs" [B, C] in its info.
    """
    raw, _ = env.reset(seed=seed, options={"once": one_episode})
    steps: list[dict[str, Tensor]] = []
    observations = [observe(raw, env, reads)]
    resetting = torch.zeros(env.num_envs, dtype=torch.bool)
    over = torch.zeros(env.num_envs, dtype=torch.bool)
    count = torch.zeros(env.num_envs, dtype=torch.int64)
    for t in range(decisions):
        chunk = behave(observations[-1], t)
        raw, _, terminated, truncated, info = env.step(chunk[:, : env.chunk].numpy().astype(np.float32))
        result = {name: torch.from_numpy(np.array(info[name])) for name in ("rewards", "n_executed")}
        costs = torch.from_numpy(np.array(info.get("costs", np.zeros_like(info["rewards"]))))
        ended = torch.from_numpy(np.array(terminated | truncated))
        smdp = chunk_rewards(result["rewards"], result["n_executed"], gamma=gamma, mode="smdp")
        steps.append(
            {
                "action": chunk.float(),
                "reward": smdp.reward.float(),
                "discount": smdp.discount.float(),
                "cost": costs.float().amax(1),
                "n_executed": result["n_executed"],
                "terminated": torch.from_numpy(np.array(terminated)),
                "done": ended,
                "success": torch.from_numpy(np.array(info["is_success"])),
                "episode": count * env.num_envs + torch.arange(env.num_envs),
                "kept": ~resetting & ~over,
                "dropped": torch.from_numpy(np.array(info.get("dropped", np.zeros(env.num_envs, dtype=np.bool_)))),
            }
        )
        observations.append(observe(raw, env, reads))
        over |= ended & one_episode
        count = count + ended.long()
        # Gymnasium resets in the step after an end, and ignores its action: that step teaches nothing.
        resetting = ended
        if one_episode and bool(over.all()):
            break
    counted, dropped = (torch.stack([step.pop(name) for step in steps]) for name in ("kept", "dropped"))
    # Only known at the end: an episode is lost with all that was recorded of it before.
    counted &= ~dropped_episodes(dropped, torch.stack([step["done"] for step in steps]))
    joined = {name: torch.stack([step[name] for step in steps])[counted] for name in steps[0]}
    now = {name: value[counted] for name, value in joined_batches(observations[:-1], torch.stack).items()}
    following = {name: value[counted] for name, value in joined_batches(observations[1:], torch.stack).items()}
    if TOKENS in now:  # an instruction belongs to its episode, also in the final observation
        following[TOKENS] = now[TOKENS]
    return Transitions(observation=now, next_observation=following, **joined)


def observe(raw: dict[str, NDArray[Any]], env: Environment, reads: Reader) -> Batch:
    """What `reads` reads of an environment's observation, by the policy's names."""
    named = {ENVIRONMENT_NAMES[name]: value for name, value in raw.items() if name in ENVIRONMENT_NAMES}
    observation = {name: torch.from_numpy(np.array(named[name])) for name in reads.inputs if name != TOKENS}
    return observation | ({TOKENS: reads.tokenise(env.task_description)} if TOKENS in reads.inputs else {})


@torch.no_grad()
def from_rollout(rollout: ChunkRollout, policy: Policy, *, gamma: float) -> Transitions:
    """The decisions of a rollout of the policy, which has not changed since.

    A last denoising step that was not drawn is done again (Flow-CPS). Raises ValueError where more of
    the chain is missing (one random step): nobody knows the chunk then; draw all, or use `play`.
    """
    assert isinstance(rollout.sampler, Denoising)  # no other sampler's chunk is in its record
    valid, last = rollout.valid, rollout.sampler.steps - 1
    now = {name: value[:-1][valid] for name, value in rollout.observations.items()}
    following = {name: value[1:][valid] for name, value in rollout.observations.items()}
    chunk, reached = rollout.next_states[:, :, -1][valid], rollout.step_index[..., -1][valid]
    # Flow-CPS makes its last step without noise, so it is no decision and the rollout has no record of it.
    if bool((reached == last - 1).all()):
        index, noisy = torch.full_like(reached, last), torch.zeros(len(reached))
        chunk = rollout.sampler.transition(policy, policy.encode(now), chunk, index, noisy).mean
    elif not bool((reached == last).all()):
        raise ValueError("the rollout does not hold its chunks: draw all denoising steps, or record it by `play`")
    smdp = chunk_rewards(rollout.rewards, rollout.n_executed, gamma=gamma, mode="smdp")
    if TOKENS in now:
        following[TOKENS] = now[TOKENS]
    slots = torch.arange(valid.shape[1])
    return Transitions(
        observation=now,
        action=policy.actions(chunk).cpu().float(),
        reward=smdp.reward[valid].float(),
        discount=smdp.discount[valid].float(),
        cost=torch.zeros(len(reached)),
        next_observation=following,
        n_executed=rollout.n_executed[valid],
        terminated=rollout.terminated[valid],
        done=rollout.done[valid],
        success=rollout.success[valid],
        episode=(rollout.episode * len(slots) + slots)[valid],
    )


def from_steps(
    steps: Steps, reads: Reader, env: sections.Environment, *, horizon: int, executed: int, gamma: float
) -> Transitions:
    """A decision from every recorded step: the chunk of `horizon` actions from there, of which `executed` are, or as
    many as its episode has left. Beyond an end a chunk repeats the last action. Decisions overlap where executed > 1.
    env: the section of the configuration, for the instruction and the parts of an observation.
    """
    at = np.arange(len(steps.done))
    last = np.flatnonzero(steps.done)[steps.episode]
    # Clamped at the end of its own episode: else a chunk would go on into the next one.
    place = np.minimum(at[:, None] + np.arange(horizon), last[:, None])
    count = np.minimum(executed, last - at + 1)
    final = at + count - 1
    n_executed, paid = torch.from_numpy(count), torch.from_numpy(steps.reward[place[:, :executed]])
    smdp = chunk_rewards(paid, n_executed, gamma=gamma, mode="smdp")
    costs = np.where(np.arange(executed) < count[:, None], steps.cost[place[:, :executed]], 0.0)
    now, following = (
        {
            name: torch.from_numpy(values)
            for name, values in split(observations, env.proprioception).items()
            if name in reads.inputs
        }
        for observations in (steps.observation, steps.next_observation[final])
    )
    if TOKENS in reads.inputs:
        assert env.instruction is not None  # files are refused without one
        now[TOKENS] = following[TOKENS] = reads.tokenise([env.instruction]).expand(len(at), -1)
    return Transitions(
        observation=now,
        action=torch.from_numpy(steps.action[place]),
        reward=smdp.reward.float(),
        discount=smdp.discount.float(),
        cost=torch.from_numpy(costs.max(1).astype(np.float32)),
        next_observation=following,
        n_executed=n_executed,
        terminated=torch.from_numpy(steps.terminated[final]),
        done=torch.from_numpy(final == last),
        success=torch.from_numpy(steps.success[final]),
        episode=torch.from_numpy(steps.episode),
    )


def take(transitions: Transitions, index: Tensor) -> Transitions:
    """The rows `index` (numbers or a mask)."""
    named = transitions._asdict()
    chosen: dict[str, Any] = {name: rows(p, index) if isinstance(p, dict) else p[index] for name, p in named.items()}
    return Transitions(**chosen)


def merge(*sets: Transitions) -> Transitions:
    """One set of all; episodes are numbered on. Instructions are padded to the longest."""
    first, offset = [], 0
    for part in sets:
        # Two sets both count from 0, and `successful` goes by these numbers.
        first.append(part._replace(episode=part.episode + offset))
        offset += int(part.episode.max()) + 1 if len(part.episode) else 0
    joined: dict[str, Any] = {}
    for name in Transitions._fields:
        values = [getattr(part, name) for part in first]
        if isinstance(values[0], dict):
            joined[name] = joined_batches(values, torch.cat)
        else:
            joined[name] = torch.cat(values)
    return Transitions(**joined)


def frames_of(transitions: Transitions) -> Batch:
    """The observations with their chunks as `ACTION`: what `imitation.imitate` learns from."""
    return transitions.observation | {ACTION: transitions.action}


def successful(transitions: Transitions) -> Tensor:
    """Which transitions belong to an episode that succeeded, bool [N]."""
    count = int(transitions.episode.max()) + 1
    won = torch.zeros(count, dtype=torch.bool)
    won[transitions.episode[transitions.success]] = True
    return won[transitions.episode]


class Store:
    """What a trainer keeps beside the policy, for checkpoints: modules and optimisers by name, and data, whose tensors
    are replaced and never changed (`state.Unchanging`).

    ready: whether the preparation that precedes the first iteration is done.
    """

    def __init__(self, **modules: Any) -> None:
        self.modules = modules
        self.data: dict[str, Any] = {}
        self.ready = False

    def state_dict(self) -> dict[str, Any]:
        modules = {name: module.state_dict() for name, module in self.modules.items()}
        data = {
            name: {"$transitions": value._asdict()} if isinstance(value, Transitions) else value
            for name, value in self.data.items()
        }
        return {"modules": modules, "data": Unchanging(data), "ready": self.ready}

    def load_state_dict(self, saved: dict[str, Any], /) -> None:
        for name, module in self.modules.items():
            module.load_state_dict(saved["modules"][name])
        self.data = {
            key: Transitions(**value["$transitions"]) if isinstance(value, dict) and "$transitions" in value else value
            for key, value in saved["data"].items()
        }
        self.ready = saved["ready"]
