"""What RL-100 learns from: the expert's decisions, and episodes of the policy.

A policy that looks at pictures or points is learned from what its encoder, which is frozen then, has seen in them: this
takes their place (`SEEN`), and can be imagined.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from genrl.mdp.noise import derive_seed
from genrl.vla.config.names import WORLDS
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import recorded, world_of
from genrl.vla.offline.transitions import Transitions, from_rollout, from_steps, merge
from genrl.vla.policies.policy import IMAGE, POINTS, SEEN, TOKENS, Batch, rows
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan
from genrl.vla.rollout.sampling import Sampler
from genrl.vla.setup import longest_episode

if TYPE_CHECKING:
    from genrl.vla.run import VLARun


def collected(run: VLARun, sampler: Sampler, episodes: int, iteration: int, gamma: float) -> Transitions:
    """One episode in every environment, as often as it takes."""
    parts = []
    for turn in range(max(1, episodes // run.env.num_envs)):
        rollout = acted(run, sampler, iteration, turn)
        parts.append(from_rollout(rollout, run.policy, gamma=gamma))
    return merge(*parts)


def acted(run: VLARun, sampler: Sampler, iteration: int, turn: int) -> ChunkRollout:
    """A rollout of one episode everywhere, by seeds of its own."""
    loop, decisions = run.loop, longest_episode(run.env)
    if decisions is None:
        raise ValueError("environment.max_steps: the simulator does not say how long an episode can be; write it")
    loop.phase("acting", decisions)
    seed = derive_seed(run.config.seed, "turn", turn)
    plan = RolloutPlan(decisions=decisions, seed=seed, iteration=iteration, one_episode=True)
    rollout = run.acted(run.policy, sampler, plan, advance=lambda: loop.advance(1))
    return rollout._replace(observations=seen(run.policy, rollout.observations))


@torch.no_grad()
def seen(policy: Any, observation: Batch) -> Batch:
    """Observations [..., D] with what the policy's encoder sees in place of what it looks at; those of a policy that
    does not look as they are. policy: embedded."""
    encoder = policy.encoder
    if not encoder.inputs.looks:
        return observation
    lead = observation[TOKENS].shape[:-1]
    looked = {name: observation[name].flatten(0, len(lead) - 1) for name in encoder.inputs.keys}
    parts = [
        encoder.see(part := rows(looked, index), encoder.hear(part[TOKENS])).cpu()
        for index in torch.arange(prod(lead)).split(512)
    ]
    numeric = {name: value for name, value in observation.items() if name not in (IMAGE, POINTS)}
    return numeric | {SEEN: torch.cat(parts).unflatten(0, lead)}


def demonstrated(config: VLAConfig, policy: Any, gamma: float) -> Transitions | None:
    """The expert's decisions in a `World` as transitions, or those of a file of steps; None elsewhere, where data
    begin with the first rollouts."""
    source, env = config.demonstrations, config.environment
    steps = recorded(config)
    if steps is not None:
        executed = env.chunk or policy.horizon
        return from_steps(steps, policy, env, horizon=policy.horizon, executed=executed, gamma=gamma)
    if source is None or source.expert is None or env.name not in WORLDS.built_in:
        return None
    data: Transitions = world_of(config).expert_data(config, source.expert, policy, gamma)
    now, following = seen(policy, data.observation), seen(policy, data.next_observation)
    return data._replace(observation=now, next_observation=following)


def success_of(data: Transitions) -> float:
    """Share of episodes that succeeded."""
    return float(data.success.sum()) / (int(data.episode.max()) + 1)
