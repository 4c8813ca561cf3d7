"""Dreams follow the contract of tables, the real table is seen through the same model, and rewards come of a judge."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from genrl.mdp.noise import keyed_noise
from genrl.playground.minitable import INSTRUCTIONS, PUT, task
from genrl.playground.minitable.world import LatentTable, TableWorld, play, walk
from genrl.vla.methods.diwa import classifier
from genrl.vla.methods.diwa.classifier import encode_demonstrations
from genrl.vla.methods.diwa.rssm import Dream, Latent, Starts, WorldModel, balanced_kl, world_loss, world_step
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, tokenise
from tests.vla.tiny_policies import WORDS


def world() -> WorldModel:
    toys = play(20, 12, seed=0)
    torch.manual_seed(0)
    shown = torch.from_numpy(toys.observations), torch.from_numpy(toys.actions)
    model = WorldModel(*shown, deterministic=12, stochastic=6)
    return model.requires_grad_(False)


class Says:
    """A judge for whom an instruction is fulfilled where the first number of z exceeds a bound."""

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def tokenise(self, instructions):
        return tokenise(instructions, WORDS)

    def fulfilled(self, observation):
        return observation[ENVIRONMENT][:, 0] > self.bound


STARTS = keyed_noise((3, 12), 1).numpy()


def dreams(bound: float = 99.0, count: int = 6, **how) -> Dream:
    starts = Latent(keyed_noise((3, 12), 1), keyed_noise((3, 6), 2))
    how = {"chunk": 4, "max_steps": 10} | how
    return Dream(world(), Says(bound), Starts(starts, INSTRUCTIONS[:3]), num_envs=count, draw=TableWorld().draw, **how)


def noise(step: int, count: int = 6) -> np.ndarray:
    return keyed_noise((count, 4, 3), "actions", step).numpy()


def test_a_dream_is_a_function_of_its_episodes() -> None:
    one, other = dreams(), dreams()
    first, again = one.reset(seed=3)[0], other.reset(seed=3)[0]
    for step in range(5):
        assert all(np.array_equal(first[name], again[name]) for name in first)
        first, again = one.step(noise(step))[0], other.step(noise(step))[0]
    assert not np.array_equal(other.reset(seed=4)[0]["agent_pos"], one.reset(seed=3)[0]["agent_pos"])
    numbers = np.array([5, 6, 5, 6, 7, 8], dtype=np.uint64)
    shown = one.reset(seed=0, options={"episodes": numbers})[0]["agent_pos"]
    assert np.array_equal(shown[0], shown[2]) and np.array_equal(shown[1], shown[3])
    assert all(any(np.array_equal(row, start) for start in STARTS) for row in shown)
    env = dreams(group_size=3)
    shown = env.reset(seed=1)[0]["agent_pos"]
    assert np.array_equal(shown[0], shown[2]) and env.task_description[:3] == [env.task_description[0]] * 3


def test_a_time_limit_truncates_and_the_next_decision_begins_anew() -> None:
    env = dreams()
    env.reset(seed=0)
    executed = []
    for step in range(4):
        shown, rewards, terminated, truncated, info = env.step(noise(step))
        executed.append(info["n_executed"][0])
        assert not terminated.any() and not rewards.any() and truncated.all() == (step == 2)
    assert executed == [4, 4, 2, 0]
    assert all(any(np.array_equal(row, start) for start in STARTS) for row in shown["agent_pos"])
    with pytest.raises(RuntimeError, match="reset"):
        dreams().step(noise(0))
    env = dreams()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="must have shape"):
        env.step(np.zeros((6, 2, 3), dtype=np.float32))
    assert env.render([0, 2]).shape == (2, 128, 128, 3)


def test_the_judge_ends_a_dream_in_the_middle_of_a_chunk() -> None:
    env = dreams(bound=1.0, count=64, max_steps=40)
    env.reset(seed=0)
    for step in range(4):
        _, rewards, terminated, truncated, info = env.step(noise(step, 64))
        assert np.array_equal(rewards, info["rewards"].sum(1)) and np.array_equal(rewards == 1, terminated)
        last = info["n_executed"] - 1
        assert (info["rewards"][terminated, last[terminated]] == 1).all() and not truncated.any()
        if step == 0:
            assert terminated.any() and (info["n_executed"][terminated] < 4).any()
            ended = terminated
        elif step == 1:
            assert (info["n_executed"][ended] == 0).all() and (info["n_executed"][~ended] > 0).all()


def test_the_real_table_in_chunks_is_the_one_in_steps() -> None:
    model, actions = world(), keyed_noise((8, 4, 3), 5).numpy()
    chunked = LatentTable(model, 8, tasks=PUT, chunk=4, max_steps=8)
    single = LatentTable(model, 8, tasks=PUT, chunk=1, max_steps=8)
    first, again = chunked.reset(seed=0)[0], single.reset(seed=0)[0]
    assert np.array_equal(first["agent_pos"], again["agent_pos"])
    for _ in range(2):
        shown, _, _, truncated, _ = chunked.step(actions)
        for k in range(4):
            seen = single.step(actions[:, k : k + 1])[0]
        np.testing.assert_allclose(shown["environment_state"], seen["environment_state"], rtol=1e-4, atol=1e-5)
    assert truncated.all()
    fresh = chunked.step(actions)[0]
    state = chunked.state
    parts = [state.gripper, (state.held >= 0)[:, None].astype(np.float32), state.discs.reshape(-1, 6)]
    expected = model.first(torch.from_numpy(np.concatenate(parts, 1)))
    np.testing.assert_allclose(fresh["agent_pos"], expected.h.numpy(), rtol=1e-5)
    assert chunked.render([1]).shape == (1, 128, 128, 3)


def test_demonstrations_in_latents() -> None:
    keys = task.episode_keys(0, np.arange(5), np.zeros(5))
    shown = encode_demonstrations(world(), walk(keys, PUT, horizon=4, still=2), WORDS)
    length = task.demonstrate(keys, PUT).length
    # every frame before success, that of the success, and two more
    assert len(shown.lines) == len(shown.action) == int(length.sum()) + 5 * 3
    assert shown.done.sum() == 5 * 3 and shown.first.sum() == 5 and not shown.done[shown.first].any()
    assert shown.action.shape[1:] == (4, 3) and shown.observation[STATE].shape[1] == 12
    assert torch.equal(shown.observation[TOKENS], tokenise(shown.lines, WORDS))


def test_the_contrastive_loss_by_hand() -> None:
    embedding = functional.normalize(keyed_noise((6, 4), 1), dim=1)
    label, t = torch.tensor([0, 0, 1, 1, 1, 2]), 0.5
    total, anchors = 0.0, 0
    for i in range(6):
        same = [j for j in range(6) if j != i and label[j] == label[i]]
        if not same:
            continue
        scale = sum(torch.exp(embedding[i] @ embedding[j] / t) for j in range(6) if j != i)
        total += -sum(torch.log(torch.exp(embedding[i] @ embedding[j] / t) / scale) for j in same) / len(same)
        anchors += 1
    torch.testing.assert_close(classifier.supervised_contrastive(embedding, label, t), total / anchors)
    assert classifier.supervised_contrastive(embedding[:2], torch.tensor([0, 1]), t) == 0


class Exact:
    """A world model whose latents are what is shown, and which dreams that nothing moves."""

    def first(self, observation: Tensor) -> Latent:
        return Latent(observation, torch.zeros(len(observation), 1))

    def look(self, latent: Latent, action: Tensor, observation: Tensor) -> Latent:
        return Latent(observation, latent.z)

    def imagine(self, latent: Latent, action: Tensor, noise: Tensor) -> Latent:
        return latent


class Knows:
    def tokenise(self, instructions: list[str]) -> Tensor:
        return torch.tensor([[INSTRUCTIONS.index(line)] for line in instructions])

    def fulfilled(self, observation: Batch) -> Tensor:
        return TableWorld().fulfilled(observation[STATE].numpy())[:, int(observation[TOKENS][0])]


def test_calibration_is_1_where_the_reward_is_right_and_0_where_the_dream_stands_still() -> None:
    held_out = play(60, 40, seed=3)
    result = classifier.calibration(Exact(), Knows(), held_out, TableWorld(), 40, 0)  # type: ignore[arg-type]
    assert result["calibration/seen_precision"] == result["calibration/seen_recall"] == 1.0
    assert result["calibration/dreamed_recall"] == result["calibration/dreamed_precision"] == 0.0


# -- The world model: its divergence against torch's, whose gradients move what, and that it learns
def gaussians(seed: int) -> tuple[Normal, Normal]:
    draw = [keyed_noise((5, 4), seed, place) for place in range(4)]
    return Normal(draw[0], draw[1].exp()), Normal(draw[2], draw[3].exp())


@settings(max_examples=15)
@given(st.integers(0, 1000), st.floats(0, 1))
def test_the_divergence_is_torchs_and_the_balance_shares_out_its_gradient(seed: int, balance: float) -> None:
    q, p = (Normal(g.mean.requires_grad_(), g.stddev) for g in gaussians(seed))
    expected, actual = kl_divergence(q, p).sum(-1), balanced_kl(q, p, balance=balance)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    plain, shared = (torch.autograd.grad(each.sum(), (q.loc, p.loc)) for each in (expected, actual))
    torch.testing.assert_close(shared[0], (1 - balance) * plain[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shared[1], balance * plain[1], rtol=1e-4, atol=1e-4)


def toys(tables: int, length: int = 24) -> tuple[Tensor, Tensor, WorldModel]:
    result = play(tables, length, seed=0)
    torch.manual_seed(0)
    shown = torch.from_numpy(result.observations), torch.from_numpy(result.actions)
    return *shown, WorldModel(*shown, deterministic=16, stochastic=4)


def test_the_loss_is_reconstruction_and_divergence_and_updates_lower_it() -> None:
    """Nothing foretells the first observation. Without noise the model has looked at both."""
    observations, actions, world = toys(3, 4)
    noise = torch.zeros(3, 2, 4)
    actual = world_loss(world, observations[:, :2], actions[:, :1], noise, balance=0.8, kl_scale=0.5)
    first = world.first(observations[:, 0])
    h = world.forward_h(first, actions[:, 0])
    expected = balanced_kl(world.seen(h, observations[:, 1]), world.expected(h), balance=0.8).mean()
    torch.testing.assert_close(actual.kl, expected)
    both = torch.stack([world.decode(first), world.decode(world.look(first, actions[:, 0], observations[:, 1]))], 1)
    errors = (both - observations[:, :2]) / world.observation_std
    torch.testing.assert_close(actual.reconstruction, 0.5 * errors.square().sum(-1).mean(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(actual.loss, actual.reconstruction + 0.5 * actual.kl)
    observations, actions, world = toys(8)
    optimiser, how = torch.optim.Adam(world.parameters(), lr=1e-2), {"length": 6, "batch_size": 4, "seed": 0}
    losses = [float(world_step(world, optimiser, observations, actions, step=0, **how).loss) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
