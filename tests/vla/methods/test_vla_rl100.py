"""RL-100: the surrogate at every denoising step, the gate, offline evaluation, GAE online, one-step distillation."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from genrl.mdp.noise import generator, keyed_noise
from genrl.objectives.episodes import chunk_gae
from genrl.playground.minitable import MiniTable
from genrl.vla.data.frames import frame_statistics
from genrl.vla.methods.rl100 import train as rl100
from genrl.vla.methods.rl100.experience import Dynamics, distil, offline_value, one_step, seen, train_dynamics
from genrl.vla.methods.rl100.settings import RL100
from genrl.vla.offline.critics import Critics, seen_statistics
from genrl.vla.offline.transitions import from_rollout
from genrl.vla.policies.policy import ACTION, SEEN, STATE, TOKENS, rows
from genrl.vla.rollout.collect import RolloutPlan, collect
from genrl.vla.rollout.sampling import Acting, FlowSteps, LearnedNoise
from tests.vla.tiny_policies import FACTS, FEELS, flow, frames

SAMPLER = FlowSteps("flow_cps", 4, 0.7, "all")


class Likes:
    """Critics that know one chunk to be good, and say so smoothly."""

    def __init__(self, goal: torch.Tensor) -> None:
        self.goal = goal

    def advantage(self, observation, action):
        return -(action - self.goal).square().mean((1, 2))

    def slow_q(self, observation, action):
        return self.advantage(observation, action).expand(2, -1)


def observations(count: int = 16):
    return rows({name: value for name, value in frames().items() if name != ACTION}, torch.arange(count))


def collected(policy, tables: int = 8, **shown):
    env = MiniTable(tables, max_steps=16, **({"image_size": 0} | shown))
    return collect(env, policy, SAMPLER, RolloutPlan(decisions=6, seed=0, iteration=0))


def scored_by(policy):
    return lambda recorded: rl100.loss(RL100(), Acting(policy, SAMPLER), recorded)


def test_the_gate_the_clip_range_and_policies_that_are_refused() -> None:
    gate = rl100.Gate(1.0)
    assert [gate.admits(value) for value in (0.5, 1.0, 1.2, 1.1, 1.3)] == [False, False, True, False, True]
    assert (gate.best, gate.accepted, gate.refused) == (1.3, 2, 3)
    assert [rl100.decayed_clip(0.25, 0.96, uses) for uses in (0, 2)] == pytest.approx([0.25, 0.25 * 0.96**2])
    published = SimpleNamespace(config=SimpleNamespace())
    with pytest.raises(ValueError, match="policy.path: rl100's critics .* a SimpleNamespace has inputs of its own"):
        rl100.inputs_of(published)


def test_every_denoising_step_is_an_update_of_its_own_and_the_first_is_on_policy() -> None:
    policy, old = flow(), flow()
    batch = rl100.draw_at(old, SAMPLER, Likes(torch.zeros(4, 3)), observations(), generator(0), executed=4)
    assert batch.log_prob.shape == (16, 3) and batch.states.shape[1] == 3  # the last step has no noise
    assert batch.advantage.mean().abs() < 1e-5 and batch.advantage.std().item() == pytest.approx(1.0, rel=1e-4)
    figures = list(rl100.surrogate_steps(policy, SAMPLER, scored_by(policy), batch, clip=0.2, executed=4))
    assert len(figures) == 3
    for row in figures:  # nothing was stepped: all ratios are 1
        assert row["kl/updates"] < 1e-6 and row["ratio/clipped"] == 0 and abs(row["loss/policy"]) < 1e-4
    given = (old, SAMPLER, Likes(torch.zeros(4, 3)), observations())
    again, half = (rl100.draw_at(*given, generator(0), executed=n) for n in (4, 2))
    assert torch.equal(again.log_prob, batch.log_prob) and torch.equal(again.states, batch.states)
    assert torch.equal(half.states, batch.states) and not torch.equal(half.log_prob, batch.log_prob)
    short = batch._replace(log_prob=batch.log_prob[:, :1])
    with pytest.raises(TypeError, match="one per chain"):
        next(rl100.surrogate_steps(policy, LearnedNoise(), scored_by(policy), short, clip=0.2, executed=4))


def test_the_surrogate_by_hand() -> None:
    """What the critics like more than on average of the chunks that were drawn becomes more likely, as far as the clip
    lets it."""
    old, policy, critics, shown = flow(), flow(), Likes(torch.zeros(4, 3)), observations()
    batch = rl100.draw_at(old, SAMPLER, critics, shown, generator(0), executed=4)
    seeds = torch.randint(2**62, (16,), generator=generator(0)).tolist()
    noise = SAMPLER.noise(old, [torch.Generator().manual_seed(seed) for seed in seeds])
    with torch.no_grad():
        liked = critics.advantage(shown, old.actions(SAMPLER.sample(old, old.encode(shown), noise).chunk))
        policy.out.weight.mul_(1.2)
        record = (batch.states, batch.next_states, batch.step_index)
        now = SAMPLER.replay(policy, policy.encode(shown), *record).log_prob.flatten(2).sum(-1)
    torch.testing.assert_close(batch.advantage, (liked - liked.mean()) / liked.std(), rtol=1e-4, atol=1e-4)
    for i, row in enumerate(rl100.surrogate_steps(policy, SAMPLER, scored_by(policy), batch, clip=0.2, executed=4)):
        ratio, a = (now[:, i] - batch.log_prob[:, i]).exp(), batch.advantage
        wanted = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
        assert row["loss/policy"] == pytest.approx(float(wanted), rel=1e-3, abs=1e-4) and abs(float(wanted)) > 1e-3
        assert row["ratio/clipped"] > 0


class Still:
    def __init__(self, length: int) -> None:
        self.length, self.calls = length, 0

    def after(self, observation, action):
        self.calls += 1
        return observation, torch.full((len(action),), self.calls >= self.length)


def test_offline_evaluation_averages_q_and_keeps_the_last_one() -> None:
    class Counting(Likes):
        calls = 0

        def slow_q(self, observation, action):
            self.calls += 1
            return torch.full((2, len(action)), float(self.calls))

    shown, goal = observations(4), torch.zeros(4, 3)
    how = {"steps": 4, "seed": 0}
    assert offline_value(flow(), SAMPLER, Still(99), Counting(goal), shown, **how) == pytest.approx(2.5)  # 1 2 3 4
    assert offline_value(flow(), SAMPLER, Still(2), Counting(goal), shown, **how) == pytest.approx(1.75)  # 1 2 2 2
    liked = [offline_value(flow(), SAMPLER, Still(99), Likes(goal), shown, **how) for _ in range(2)]
    assert liked[0] == liked[1]


def test_what_is_imagined_is_what_the_encoder_sees() -> None:
    """A rollout keeps it instead of points; a model of it is right about the next, and the policy acts."""
    policy = flow(FEELS)
    rollout = collected(policy, 48, image_size=FEELS.image, points=FEELS.points)
    kept = rollout._replace(observations=seen(policy, rollout.observations))
    assert set(kept.observations) == {STATE, SEEN, TOKENS}
    shown = {name: value[3] for name, value in rollout.observations.items()}
    observed = {name: value[3] for name, value in kept.observations.items()}
    torch.testing.assert_close(policy.encode(observed)["prefix"], policy.encode(shown)["prefix"], rtol=1e-4, atol=1e-5)
    data = from_rollout(kept, policy, gamma=0.98)
    torch.manual_seed(0)
    model = Dynamics(data, policy.stats | seen_statistics(data), width=64)
    losses = list(train_dynamics(model, data, steps=150, batch_size=64, learning_rate=3e-3, seed=0))
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    following, over = model.after(data.observation, data.action)
    assert torch.equal(following[TOKENS], data.observation[TOKENS]) and over.dtype == torch.bool
    wanted = data.next_observation[SEEN]
    assert (following[SEEN] - wanted).square().mean() < 0.8 * (data.observation[SEEN] - wanted).square().mean()


def test_online_advantages_are_those_of_exact_gae() -> None:
    policy = flow()
    rollout = collected(policy)
    torch.manual_seed(0)
    critics = Critics(FACTS, frame_statistics(frames()), 12, width=16)
    nn.init.normal_(critics.v.head[-1].weight)
    batch, returns, observation = rl100.online_batch(rollout, critics, gamma=0.9, lam=0.8, executed=4)
    shown = rollout.observations
    with torch.no_grad():
        values = torch.stack([critics.v({name: value[t] for name, value in shown.items()}) for t in range(7)])
    given = (rollout.rewards, rollout.n_executed, rollout.terminated, rollout.truncated, values[:-1], values[1:])
    actual = chunk_gae(*given, gamma=0.9, lam=0.8, mode="smdp")
    torch.testing.assert_close(returns, actual.returns[rollout.valid].float())
    expected = actual.advantages[rollout.valid]
    expected = (expected - expected.mean()) / expected.std()
    torch.testing.assert_close(batch.advantage.double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(observation[STATE], shown[STATE][:-1][rollout.valid]) and rollout.truncated.any()
    torch.testing.assert_close(batch.log_prob, rollout.log_prob[rollout.valid].flatten(2).sum(-1))


def test_a_student_meets_its_teacher_in_one_step() -> None:
    teacher, student = flow(), flow(stir=False, seed=1)
    shown, noise = observations(16), keyed_noise((16, 4, 3), 3)
    assert torch.equal(one_step(student, student.encode(shown), noise), noise)  # its velocity is 0 before training
    goal = SAMPLER.act(teacher, teacher.encode(shown), noise)
    errors = list(distil(student, teacher, SAMPLER, shown, steps=120, batch_size=32, learning_rate=2e-3, seed=0))
    assert sum(errors[-10:]) < 0.3 * sum(errors[:10])
    with torch.no_grad():
        result = one_step(student, student.encode(shown), noise)
        assert (result - goal).square().mean() < 0.3 * (noise - goal).square().mean()
        sampled = LearnedNoise(steps=1).act(student, student.encode(shown), noise)  # how it is used afterwards
    torch.testing.assert_close(sampled, result)
