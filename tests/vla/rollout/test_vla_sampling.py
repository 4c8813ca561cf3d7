"""Chunks from policies: replay is exact for every kind, contexts once, what is refused."""

import copy

import pytest
import torch

from genrl.mdp import chains
from genrl.mdp.noise import generator, keyed_noise
from genrl.vla.policies.policy import ACTION, rows
from genrl.vla.rollout.sampling import Diffusion, FlowSteps, Frozen, LearnedNoise
from tests.vla.tiny_policies import SEES, diffusion, flow, frames

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


def drawn(sampler, policy, count: int, seed: int = 0):
    return sampler.noise(policy, [generator(seed, i) for i in range(count)], generator(seed, "shared"))


def sampled(sampler, count: int = 12):
    policy = policy_for(sampler)
    with torch.no_grad():
        context = policy.encode(observation(count))
        frozen = Frozen(policy, context) if isinstance(sampler, Diffusion) else None
    return policy, sampler.sample(policy, context, drawn(sampler, policy, count), frozen=frozen)


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


def test_a_chunk_is_a_function_of_its_own_generator() -> None:
    sampler, policy = FlowSteps(), flow()
    many, few = drawn(sampler, policy, 6), drawn(sampler, policy, 3)
    assert torch.equal(many.noise[:3], few.noise) and torch.equal(many.noisy[:3], few.noisy)
    assert len({tuple(row) for row in drawn(sampler, policy, 40).noisy.tolist()}) == 4
    per_batch = drawn(FlowSteps(selection="random_per_batch"), policy, 40).noisy
    assert (per_batch == per_batch[:1]).all()


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
        frozen = Frozen(base, base.encode(seen))
        first, second = (
            sampler.sample(p, p.encode(seen), drawn(sampler, base, 6), frozen=frozen) for p in (base, tuned)
        )
    assert torch.equal(first.states[:, 0], second.states[:, 0])
    assert (first.chunk - second.chunk).abs().max() > 1e-3
    assert first.step_index[0].tolist() == list(range(10, 20))
    again = sampler.replay(tuned, tuned.encode(seen), second.states, second.next_states, second.step_index)
    assert torch.equal(again.log_prob.detach(), second.log_prob)  # none of these is the frozen one's
    with pytest.raises(ValueError, match="frozen policy"):
        sampler.sample(base, frozen.context, drawn(sampler, base, 6))


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


def test_stds_are_those_of_the_settings() -> None:
    """Flow-SDE's first step has a std of the noise level exactly; a learned one is bounded, DPPO's has a floor."""
    fixed, learned, floored = FlowSteps(selection="all", noise_level=0.7), LearnedNoise(low=0.2, high=0.6), 0.15
    stds = {}
    for sampler in (fixed, learned, Diffusion(floor=floored)):
        policy, out = sampled(sampler)
        stds[type(sampler)] = sampler.replay(policy, policy.encode(observation(12)), *out[1:4]).stds
    first = stds[FlowSteps][:, 0]
    torch.testing.assert_close(first, torch.full_like(first, 0.7))
    assert 0.2 <= stds[LearnedNoise].min() < stds[LearnedNoise].max() <= 0.6
    assert stds[Diffusion].min().item() == pytest.approx(floored) and stds[Diffusion][:, 0].max() > floored
    assert out.chunk.abs().max() <= 1.0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 steps"):
        FlowSteps(steps=1)
    with pytest.raises(ValueError, match="ft_denoising_steps"):
        Diffusion(ft_denoising_steps=21)
    flows, diffuses = flow(SEES), diffusion(SEES)
    index = torch.zeros(2, dtype=torch.int64)
    for policy, sampler in ((flows, Diffusion()), (diffuses, FlowSteps()), (diffuses, LearnedNoise())):
        with pytest.raises(TypeError, match="needs a policy"):
            sampler.transition(policy, policy.encode(observation(2)), torch.zeros(2, 4, 3), index)
