"""Rollouts of chunks: a policy on vectorised tables for a number of decisions, and all that a learner needs of it.

Memory: a rollout of T decisions of B slots is time first. One row of it is an observation (the policy's inputs only; a
picture stays uint8, S S 3 bytes), N (2 H A + 1) numbers of the chain (N = 1 for one drawn step, K for a learned noise),
M H A log-probabilities, and the rewards of C actions. Observations have T + 1 rows: that after the last decision closes
the values. They are on the CPU; choose rows (`training_rows`) and send those.

Randomness: chunk t of slot i is drawn from the t-th numbers of generator (seed, iteration, i), first episodes are those
of (seed, iteration), a number for each group: a rollout is a function of these and the weights, begins anew in every
iteration, and is the same whether one process has all slots or several have some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.mdp.noise import derive_seed, generator
from genrl.objectives.advantages import episodes
from genrl.objectives.advantages.gae import executed_mask
from genrl.vla.policies.policy import ENVIRONMENT, IMAGE, IMAGES, STATE, TOKENS, Batch, KeepsFeatures, Policy, rows
from genrl.vla.rollout.sampling import Frozen, Sampler, draw, sample

ENVIRONMENT_NAMES = {"pixels": IMAGE, "agent_pos": STATE, "environment_state": ENVIRONMENT}
"""LeRobot's names of an observation, in environments and in policies; cameras: `policy_name`."""


class Tables(Protocol):
    """A vector environment whose action is a chunk: `minitable.MiniTable`, whose documentation is the contract.

    Next-step auto-reset; info has "rewards" [B, C], "n_executed" [B] and "is_success" [B], and may have "dropped" [B]:
    the simulator was lost, the episode ends with this row as truncated, and is not to be learnt from. Slots of one
    group see the same episodes. Actions come as the policy meant them: clipping is the environment's. One whose
    episodes are functions of the slot among all processes has the attribute `first_slot`, which `collect` sets.
    """

    num_envs: int
    chunk: int
    group_size: int

    @property
    def task_description(self) -> list[str]: ...

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]: ...

    def step(
        self, actions: NDArray[np.float32], /
    ) -> tuple[dict[str, NDArray[Any]], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]: ...


class ChunkRollout(NamedTuple):
    """T decisions of B slots; a row is one decision.

    observations: name -> [T + 1, B, ...]. contexts: the same of the contexts [T, B, ...], empty unless kept.
    states, next_states [T, B, N, H, A], step_index int64 [T, B, N], log_prob float32 [T, B, M, H, A]: see `sampling`.
    rewards float32 [T, B, C], n_executed int64, terminated, truncated, success, dropped bool [T, B].
    values float32 [T, B, V], of the observation: see `Policy.value`; next_values [T, B], the first one of the true next
    observation, the final one where an episode ended; None for a policy without critic.
    valid bool [T, B]: the row is a decision of an episode (not a reset, nor after the only one that is wanted, nor of
    an episode that was dropped with its simulator: `dropped` where it ended, so its sum counts them).
    episode int64 [T, B]: number of the episode in its slot. What it began from: `first_episodes` (uint64 [B]) for 0,
    later ones are functions of env_seed, the group int64 [B] and this number.
    instruction: of the first episode of every slot. action_dim: numbers of an action that the robot is given.
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


@torch.no_grad()
def collect(
    env: Tables,
    policy: Policy,
    sampler: Sampler,
    *,
    decisions: int,
    seed: int,
    iteration: int,
    one_episode: bool = False,
    first_slot: int = 0,
    keep_contexts: bool = False,
    frozen: Policy | None = None,
    advance: Callable[[], None] = lambda: None,
) -> ChunkRollout:
    """`decisions` rows from freshly reset tables; one encoding per observation.

    one_episode: only the first episode of every slot counts, and the rollout ends with the last of them (GRPO; equal
    weight of all starts). first_slot: the number of slot 0, where several processes share a rollout. keep_contexts: for
    a frozen encoder. frozen: DPPO's policy before fine-tuning, see `sampling.Diffusion`. advance: called
    after every decision.
    Raises ValueError for an observation that is not finite, naming slots, and for instructions that the policy lacks.
    """
    if hasattr(env, "first_slot"):
        env.first_slot = first_slot
        env_seed = derive_seed(seed, "episodes", iteration, 0)
    else:  # slots of other processes must not see the same later episodes
        env_seed = derive_seed(seed, "episodes", iteration, first_slot)
    slots = range(first_slot, first_slot + env.num_envs)
    own = [generator(seed, iteration, "chunks", slot) for slot in slots]
    shared = generator(seed, iteration, "chunks")
    seen: list[Batch] = []
    contexts: list[Batch] = []
    steps: list[dict[str, Tensor]] = []
    values: list[Tensor] = []
    ended = torch.zeros(env.num_envs, dtype=torch.bool)
    first = derive_seed(seed, "episodes", iteration)
    groups = np.array([slot // env.group_size for slot in slots])
    first_episodes = np.uint64(first) + groups.astype(np.uint64)
    raw, _ = env.reset(seed=env_seed, options={"episodes": first_episodes})
    instruction = list(env.task_description)
    seen.append(observe(raw, env, policy, 0))
    for t in range(decisions):
        context = policy.encode(seen[-1])
        if policy.critic:
            values.append(policy.value(context).cpu())
        before = None if frozen is None else Frozen(frozen, _context_before(frozen, context, seen[-1], keep_contexts))
        sampled = sample(policy, sampler, context, draw(sampler, policy, own, shared), frozen=before)
        actions = policy.actions(sampled.chunk)[:, : env.chunk].cpu().numpy().astype(np.float32)
        raw, _, terminated, truncated, info = env.step(actions)
        told = {
            "rewards": info["rewards"],
            "n_executed": info["n_executed"],
            "terminated": terminated,
            "truncated": truncated,
            "success": info["is_success"],
            "dropped": info.get("dropped", np.zeros(env.num_envs, dtype=np.bool_)),
        }
        record = {name: value.cpu() for name, value in sampled._asdict().items() if name != "chunk"}
        steps.append(record | {name: torch.from_numpy(np.array(value)) for name, value in told.items()})
        if keep_contexts:
            contexts.append({name: value.cpu() for name, value in context.items()})
        seen.append(observe(raw, env, policy, t + 1))
        advance()
        ended |= steps[-1]["terminated"] | steps[-1]["truncated"]
        if one_episode and bool(ended.all()):
            break
    if policy.critic:
        values.append(policy.value(policy.encode(seen[-1])).cpu())
    stacked = {name: torch.stack([row[name] for row in steps]) for name in steps[0]}
    done = stacked["terminated"] | stacked["truncated"]
    valid = episodes.valid_transitions(done, torch.zeros_like(ended))
    valid &= ~_dropped_episodes(stacked["dropped"], done)
    if one_episode:
        valid &= episodes.first_episode_steps(done[..., None])[..., 0]
    value = torch.stack(values) if values else None
    return ChunkRollout(
        sampler=sampler,
        observations=_stack(seen),
        contexts=_stack(contexts) if contexts else {},
        values=None if value is None else value[:-1],
        next_values=None if value is None else value[1:, :, 0],
        valid=valid,
        episode=done.long().cumsum(0) - done.long(),
        group=torch.from_numpy(groups),
        env_seed=env_seed,
        first_episodes=first_episodes,
        instruction=instruction,
        action_dim=actions.shape[-1],
        **stacked,
    )


def _context_before(frozen: Policy, context: Batch, observation: Batch, same_encoder: bool) -> Batch:
    """The context of the policy before fine-tuning: of the same features, where the encoder is still its own."""
    if same_encoder and isinstance(frozen, KeepsFeatures):
        return frozen.context(context["features"])
    return frozen.encode(observation)


def episode_returns(rollout: ChunkRollout) -> Tensor:
    """Undiscounted sum of the rewards of the first episode of each slot, float64 [B]: GRPO's score.

    Means nothing for a slot without valid rows (`rollout.valid.any(0)`), whose episode was dropped: leave those out.
    """
    size = rollout.rewards.shape[-1]
    last = executed_mask(rollout.n_executed, size).sum(-1, keepdim=True) - 1 == torch.arange(size)
    return episodes.first_episode_returns(rollout.rewards, last & rollout.done[..., None])


def joined(parts: Sequence[ChunkRollout]) -> ChunkRollout:
    """Rollouts of neighbouring slots as one. Those that ended sooner (one_episode) get rows that are not valid."""
    longest = max(len(part.valid) for part in parts)
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
    """[T, B, ...] of each as one of `count` rows; instructions are padded to the longest."""
    found = {}
    for name in batches[0]:
        rows = [_longer(batch[name], count) for batch in batches]
        if name == TOKENS:
            longest = max(value.shape[-1] for value in rows)
            rows = [torch.nn.functional.pad(value, (0, longest - value.shape[-1])) for value in rows]
        found[name] = torch.cat(rows, 1)
    return found


def _dropped_episodes(dropped: Tensor, done: Tensor) -> Tensor:
    """Rows of episodes that end with a drop, bool [T, B]."""
    rows, later = [], torch.zeros_like(dropped[0])
    for now, end in zip(dropped.flip(0), done.flip(0), strict=True):
        later = now | (later & ~end)
        rows.append(later)
    return torch.stack(rows[::-1])


def policy_name(name: str) -> str | None:
    """LeRobot's name in a policy of what an environment calls so: "pixels/top" is observation.images.top."""
    return IMAGES + name.removeprefix("pixels/") if name.startswith("pixels/") else ENVIRONMENT_NAMES.get(name)


def observe(raw: dict[str, NDArray[Any]], env: Tables, policy: Policy, decision: int) -> Batch:
    """The policy's inputs of what an environment shows."""
    named = {own: value for name, value in raw.items() if (own := policy_name(name)) is not None}
    missing = [name for name in policy.inputs if name not in named and name != TOKENS]
    if missing:
        raise ValueError(f"the policy reads {missing}; the environment shows {sorted(named)}: see policy.rename")
    observation = {name: torch.from_numpy(np.array(named[name])) for name in policy.inputs if name != TOKENS}
    for name, value in observation.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            bad = (~value.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
            raise ValueError(f"{name} of the slots {bad} is not finite at decision {decision}: look at the simulator")
    if TOKENS in policy.inputs:
        observation[TOKENS] = policy.tokenise(env.task_description)
    return observation


def _stack(batches: list[Batch]) -> Batch:
    """One tensor per name; tokens are padded to the longest instruction."""
    joined = {}
    for name in batches[0]:
        values = [batch[name] for batch in batches]
        if name == TOKENS:
            longest = max(value.shape[1] for value in values)
            values = [torch.nn.functional.pad(value, (0, longest - value.shape[1])) for value in values]
        joined[name] = torch.stack(values)
    return joined
