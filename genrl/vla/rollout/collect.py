"""Acting: a policy on vector environments for a number of decisions, recorded.

Randomness: chunk t of slot i is sampled from the t-th numbers of generator (seed, iteration, i), first episodes are
those of (seed, iteration), a number for each group: a rollout is a function of these and the weights, begins anew in
every iteration, and is the same whether one process has all slots or several have some.

Rollouts of chunks: what a policy decided in simulators, and all that a learner needs of it.

Memory: a rollout of T decisions of B slots is time first. One row of it is an observation (the policy's inputs only; a
picture stays uint8, S S 3 bytes), N (2 H A + 1) numbers of the chain (N = 1 for one sampled step, K for a learned
noise), M H A log-probabilities, and the rewards of C actions. Observations have T + 1 rows: that after the last
decision closes the values. They are on the CPU; choose rows (`training_rows`) and send those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.mdp.noise import derive_seed, generator
from genrl.objectives import episodes
from genrl.objectives.episodes import executed_mask
from genrl.vla.policies.policy import (
    ENVIRONMENT,
    IMAGE,
    IMAGES,
    POINTS,
    STATE,
    TOKENS,
    Batch,
    KeepsFeatures,
    Policy,
    joined_batches,
    rows,
)
from genrl.vla.rollout.sampling import Frozen, Sampler
from genrl.vla.simulators.contract import Environment, Observation


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
    shared: what the loss reads of every decision alike; further, [T, B, N, ...]: of each scored step. Methods put them
    in.
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
    further: Batch = {}
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


ENVIRONMENT_NAMES = {
    "pixels": IMAGE,
    "agent_pos": STATE,
    "environment_state": ENVIRONMENT,
    "environment_points": POINTS,
}
"""LeRobot's names of an observation, in environments and in policies; cameras: `policy_name`."""


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Which rollout: its numbers of decisions, the seed and the iteration that its episodes and noise come from."""

    decisions: int
    seed: int
    iteration: int
    one_episode: bool = False
    """Only the first episode of every slot counts, and the rollout ends with the last of them (GRPO; all starts have
    equal weight)."""
    first_slot: int = 0
    """The number of slot 0, where several processes share a rollout."""
    keep_contexts: bool = False
    """For a frozen encoder."""


@torch.no_grad()
def collect(
    env: Environment,
    policy: Policy,
    sampler: Sampler,
    plan: RolloutPlan,
    *,
    frozen: Policy | None = None,
    advance: Callable[[], None] = lambda: None,
) -> ChunkRollout:
    """The rows of a rollout from freshly reset tables; one encoding per observation.

    frozen: DPPO's policy before fine-tuning, see `sampling.Diffusion`. advance: called after every decision.
    Raises ValueError for an observation that is not finite, naming slots, and for instructions that the policy lacks.
    """
    slots = range(plan.first_slot, plan.first_slot + env.num_envs)
    slot_rngs = [generator(plan.seed, plan.iteration, "chunks", slot) for slot in slots]
    shared = generator(plan.seed, plan.iteration, "chunks")
    raw, groups, env_seed, first_episodes = _begun(env, plan, slots)
    instruction = list(env.task_description)
    observed, record = [observe(raw, env, policy, 0)], _Record()
    # a slot whose only episode has ended is not decided for; its last value closes those before it
    running = valued = torch.ones(env.num_envs, dtype=torch.bool)
    for t in range(plan.decisions):
        context = policy.encode(rows(observed[-1], valued))
        if policy.critic:
            record.values.append(_spread(policy.value(context), valued))
            context = rows(context, running[valued])
        before = _before(frozen, context, rows(observed[-1], running), plan.keep_contexts)
        noise = sampler.noise(policy, [slot_rngs[slot] for slot in running.nonzero()[:, 0]], shared)
        sampled = sampler.sample(policy, context, noise, frozen=before)
        # Only the first actions of a chunk are executed; the policy plans further than it is followed.
        actions = _spread(policy.actions(sampled.chunk)[:, : env.chunk], running).numpy().astype(np.float32)
        raw, _, terminated, truncated, info = env.step(actions)
        chosen = {name: _spread(value, running) for name, value in sampled._asdict().items() if name != "chunk"}
        record.steps.append(chosen | _outcome(terminated, truncated, info))
        if plan.keep_contexts:
            record.contexts.append({name: _spread(value, running) for name, value in context.items()})
        observed.append(observe(raw, env, policy, t + 1))
        advance()
        if plan.one_episode:
            # What follows a last decision is looked at once more: its value closes the return of that decision.
            valued, running = running, running & ~record.done
            if not running.any():
                break
        valued = valued if policy.critic else running
    if policy.critic:
        record.values.append(policy.value(policy.encode(observed[-1])).cpu())
    return ChunkRollout(
        sampler=sampler,
        observations=joined_batches(observed, torch.stack),
        group=torch.from_numpy(groups),
        env_seed=env_seed,
        first_episodes=first_episodes,
        instruction=instruction,
        action_dim=actions.shape[-1],
        **record.stacked(one_episode=plan.one_episode),
    )


def _begun(env: Environment, plan: RolloutPlan, slots: range) -> tuple[Any, Any, int, Any]:
    """The first observations of freshly reset tables, the groups of the slots, and the seeds of what they begin."""
    # By the slots of the whole run, so that groups are the same however processes share them.
    groups = np.array(slots) // env.group_size
    # One key more than the numbers of episodes have: the two must not be the same random number.
    env_seed = derive_seed(plan.seed, "episodes", plan.iteration, 0)
    first_episodes = np.uint64(derive_seed(plan.seed, "episodes", plan.iteration)) + groups.astype(np.uint64)
    env.first_slot = plan.first_slot
    # Always from new episodes: a rollout that went on in old ones would depend on where a resumed run was stopped.
    raw, _ = env.reset(seed=env_seed, options={"episodes": first_episodes, "once": plan.one_episode})
    return raw, groups, env_seed, first_episodes


def _spread(values: Tensor, slots: Tensor) -> Tensor:
    """Rows [n, ...] of some slots (bool [B]) as [B, ...] on the CPU, zeros in the others."""
    # Rollouts wait on the CPU: their pictures would take the room that training needs.
    spread = values.new_zeros(len(slots), *values.shape[1:], device="cpu")
    spread[slots] = values.cpu()
    return spread


class _Record:
    """What was decided and what came of it, decision by decision."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.contexts: list[Batch] = []
        self.values: list[Tensor] = []

    @property
    def done(self) -> Tensor:
        """Which episodes ended with the last decision, bool [B]."""
        return self.steps[-1]["terminated"] | self.steps[-1]["truncated"]

    def stacked(self, *, one_episode: bool) -> dict[str, Any]:
        """Entries of a `ChunkRollout`."""
        columns = {name: torch.stack([step[name] for step in self.steps]) for name in self.steps[0]}
        done = columns["terminated"] | columns["truncated"]
        valid = episodes.valid_transitions(done, torch.zeros_like(done[0]))
        valid &= ~dropped_episodes(columns["dropped"], done)
        if one_episode:
            valid &= episodes.first_episode_steps(done[..., None])[..., 0]
        value = torch.stack(self.values) if self.values else None
        return columns | {
            "contexts": joined_batches(self.contexts, torch.stack) if self.contexts else {},
            "values": None if value is None else value[:-1],
            # The first value alone: of a chunk that is not chosen yet nothing but the state is known.
            "next_values": None if value is None else value[1:, :, 0],
            "valid": valid,
            "episode": done.long().cumsum(0) - done.long(),
        }


def _outcome(terminated: NDArray[Any], truncated: NDArray[Any], info: dict[str, Any]) -> dict[str, Tensor]:
    """What an environment says of a decision."""
    columns = {
        "rewards": info["rewards"],
        "n_executed": info["n_executed"],
        "terminated": terminated,
        "truncated": truncated,
        "success": info["is_success"],
        "dropped": info.get("dropped", np.zeros(len(terminated), dtype=np.bool_)),
    }
    return {name: torch.from_numpy(np.array(value)) for name, value in columns.items()}


def _before(frozen: Policy | None, context: Batch, observation: Batch, same_encoder: bool) -> Frozen | None:
    """The policy before fine-tuning with its context: of the same features, where the encoder is still its own."""
    if frozen is None:
        return None
    if same_encoder and isinstance(frozen, KeepsFeatures):
        return Frozen(frozen, frozen.context(context["features"]))
    return Frozen(frozen, frozen.encode(observation))


def dropped_episodes(dropped: Tensor, done: Tensor) -> Tensor:
    """Rows of episodes that end with a drop, bool [T, B]."""
    rows, later = [], torch.zeros_like(dropped[0])
    # From the end: an episode that is dropped at last was never to be trained on.
    for now, end in zip(dropped.flip(0), done.flip(0), strict=True):
        later = now | (later & ~end)
        rows.append(later)
    return torch.stack(rows[::-1])


def policy_name(name: str) -> str | None:
    """LeRobot's name in a policy of what an environment calls so: "pixels/top" is observation.images.top."""
    return IMAGES + name.removeprefix("pixels/") if name.startswith("pixels/") else ENVIRONMENT_NAMES.get(name)


def observe(raw: Observation, env: Environment, policy: Policy, decision: int) -> Batch:
    """The policy's inputs of what an environment shows."""
    named = {key: value for name, value in raw.items() if (key := policy_name(name)) is not None}
    missing = [name for name in policy.inputs if name not in named and name != TOKENS]
    if missing:
        raise ValueError(f"the policy reads {missing}; the environment shows {sorted(named)}: see policy.rename")
    # Copies: a simulator goes on writing into the arrays that it showed.
    observation = {name: torch.from_numpy(np.array(named[name])) for name in policy.inputs if name != TOKENS}
    for name, value in observation.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            bad = (~value.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
            raise ValueError(f"{name} of the slots {bad} is not finite at decision {decision}: look at the simulator")
    if TOKENS in policy.inputs:
        observation[TOKENS] = policy.tokenise(env.task_description)
    return observation
