"""Chunked rollouts over MiniTable: reproducible, masks and episodes right, values of true next observations."""

import numpy as np
import pytest
import torch

from genrl.objectives.episodes import chunk_gae, episode_group_advantages
from genrl.playground.minitable import PUT, MiniTable, expert_chunk, task
from genrl.playground.minitable.world import table_of
from genrl.vla.policies.policy import ENVIRONMENT, IMAGE, STATE, TOKENS, Batch
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan, collect, episode_returns, training_rows
from genrl.vla.rollout.sampling import FlowSteps, LearnedNoise
from tests.vla.tiny_policies import SEES, TOLD, flow


class Expert:
    """A policy that says where the expert's chunk is, whatever the noise: its velocity leads there in one step."""

    horizon, action_dim, critic = 6, 3, 1
    inputs = (STATE, ENVIRONMENT, TOKENS)

    def tokenise(self, instructions) -> torch.Tensor:
        return torch.tensor([[task.INSTRUCTIONS.index(line)] for line in instructions])

    def encode(self, observation: Batch) -> Batch:
        tables = table_of(torch.cat([observation[STATE], observation[ENVIRONMENT]], 1).numpy())
        tables = tables._replace(task=observation[TOKENS][:, 0].numpy())
        return {"chunk": torch.from_numpy(expert_chunk(tables, 6)), "state": observation[STATE]}

    def velocity(self, context: Batch, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return (x - context["chunk"]) / sigma[:, None, None]

    def value(self, context: Batch) -> torch.Tensor:
        return context["state"].sum(1, keepdim=True)

    def normalised(self, actions: torch.Tensor) -> torch.Tensor:
        return actions

    def actions(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk


def told(size: int = 12, **how) -> MiniTable:
    return MiniTable(size, image_size=0, **how)


def tensors(rollout: ChunkRollout) -> dict[str, torch.Tensor]:
    named = {name: value for name, value in rollout._asdict().items() if isinstance(value, torch.Tensor)}
    return named | rollout.observations | {f"context {name}": value for name, value in rollout.contexts.items()}


def test_a_rollout_is_a_function_of_seed_iteration_and_slot() -> None:
    policy, how = flow(TOLD, critic=1), {"decisions": 5, "seed": 3, "iteration": 2}
    first = collect(told(), policy, FlowSteps(), RolloutPlan(**how))
    used = told()
    collect(used, policy, FlowSteps(), RolloutPlan(decisions=3, seed=9, iteration=9))
    again = collect(used, policy, FlowSteps(), RolloutPlan(**how))  # an environment that was used before
    for name, value in tensors(first).items():
        assert torch.equal(value, tensors(again)[name]), name
    for other in ({"seed": 4}, {"iteration": 3}, {"first_slot": 12}):
        assert not torch.equal(collect(told(), policy, FlowSteps(), RolloutPlan(**how | other)).states, first.states)
    few = collect(told(4), policy, FlowSteps(), RolloutPlan(**how))
    for name, value in tensors(few).items():
        if value.is_floating_point():
            torch.testing.assert_close(value, tensors(first)[name][:, :4], rtol=1e-3, atol=1e-3)


def test_noise_is_keyed_by_seed_iteration_decision_and_slot() -> None:
    """The initial noise, which no observation has touched."""

    def noise(size: int, **other: int) -> torch.Tensor:
        how = {"decisions": 2, "seed": 3, "iteration": 2} | other
        return collect(told(size), flow(TOLD), FlowSteps(selection="all"), RolloutPlan(**how)).states[:, :, 0]

    whole = noise(6)
    assert torch.equal(noise(2, first_slot=4), whole[:, 4:])
    assert len({tuple(row.flatten().tolist()) for row in whole.flatten(0, 1)}) == 12
    for other in ({"iteration": 3}, {"seed": 4}):
        assert not (noise(6, **other) == whole).any()


def test_shapes_and_types() -> None:
    policy = flow(SEES, critic=4, noise_head="expert")
    rollout = collect(
        MiniTable(6), policy, LearnedNoise(), RolloutPlan(decisions=3, seed=0, iteration=0, keep_contexts=True)
    )
    assert set(rollout.observations) == {STATE, IMAGE, TOKENS}
    assert rollout.observations[IMAGE].shape == (4, 6, 32, 32, 3)
    assert rollout.observations[IMAGE].dtype == torch.uint8
    assert rollout.states.shape == rollout.next_states.shape == (3, 6, 4, 4, 3)
    assert rollout.step_index.shape == (3, 6, 4) and rollout.log_prob.shape == (3, 6, 1, 4, 3)
    assert rollout.rewards.shape == (3, 6, 4) and rollout.rewards.dtype == torch.float32
    for name in ("n_executed", "terminated", "truncated", "success", "next_values", "valid", "episode"):
        assert tensors(rollout)[name].shape == (3, 6), name
    assert rollout.values.shape == (3, 6, 4)
    assert set(rollout.contexts) == {"features", "prefix"} and rollout.contexts["prefix"].shape == (3, 6, 128)
    assert not any(value.requires_grad for value in tensors(rollout).values())


@pytest.mark.parametrize("keep", [True, False])
def test_its_rows_replay_with_ratio_one(keep: bool) -> None:
    policy = flow(SEES, critic=4)
    plan = RolloutPlan(decisions=3, seed=0, iteration=0, keep_contexts=keep)
    rollout = collect(MiniTable(6), policy, FlowSteps(), plan)
    for t in range(3):  # the batches that were sampled: exactly
        part = training_rows(rollout, torch.arange(6) + 6 * t)
        assert bool(part.context) is keep
        context = policy.context(part.context["features"]) if keep else policy.encode(part.observation)
        again = FlowSteps().replay(policy, context, part.states, part.next_states, part.step_index)
        assert torch.equal(again.log_prob.detach(), part.log_prob)
        assert torch.equal(policy.value(context).detach(), rollout.values[t])


def test_the_expert_succeeds_and_every_episode_is_accounted_for() -> None:
    env = told(16)
    rollout = collect(env, Expert(), FlowSteps(noise_level=1e-3), RolloutPlan(decisions=12, seed=1, iteration=0))
    assert rollout.terminated.sum(0).min() >= 1 and not rollout.truncated.any()
    assert torch.equal(rollout.terminated, rollout.success)
    assert torch.equal(rollout.rewards.sum(-1) > 0, rollout.terminated)
    resets = torch.zeros_like(rollout.valid)
    resets[1:] = rollout.done[:-1]
    assert torch.equal(~rollout.valid, resets) and (rollout.n_executed[resets] == 0).all()
    assert (rollout.n_executed[~resets] >= 1).all()
    for t in range(1, 12):
        assert torch.equal(rollout.episode[t], rollout.episode[t - 1] + rollout.done[t - 1].long())
    start = task.initial_state(rollout.first_episodes, PUT)
    assert np.array_equal(start.gripper, rollout.observations[STATE][0, :, :2].numpy())
    assert (episode_returns(rollout) == 1).all()
    t, slot = (rollout.valid[1:] & ~rollout.valid[:-1]).nonzero()[0].tolist()  # a later episode begins from its key
    key = task.episode_keys(rollout.env_seed, rollout.group[[slot]].numpy(), rollout.episode[t + 1, [slot]].numpy())
    begun = rollout.observations[STATE][t + 1, slot, :2].numpy()
    assert rollout.episode[t + 1, slot] == 1 and np.array_equal(task.initial_state(key, PUT).gripper[0], begun)


def test_next_values_are_of_the_true_next_observation() -> None:
    """The expert's value is the sum of the state: after a success it is that of the final state, not the next start."""
    env = told(16)
    rollout = collect(env, Expert(), FlowSteps(noise_level=1e-3), RolloutPlan(decisions=8, seed=1, iteration=0))
    state = rollout.observations[STATE]
    assert torch.equal(rollout.next_values, state[1:].sum(-1))
    end = int(rollout.terminated[:, 0].nonzero()[0, 0])
    final, begun = state[end + 1, 0], state[end + 2, 0]
    assert final[1] > begun[1] + 0.2  # an episode ends at a zone and begins near the front edge
    estimate = chunk_gae(
        *(rollout.rewards, rollout.n_executed, rollout.terminated, rollout.truncated),
        *(rollout.values[..., 0], rollout.next_values),
        gamma=0.99,
        lam=1.0,
        mode="chunk",
    )
    for t in range(end + 1):
        assert estimate.returns[t, 0].item() == pytest.approx(0.99 ** (end - t), rel=1e-6)


def test_one_episode_each_for_groups() -> None:
    env = told(8, group_size=4, max_steps=12)
    policy = flow(TOLD)
    rollout = collect(env, policy, FlowSteps(), RolloutPlan(decisions=40, seed=5, iteration=0, one_episode=True))
    assert len(rollout.valid) == 3 and rollout.valid[0].all() and (rollout.episode[rollout.valid] == 0).all()
    assert rollout.group.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    start = rollout.observations[STATE][0]
    assert torch.equal(start[0].expand(4, 3), start[:4]) and not torch.equal(start[0], start[4])
    assert len({tuple(row.flatten().tolist()) for row in rollout.states[0]}) == 8  # but the noise is each one's own
    expert_env = told(8, group_size=4)
    expert = Expert()
    sure = collect(
        expert_env,
        expert,
        FlowSteps(noise_level=1e-3),
        RolloutPlan(decisions=40, seed=5, iteration=0, one_episode=True),
    )
    assert sure.valid.sum(0).max() == len(sure.valid) < 11 and sure.done[:, 0].sum() >= 1
    assert (sure.valid & sure.done).sum(0).tolist() == [1] * 8 and torch.equal(sure.valid, sure.episode == 0)
    advantages = episode_group_advantages(episode_returns(sure), sure.group)
    assert advantages.abs().max() == 0  # all succeed: nothing to learn


class Broken(MiniTable):
    """Two tables show numbers that are not finite after the first decision."""

    def step(self, actions):
        observation, *rest = super().step(actions)
        observation["agent_pos"][[1, 3]] = np.nan
        return observation, *rest


class Silent(MiniTable):
    @property
    def task_description(self) -> list[str]:
        return [""] * self.num_envs


def test_what_a_simulator_may_not_do_is_reported() -> None:
    how = {"decisions": 3, "seed": 0, "iteration": 0}
    with pytest.raises(ValueError, match=r"slots \[1, 3\] is not finite at decision 1"):
        collect(Broken(5, image_size=0), flow(TOLD), FlowSteps(), RolloutPlan(**how))
    with pytest.raises(ValueError, match="no instruction"):
        collect(Silent(5, image_size=0), flow(TOLD), FlowSteps(), RolloutPlan(**how))
    with pytest.raises(ValueError, match="the policy reads.*observation.image"):
        collect(told(5), flow(SEES), FlowSteps(), RolloutPlan(**how))
    with pytest.raises(ValueError, match="must have shape"):
        collect(told(5, chunk=8), flow(TOLD), FlowSteps(), RolloutPlan(**how))
