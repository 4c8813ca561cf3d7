"""Chunked rollouts over MiniTable: reproducible, masks and episodes right, values of true next observations; and the
chunks that samplers draw: replay is exact for every kind, what is refused."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from genrl.mdp import chains
from genrl.mdp.noise import generator, keyed_noise
from genrl.objectives.episodes import chunk_gae, episode_group_advantages
from genrl.playground.minitable import PUT, MiniTable, expert_chunk, task
from genrl.playground.minitable.world import table_of
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, STATE, TOKENS, Batch, rows
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan, collect, episode_returns, training_rows
from genrl.vla.rollout.sampling import Diffusion, FlowSteps, Frozen, LearnedNoise
from tests.vla.tiny_policies import FACTS, SEES, Leads, diffusion, flow, frames


class Expert(Leads):
    horizon, action_dim = 6, 3
    inputs = (STATE, ENVIRONMENT, TOKENS)

    def tokenise(self, instructions) -> torch.Tensor:
        return torch.tensor([[task.INSTRUCTIONS.index(line)] for line in instructions])

    def encode(self, observation: Batch) -> Batch:
        tables = table_of(torch.cat([observation[STATE], observation[ENVIRONMENT]], 1).numpy())
        tables = tables._replace(task=observation[TOKENS][:, 0].numpy())
        return {"chunk": torch.from_numpy(expert_chunk(tables, 6)), "state": observation[STATE]}


def table(size: int = 12, **how) -> MiniTable:
    return MiniTable(size, image_size=0, **how)


def tensors(rollout: ChunkRollout) -> dict[str, torch.Tensor]:
    named = {name: value for name, value in rollout._asdict().items() if isinstance(value, torch.Tensor)}
    return named | rollout.observations | {f"context {name}": value for name, value in rollout.contexts.items()}


def test_a_rollout_is_a_function_of_seed_iteration_and_slot() -> None:
    policy, how = flow(FACTS, critic=1), {"decisions": 5, "seed": 3, "iteration": 2}
    first = collect(table(), policy, FlowSteps(), RolloutPlan(**how))
    used = table()
    collect(used, policy, FlowSteps(), RolloutPlan(decisions=3, seed=9, iteration=9))
    again = collect(used, policy, FlowSteps(), RolloutPlan(**how))  # an environment that was used before
    for name, value in tensors(first).items():
        assert torch.equal(value, tensors(again)[name]), name
    few = collect(table(4), policy, FlowSteps(), RolloutPlan(**how))
    for name, value in tensors(few).items():
        if value.is_floating_point():
            torch.testing.assert_close(value, tensors(first)[name][:, :4], rtol=1e-3, atol=1e-3)

    def noise(size: int, **other: int) -> torch.Tensor:
        """The initial one, which no observation has touched."""
        plan = RolloutPlan(**how | {"decisions": 2} | other)
        return collect(table(size), flow(FACTS), FlowSteps(selection="all"), plan).states[:, :, 0]

    whole = noise(6)
    assert torch.equal(noise(2, first_slot=4), whole[:, 4:])
    assert len({tuple(row.flatten().tolist()) for row in whole.flatten(0, 1)}) == 12
    for other in ({"iteration": 3}, {"seed": 4}):
        assert not (noise(6, **other) == whole).any()


def test_its_rows_replay_with_ratio_one_from_what_was_seen() -> None:
    """From features that were kept: test_scores.py."""
    policy = flow(SEES, critic=4)
    plan = RolloutPlan(decisions=3, seed=0, iteration=0, keep_contexts=False)
    rollout = collect(MiniTable(6), policy, FlowSteps(), plan)
    for t in range(3):  # the batches that were sampled: exactly
        part = training_rows(rollout, torch.arange(6) + 6 * t)
        context = policy.encode(part.observation)
        again = FlowSteps().replay(policy, context, part.states, part.next_states, part.step_index)
        assert not part.context and torch.equal(again.log_prob.detach(), part.log_prob)
        assert torch.equal(policy.value(context).detach(), rollout.values[t])


def test_the_experts_episodes_are_accounted_for_and_next_values_are_of_the_true_next_observation() -> None:
    env = table(16)
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
    # The expert's value is the sum of the state: after a success it is that of the final state, not the next start.
    state = rollout.observations[STATE]
    assert torch.equal(rollout.next_values, state[1:].sum(-1))
    end = int(rollout.terminated[:, 0].nonzero()[0, 0])
    final, begun = state[end + 1, 0], state[end + 2, 0]
    assert final[1] > begun[1] + 0.2  # an episode ends at a zone and begins near the front edge
    given = (rollout.rewards, rollout.n_executed, rollout.terminated, rollout.truncated)
    how: dict[str, Any] = {"gamma": 0.99, "lam": 1.0, "mode": "chunk"}
    estimate = chunk_gae(*given, rollout.values[..., 0], rollout.next_values, **how)
    for t in range(end + 1):
        assert estimate.returns[t, 0].item() == pytest.approx(0.99 ** (end - t), rel=1e-6)


def test_one_episode_each_for_groups() -> None:
    env = table(8, group_size=4, max_steps=12)
    policy = flow(FACTS)
    rollout = collect(env, policy, FlowSteps(), RolloutPlan(decisions=40, seed=5, iteration=0, one_episode=True))
    assert len(rollout.valid) == 3 and rollout.valid[0].all() and (rollout.episode[rollout.valid] == 0).all()
    assert rollout.group.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    start = rollout.observations[STATE][0]
    assert torch.equal(start[0].expand(4, 3), start[:4]) and not torch.equal(start[0], start[4])
    assert len({tuple(row.flatten().tolist()) for row in rollout.states[0]}) == 8  # but the noise is each one's own
    plan = RolloutPlan(decisions=40, seed=5, iteration=0, one_episode=True)
    sure = collect(table(8, group_size=4), Expert(), FlowSteps(noise_level=1e-3), plan)
    assert sure.valid.sum(0).max() == len(sure.valid) < 11 and sure.done[:, 0].sum() >= 1
    assert (sure.valid & sure.done).sum(0).tolist() == [1] * 8 and torch.equal(sure.valid, sure.episode == 0)
    advantages = episode_group_advantages(episode_returns(sure), sure.group)
    assert advantages.abs().max() == 0  # all succeed: nothing to learn


class Broken(MiniTable):
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
        collect(Broken(5, image_size=0), flow(FACTS), FlowSteps(), RolloutPlan(**how))
    with pytest.raises(ValueError, match="no instruction"):
        collect(Silent(5, image_size=0), flow(FACTS), FlowSteps(), RolloutPlan(**how))
    with pytest.raises(ValueError, match="the policy reads.*observation.image"):
        collect(table(5), flow(SEES), FlowSteps(), RolloutPlan(**how))
    with pytest.raises(ValueError, match="must have shape"):
        collect(table(5, chunk=8), flow(FACTS), FlowSteps(), RolloutPlan(**how))


REINFLOW = LearnedNoise(mean_clip=1.0, noise_clip=3.0, last_clip=1.0, reduction="sum")
KINDS = {
    "flow_sde": (FlowSteps(), 1, 1),
    "flow_sde per batch": (FlowSteps(selection="random_per_batch", noise_level=0.7), 1, 1),
    "flow_sde all": (FlowSteps(selection="all"), 4, 4),
    "flow_sde last": (FlowSteps(selection="last"), 1, 1),
    "flow_cps": (FlowSteps("flow_cps", noise_level=0.5), 1, 1),
    "flow_noise": (LearnedNoise(), 4, 1),
    "flow_noise one step": (LearnedNoise(steps=1, low=0.2, high=0.6), 1, 1),
    "reinflow": (REINFLOW, 4, 1),
    "dppo": (Diffusion(), 10, 10),
    "dppo ddim": (Diffusion(train_steps=100, steps=5, ft_denoising_steps=5), 5, 5),
}


def policy_for(sampler, seed: int = 0):
    if isinstance(sampler, Diffusion):
        return diffusion(SEES, train_steps=sampler.train_steps, seed=seed)
    head = "context" if sampler == REINFLOW else "expert" if isinstance(sampler, LearnedNoise) else "none"
    return flow(SEES, noise_head=head, seed=seed)


def observation(count: int):
    return {name: value[:count] for name, value in frames().items() if name != ACTION}


def noise_of(sampler, policy, count: int, seed: int = 0):
    return sampler.noise(policy, [generator(seed, i) for i in range(count)], generator(seed, "shared"))


def sampled(sampler, count: int = 12):
    policy = policy_for(sampler)
    with torch.no_grad():
        context = policy.encode(observation(count))
        frozen = Frozen(policy, context) if isinstance(sampler, Diffusion) else None
    return policy, sampler.sample(policy, context, noise_of(sampler, policy, count), frozen=frozen)


@pytest.mark.parametrize("name", KINDS)
def test_the_ratio_is_exactly_one_before_an_update_and_not_after(name: str) -> None:
    sampler, kept, decisions = KINDS[name]
    policy, out = sampled(sampler)
    assert out.chunk.shape == (12, 4, 3) and out.states.shape == out.next_states.shape == (12, kept, 4, 3)
    assert out.step_index.shape == (12, kept) and out.log_prob.shape == (12, decisions, 4, 3)
    again = sampler.replay(policy, policy.encode(observation(12)), out.states, out.next_states, out.step_index)
    assert torch.equal(again.log_prob.detach(), out.log_prob)
    ratio = chains.aggregate((again.log_prob - out.log_prob).flatten(0, 1), "chunk", "sum").exp()
    assert (ratio == 1).all()
    assert again.means.shape == again.stds.shape == out.states.shape and (again.stds > 0).all()
    again.log_prob.sum().backward()
    encoder = list(policy.encoder.parameters())
    assert all(p.grad is not None for p in encoder) and any(p.grad.abs().max() > 0 for p in encoder)
    index = torch.tensor([7, 2, 9])  # alone, as in their batch
    context = policy.encode(rows(observation(12), index))
    alone = sampler.replay(policy, context, *(t[index] for t in (out.states, out.next_states, out.step_index)))
    torch.testing.assert_close(alone.log_prob.detach(), out.log_prob[index], rtol=1e-4, atol=1e-3)
    other = policy_for(sampler, seed=1)
    moved = sampler.replay(other, other.encode(observation(12)), out.states, out.next_states, out.step_index)
    assert (moved.log_prob - out.log_prob).abs().max() > 1e-3


def test_a_chunk_is_a_function_of_its_own_generator_and_of_a_sampler_that_fits() -> None:
    sampler, policy = FlowSteps(), flow()
    many, few = noise_of(sampler, policy, 6), noise_of(sampler, policy, 3)
    assert torch.equal(many.noise[:3], few.noise) and torch.equal(many.noisy[:3], few.noisy)
    assert len({tuple(row) for row in noise_of(sampler, policy, 40).noisy.tolist()}) == 4
    per_batch = noise_of(FlowSteps(selection="random_per_batch"), policy, 40).noisy
    assert (per_batch == per_batch[:1]).all()
    with pytest.raises(ValueError, match="2 steps"):
        FlowSteps(steps=1)
    with pytest.raises(ValueError, match="ft_denoising_steps"):
        Diffusion(ft_denoising_steps=21)
    flows, diffuses = flow(SEES), diffusion(SEES)
    index = torch.zeros(2, dtype=torch.int64)
    for policy, sampler in ((flows, Diffusion()), (diffuses, FlowSteps()), (diffuses, LearnedNoise())):
        with pytest.raises(TypeError, match="needs a policy"):
            sampler.transition(policy, policy.encode(observation(2)), torch.zeros(2, 4, 3), index)


def test_a_record_leads_to_the_chunk() -> None:
    """Where the last step was drawn, its next state is the chunk; where none other was, so is the ODE from there."""
    _, out = sampled(KINDS["flow_noise"][0])
    assert torch.equal(out.next_states[:, -1], out.chunk) and torch.equal(out.states[:, 1], out.next_states[:, 0])
    sampler = KINDS["flow_sde"][0]
    policy, out = sampled(sampler, 20)
    context = policy.encode(observation(20))
    for row in range(20):
        one, x = rows(context, torch.tensor([row])), out.next_states[row]
        for k in range(int(out.step_index[row, 0]) + 1, 4):
            with torch.no_grad():
                x = x - 0.25 * policy.velocity(one, x, torch.tensor([1.0 - 0.25 * k]))
        torch.testing.assert_close(x[0], out.chunk[row], rtol=1e-4, atol=1e-4)


def test_the_first_steps_of_dppo_are_the_frozen_policys() -> None:
    sampler, base = Diffusion(), diffusion(SEES)
    tuned = copy.deepcopy(base)
    torch.nn.init.zeros_(tuned.out.weight)
    seen = observation(6)
    with torch.no_grad():
        frozen, noise = Frozen(base, base.encode(seen)), noise_of(sampler, base, 6)
        first, second = (sampler.sample(p, p.encode(seen), noise, frozen=frozen) for p in (base, tuned))
    assert torch.equal(first.states[:, 0], second.states[:, 0])
    assert (first.chunk - second.chunk).abs().max() > 1e-3
    assert first.step_index[0].tolist() == list(range(10, 20))
    again = sampler.replay(tuned, tuned.encode(seen), second.states, second.next_states, second.step_index)
    assert torch.equal(again.log_prob.detach(), second.log_prob)  # none of these is the frozen one's
    with pytest.raises(ValueError, match="frozen policy"):
        sampler.sample(base, frozen.context, noise_of(sampler, base, 6))


@pytest.mark.parametrize("sampler", [FlowSteps(), LearnedNoise(), REINFLOW, Diffusion()])
def test_acting_has_no_noise_but_the_first(sampler) -> None:
    policy = policy_for(sampler)
    context, noise = policy.encode(observation(5)), keyed_noise((5, 4, 3), 3)
    frozen = Frozen(policy, context) if isinstance(sampler, Diffusion) else None
    once, twice = (sampler.act(policy, context, noise, frozen=frozen) for _ in range(2))
    assert torch.equal(once, twice) and once.shape == (5, 4, 3)
    other = sampler.act(policy, context, keyed_noise((5, 4, 3), 4), frozen=frozen)
    assert (other - once).abs().max() > 1e-4
    if isinstance(sampler, Diffusion):
        assert once.abs().max() <= 1.0
        with pytest.raises(ValueError, match="frozen policy"):
            sampler.act(policy, context, noise)
        return
    x = noise
    for k in range(4):
        with torch.no_grad():
            x = x - 0.25 * policy.velocity(context, x, torch.full((5,), 1.0 - 0.25 * k))
        x = x.clamp(-1.0, 1.0) if sampler == REINFLOW else x
    torch.testing.assert_close(once, x, rtol=1e-4, atol=1e-4)
