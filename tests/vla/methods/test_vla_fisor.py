"""The table with hazards, and FISOR: weights, choice among candidates, and that it learns what is dangerous."""

import numpy as np
import pytest
import torch

from genrl.mdp.noise import generator
from genrl.playground.minitable import TOUCH, task
from genrl.playground.minitable.world import HAZARD, HazardTable, in_hazard, mixed_quality
from genrl.vla.data.frames import frame_statistics
from genrl.vla.methods.fisor import train as fisor
from genrl.vla.methods.fisor.settings import FISOR
from genrl.vla.methods.fisor.train import sheet_of_decisions
from genrl.vla.offline.transitions import Transitions, Words, frames_of, play, take
from genrl.vla.policies.embedded import DiffusionMLP, DiffusionMLPConfig
from genrl.vla.rollout.sampling import Acting, Diffusion
from tests.vla.tiny_policies import FACTS, WORDS

READS = Words(WORDS)
SAMPLER = Diffusion(train_steps=5, steps=5, ft_denoising_steps=5, floor=1e-3, schedule="vp")


def played(count: int, careful: float, noise: float = 0.0, chunk: int = 1, seed: int = 1) -> Transitions:
    env = HazardTable(count, tasks=TOUCH, image_size=0, chunk=chunk)
    who = np.arange(count) < careful * count

    def behave(observation, decision):
        rng = np.random.default_rng([seed, decision])
        state, actions = env.state, []
        for _ in range(chunk):
            actions.append(mixed_quality(state, who, rng.normal(0, noise, (count, 2))))
            state = task.step(state, actions[-1])
        return torch.from_numpy(np.stack(actions, 1))

    return play(env, behave, READS, decisions=40, seed=seed, one_episode=True, gamma=0.99)


def nets(data: Transitions, width: int = 32) -> fisor.Fisor:
    torch.manual_seed(0)
    config = DiffusionMLPConfig(FACTS, 3, 1, train_steps=5)
    return fisor.Fisor(DiffusionMLP(config, frame_statistics(frames_of(data))), width=width)


def test_other_discs_are_hazards_and_costs_of_a_chunk_are_those_of_its_actions() -> None:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (12, 32, 3)).astype(np.float32)
    actions[..., 1] = np.abs(actions[..., 1])
    single, chunked = (HazardTable(32, tasks=TOUCH, image_size=0, chunk=c, max_steps=40) for c in (1, 3))
    single.reset(seed=0), chunked.reset(seed=0)
    seen = np.stack([single.step(actions[t][:, None])[-1]["costs"][:, 0] for t in range(12)], 1)
    parts = [chunked.step(actions[t : t + 3].transpose(1, 0, 2)) for t in range(0, 12, 3)]
    actual = np.concatenate([part[-1]["costs"] for part in parts], 1)
    alive = ~np.stack([part[2] for part in parts]).any(0)  # tables without a success: their steps coincide
    assert alive.sum() > 8 and np.array_equal(actual[alive], seen[alive]) and actual[alive].sum() > 0
    discs = np.array([[[0.0, 0.0], [0.5, 0.0], [0.0, 0.5]]], dtype=np.float32).repeat(3, 0)
    gripper = np.array([[0.05, 0.0], [0.5, 0.19], [0.3, 0.3]], dtype=np.float32)
    for number, expected in ((9, [False, True, False]), (10, [True, False, False]), (0, [False, True, False])):
        state = task.State(gripper, discs, np.full(3, -1), np.full(3, number))
        assert in_hazard(state).tolist() == expected
    assert HAZARD > task.GRASP and HAZARD < 0.36 - task.GRASP  # a disc can be touched from where it is safe


def with_risks(data: Transitions, std: float, bias: float = 0.0) -> fisor.Fisor:
    net = nets(data)
    for head in net.violation.slow:
        torch.nn.init.normal_(head.head[-1].weight, std=std)
        torch.nn.init.constant_(head.head[-1].bias, bias)
    return net


def test_the_least_risky_of_several_samples_acts() -> None:
    data = played(20, 0.5)
    net, observation = with_risks(data, 1.0), take(data, torch.arange(6)).observation

    def acted(net: fisor.Fisor, candidates: int, decision: int = 0) -> torch.Tensor:
        return fisor.safest(net, SAMPLER, candidates=candidates, seed=0)(observation, decision)

    one, many = (net.violation.slow_q(observation, acted(net, count)).amax(0) for count in (1, 32))
    assert many.mean() < one.mean() - 0.5 * one.std()
    assert torch.equal(acted(net, 4), acted(net, 4)) and not torch.equal(acted(net, 4), acted(net, 4, decision=1))
    # estimates below -1 differ by error alone: the first sample acts, as where all are alike
    assert torch.equal(*(acted(with_risks(data, std, -50.0), 8) for std in (0.0, 1.0)))


def test_samples_are_those_of_the_released_program() -> None:
    """Variance beta, every state clipped, no noise in the last step but the floor that keeps a chain scorable."""
    data = played(4, 0.5)
    net, count = nets(data), 6
    observation, sampler = take(data, torch.arange(count)).observation, fisor.sampler_of(nets(data).actor)
    noise = 3 * torch.randn(count, 1, 6, 1, 3, generator=generator(0, "noise"))
    actor, bars = net.slow_actor, torch.cat([torch.ones(1), sampler.grid.alpha_bar.flip(0).float()])
    context, x = actor.encode(observation), noise[:, 0, 0]
    for k, t in enumerate(range(4, -1, -1)):
        beta = 1 - bars[t + 1] / bars[t]
        eps = actor.noise(context, x, torch.full((count,), t))
        x = (x - beta / (1 - bars[t + 1]).sqrt() * eps) / (1 - beta).sqrt()
        x = (x + (beta.sqrt() if t else 1e-3) * noise[:, 0, k + 1]).clamp(-1, 1)
    result = fisor.samples(net, sampler, observation, noise)
    assert torch.allclose(result[:, 0], actor.actions(x), atol=1e-5)


def test_a_step_trains_critics_actor_and_slow_copies(monkeypatch) -> None:
    data = played(20, 0.5)
    net, before = nets(data), nets(data)
    settings = FISOR()
    monkeypatch.setattr(fisor, "BATCH", 16)
    monkeypatch.setattr(fisor, "ACTOR_RATE", 0.5)
    critics = torch.optim.Adam([p for c in (net.reward, net.violation) for p in c.parameters() if p.requires_grad])
    optimiser = torch.optim.Adam(net.actor.parameters())

    def step(recorded):
        optimiser.zero_grad()
        results = fisor.loss(settings, Acting(net.actor, SAMPLER), recorded)
        results["loss"].backward()
        optimiser.step()
        return results

    fisor.train_step(net, data, SAMPLER, settings, critics, step, seed=0, step=0)
    result = fisor.train_step(net, data, SAMPLER, settings, critics, step, seed=0, step=1)
    assert set(result) == {f"critic/{name}_loss" for name in ("v", "q", "v_h", "q_h")} | {"loss/policy"}
    old = dict(before.named_parameters())
    for part in ("reward.q", "reward.slow", "violation.q", "violation.slow", "violation.v", "actor", "slow_actor"):
        assert any(not torch.equal(p, old[n]) for n, p in net.named_parameters() if n.startswith(part)), part
    plain = fisor.train_step(net, data, SAMPLER, FISOR(weighted=False), critics, step, seed=0, step=1)
    assert set(plain) == {"loss/policy"}


def test_the_losses_of_the_critics_by_hand() -> None:
    """Of rewards the lower Q, whose expectile is above the mean; of violations the higher, the other way round."""
    data = played(40, 0.0)
    net, settings = nets(data), FISOR()
    for critics in (net.reward, net.violation):
        for part in (*critics.q, *critics.slow, critics.v):
            torch.nn.init.normal_(part.head[-1].weight, std=2.0)
    actual = fisor.critic_losses(net, data, settings)
    now, after, action, gamma = data.observation, data.next_observation, data.action, fisor.GAMMA
    better = net.reward.slow_q(now, action).amin(0) - net.reward.v(now)
    worse = net.violation.slow_q(now, action).amax(0) - net.violation.v(now)
    up = fisor.EXPECTILE
    target = data.reward + data.discount * ~data.terminated * net.reward.v(after)
    h = torch.where(data.cost > 0, settings.violation, -1.0)
    ahead = (1 - gamma) * h + gamma * torch.maximum(h, net.violation.v(after))
    reach = torch.where(data.terminated, h, ahead)
    wanted = {
        "v": (torch.where(better > 0, up, 1 - up) * better**2).mean(),
        "q": (net.reward.q_values(now, action) - target).square().mean(),
        "v_h": (torch.where(worse > 0, 0.1, 0.9) * worse**2).mean(),
        "q_h": (net.violation.q_values(now, action) - reach).square().mean(),
    }
    assert data.cost.any() and data.terminated.any() and not data.terminated.all()
    torch.testing.assert_close(actual, wanted)


def test_its_evaluation_counts_episodes_and_has_a_sheet() -> None:
    data = played(10, 0.0)
    result = fisor.judged(data._replace(cost=(data.episode < 2).float()))
    assert result["eval/success_mean"] == 1.0 and result["eval/violating"] == pytest.approx(0.2)
    assert result["eval/cost_mean"] == pytest.approx((data.episode < 2).float().sum().item() / 10)
    data = played(3, careful=1.0)
    sheet = sheet_of_decisions(nets(data).slow_actor, data)
    assert [look.text for look in sheet.looks] == [f"cost {data.cost[data.episode == k].sum():g}" for k in range(3)]
    assert [look.facts["steps"] for look in sheet.looks] == [str(int((data.episode == k).sum())) for k in range(3)]
    assert {row[0] for row in sheet.numbers[1:]} >= {"observation.state[0]", "action[0]"}
