"""What RL-100 learns from: the expert's decisions, and episodes of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genrl.config.vla import VLAConfig
from genrl.mdp.noise import derive_seed
from genrl.vla.methods.offline import Transitions, from_rollout, from_steps, merge, play
from genrl.vla.policies.policy import Batch, Policy
from genrl.vla.rollout.collect import RolloutPlan
from genrl.vla.rollout.rollout import ChunkRollout
from genrl.vla.rollout.sampling import Sampler
from genrl.vla.setup import longest_episode, recorded
from genrl.vla.simulators.minitable import MiniTable, expert_chunk
from genrl.vla.simulators.minitable.task import MAX_STEPS, task_numbers

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
    return run.acted(run.policy, sampler, plan, advance=lambda: loop.advance(1))


def demonstrated(config: VLAConfig, policy: Policy, gamma: float) -> Transitions | None:
    """The expert's decisions in MiniTable as transitions, or those of a file of steps; None elsewhere, where data begin
    with the first rollouts."""
    source, env = config.demonstrations, config.environment
    steps = recorded(config)
    if steps is not None:
        executed = env.chunk or policy.horizon
        return from_steps(steps, policy, env, horizon=policy.horizon, executed=executed, gamma=gamma)
    if source is None or source.expert is None or env.name != "minitable":
        return None
    limit = env.max_steps or MAX_STEPS
    tasks, chunk = task_numbers(env.tasks or ()), env.chunk or policy.horizon
    table = MiniTable(source.expert, tasks=tasks, image_size=policy.image_size, chunk=chunk, max_steps=limit)

    def behave(observation: Batch, decision: int) -> Tensor:
        return torch.from_numpy(expert_chunk(table.state, policy.horizon))

    decisions = -(-table.max_steps // chunk)
    return play(table, behave, policy, decisions=decisions, seed=config.seed, gamma=gamma, one_episode=True)


def success_of(data: Transitions) -> float:
    """Share of episodes that succeeded."""
    return float(data.success.sum()) / (int(data.episode.max()) + 1)
