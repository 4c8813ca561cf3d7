"""Log-probabilities of decisions: ratios of exactly 1, levels, partial chunks; and one update, by hand.

The formulas are written out here once more, from the papers, on the policy's bare network.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from genrl.mdp import ddpm
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.vla.methods.ppo import train as gae
from genrl.vla.methods.ppo.train import learn
from genrl.vla.rollout import scores
from genrl.vla.rollout.collect import ChunkRollout, training_rows
from genrl.vla.rollout.sampling import Acting, Diffusion, LearnedNoise, Sampler
from genrl.vla.rollout.scores import Decisions, Scored, actor_loss, at_level, decisions, recorded_decisions, score
from genrl.vla.run import VLARun, check_on_policy
from tests.vla import vla_runs

SAMPLERS: dict[str, dict[str, Any]] = {
    **vla_runs.SAMPLERS,
    "flow_sde all": {"kind": "flow_sde", "steps": 3, "selection": "all"},
    "flow_sde last": {"kind": "flow_sde", "steps": 4, "selection": "last", "noise_level": 0.5},
    "ddpm": {"kind": "diffusion", "steps": 20, "ft_denoising_steps": 2},
}


@contextmanager
def acted(folder: Path, name: str, **changes: Any) -> Iterator[tuple[VLARun, ChunkRollout]]:
    with vla_runs.opened(vla_runs.config(folder, sampler=SAMPLERS[name], **changes)) as run:
        yield run, run.collect(run.settings)


def taught(rollout: ChunkRollout, seed: int = 0, values: str = "chunk") -> Decisions:
    """All its decisions, with arbitrary advantages, returns and weights; with those of executed actions."""
    rng = torch.Generator().manual_seed(seed)
    shape = rollout.valid.shape if values == "chunk" else rollout.rewards.shape
    advantage, returns = torch.randn(shape, generator=rng), torch.rand(shape, generator=rng)
    weight = 0.5 + torch.rand(shape, generator=rng)
    if values == "action":
        weight = weight * (torch.arange(shape[-1]) < rollout.n_executed[..., None])
    return decisions(rollout, advantage, returns, weight)


def recorded(run: VLARun, rollout: ChunkRollout, chosen: Decisions) -> Recorded:
    return recorded_decisions(rollout, chosen, total=len(chosen.row), policy=True, critic=False)


def scored_by(run: VLARun, rollout: ChunkRollout, chosen: Decisions) -> Scored:
    return score(run.settings, Acting(run.policy, rollout.sampler), recorded(run, rollout, chosen))


def stir(policy: nn.Module, std: float) -> None:
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p += std * torch.randn(p.shape, generator=rng)


def normal(x: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    std = torch.as_tensor(std, dtype=mean.dtype)
    return -((x - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)


def step_log_prob(policy: Any, sampler: Sampler, context: Any, x: Tensor, after: Tensor, k: int) -> Tensor:
    """ln N of one denoising step k of a chunk, per element."""
    if isinstance(sampler, Diffusion):
        # DDIM with eta = 1 (arXiv 2010.02502, eq. 12), x0 clamped and the noise computed again; floor of DPPO
        bars = ddpm.cosine_alpha_bars(sampler.train_steps)
        stride = sampler.train_steps // sampler.steps
        t = (sampler.steps - 1 - k) * stride
        now = float(bars[t])
        then = float(bars[t - stride]) if t else 1.0
        predicted = policy.noise(context, x, torch.full((len(x),), t))
        x0 = ((x - math.sqrt(1 - now) * predicted) / math.sqrt(now)).clamp(-1, 1)
        noise = (x - math.sqrt(now) * x0) / math.sqrt(1 - now)
        std = math.sqrt((1 - then) / (1 - now) * (1 - now / then))
        mean = math.sqrt(then) * x0 + math.sqrt(max(0.0, 1 - then - std**2)) * noise
        return normal(after, mean, max(std, sampler.floor))
    tau, following, width = 1 - k / sampler.steps, 1 - (k + 1) / sampler.steps, 1 / sampler.steps
    time = torch.full((len(x),), tau)
    if isinstance(sampler, LearnedNoise):
        velocity, raw = policy.velocity_and_noise(context, x, time)
        low, high = math.log(sampler.low**2), math.log(sampler.high**2)
        std = torch.exp((low + (high - low) * (torch.tanh(raw) + 1) / 2) / 2)
        mean = x - width * velocity
        return normal(after, mean if sampler.mean_clip is None else mean.clamp(-1, 1), std)
    velocity = policy.velocity(context, x, time)
    data, noise = x - tau * velocity, x + (1 - tau) * velocity
    if sampler.kernel == "flow_cps":
        angle = math.pi * sampler.noise_level / 2
        return normal(after, (1 - following) * data + following * math.cos(angle) * noise, following * math.sin(angle))
    sigma = sampler.noise_level * math.sqrt(tau / ((1 - tau) if k else width))
    mean = (1 - following) * data + (following - sigma**2 * width / (2 * tau)) * noise
    return normal(after, mean, sigma * math.sqrt(width))


def by_hand(policy: Any, rollout: ChunkRollout, chosen: Decisions) -> Tensor:
    """[n, C, D]: the log-probability of each number that was executed of each decision, 0 for the others."""
    sampler, result = rollout.sampler, []
    for row, ratio in zip(chosen.row.tolist(), chosen.step.tolist(), strict=True):
        part = training_rows(rollout, torch.tensor([row]))
        context = policy.encode(part.observation)
        steps = range(part.states.shape[1]) if isinstance(sampler, LearnedNoise) else [ratio]
        states, following, index = part.states[0], part.next_states[0], part.step_index[0].tolist()
        terms = [step_log_prob(policy, sampler, context, states[n, None], following[n, None], index[n]) for n in steps]
        total = torch.stack(terms).sum(0)[0]
        if isinstance(sampler, LearnedNoise):
            first = part.states[:, 0]
            total = total + normal(first, torch.zeros_like(first), 1.0)[0]
            total = total / (len(terms) + 1) if sampler.reduction == "mean" else total
        executed = int(rollout.n_executed.flatten()[row])
        result.append(torch.where(torch.arange(4)[:, None] < executed, total[:4, :3], 0.0))
    return torch.stack(result)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_first_ratio_is_one(name: str, tmp_path: Path) -> None:
    """To the bit in the batches of all slots; in others but for the rounding of matrix products."""
    with acted(tmp_path, name) as (run, rollout):
        every = taught(rollout)
        ratios = rollout.log_prob.shape[2]
        assert run.keeps_features and set(rollout.contexts) >= {"features"}
        for t in range(len(rollout.valid)):
            for m in range(ratios):
                slots = rollout.valid[t].nonzero()[:, 0]
                batch = Decisions(slots + 8 * t, torch.full_like(slots, m), *torch.ones(3, len(slots)))
                scored = scored_by(run, rollout, batch)
                off = 0.0 if len(slots) == 8 else 1e-5
                torch.testing.assert_close(scored.log_prob.detach(), scored.old_log_prob, rtol=off, atol=off)
        order = torch.randperm(len(every.row), generator=torch.Generator().manual_seed(3))
        scored = scored_by(run, rollout, every.chosen(order))
        torch.testing.assert_close(scored.log_prob.detach(), scored.old_log_prob, rtol=1e-5, atol=1e-4)
        sums = actor_loss(run.settings, scored, recorded(run, rollout, every.chosen(order))).sums
        assert float(sums["ratio/mean"].detach()) / len(order) == pytest.approx(1.0, abs=1e-4)
        assert sums["ratio/clipped"] == 0


def test_clips_of_elements(tmp_path: Path) -> None:
    settings = vla_runs.config(tmp_path).trainer
    elements = torch.linspace(-9, 9, 24).view(2, 4, 3)
    executed = torch.tensor([4, 2])
    clipped = settings.model_copy(update={"element_clip": (-5.0, 2.0)})
    wanted = elements.clamp(-5, 2)
    wanted[1, 2:] = 0.0  # after the clip: an action that was not executed adds nothing
    torch.testing.assert_close(at_level(elements, executed, 4, 3, clipped), wanted.flatten(1).sum(1))


def test_a_policy_that_scores_otherwise_than_it_draws_is_refused(tmp_path: Path) -> None:
    with vla_runs.opened(vla_runs.config(tmp_path, sampler="flow_noise")) as run:
        run.policy.out = nn.Sequential(nn.Dropout(0.1), run.policy.out)
        run.policy.train()
        with pytest.raises(RuntimeError, match="the log-probability of a sampled chunk is off by .*Look for dropout"):
            run.collect(run.settings)
        run.policy.eval()
        rollout = run.collect(run.settings)
        slots = torch.arange(len(rollout.group))
        assert check_on_policy(run.policy, rollout, slots) == 0.0
        other = rollout._replace(step_index=(rollout.step_index + 1).clamp(max=2))
        with pytest.raises(RuntimeError, match="before the first update"):
            check_on_policy(run.policy, other, slots)
        with pytest.raises(RuntimeError, match="off by nan"):
            check_on_policy(run.policy, rollout._replace(log_prob=rollout.log_prob * math.nan), slots)


def update_gradient(run: VLARun, rollout: ChunkRollout, chosen: Decisions) -> dict[str, Tensor]:
    """What one update over all decisions gives the optimiser, before clipping."""
    result: dict[str, Tensor] = {}

    def caught(groups: list[str]) -> dict[str, float]:
        result.update(vla_runs.gradients(run))
        run.loop.optimizer.zero_grad(set_to_none=True)
        return dict.fromkeys(groups, 0.0)

    run.loop.optimization.step = caught  # type: ignore[method-assign, assignment]
    learn(run, rollout, chosen, run.settings, Meter(), gae.loss, policy=True, critic=run.policy.critic)
    return result


BY_ACTION: dict[str, Any] = {"values": "action", "level": "action", "discount": "smdp"}
CLIPS = {"clip_range": 0.02, "clip_base": 0.001}

UPDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "flow_sde all": ("flow_sde all", {}),
    "flow_cps": ("flow_cps", {}),
    "flow_noise": ("flow_noise", {"entropy_weight": 0.3}),
    "reinflow": ("reinflow", {"clip_range": 0.01}),
    "dppo": ("diffusion", {"reduction": "mean", **CLIPS, "denoising_gamma": 0.9, "value_weight": 0.5}),
    "dppo, higher above": ("diffusion", {**CLIPS, "clip_range": [0.02, 0.05]}),
    "dual clip": ("flow_sde", {"dual_clip": 1.01, "clip_range": [0.01, 0.02]}),
    "element": ("flow_sde", {"level": "element"}),
    "value clip": ("flow_sde", {"value_clip": 0.05, "huber_delta": 0.1, "value_weight": 2.0}),
    "microbatches": ("diffusion", {"microbatch": 7}),
    "ratios of actions, means": ("flow_sde", {"level": "action", "reduction": "mean"}),
    "flow_sde last": ("flow_sde last", {}),
    "ddpm": ("ddpm", {"reduction": "mean"}),
    "values of actions": ("flow_sde", {**BY_ACTION, "value_clip": 0.05, "huber_delta": 0.1}),
    "values of actions, elements": ("flow_sde", {**BY_ACTION, "level": "element"}),
}


@pytest.mark.parametrize("name", UPDATES)
def test_the_gradient_of_an_update_is_that_of_the_formula(name: str, tmp_path: Path) -> None:
    kind, changes = UPDATES[name]
    with acted(tmp_path, kind, trainer={"epochs": 1, "minibatch": 10_000, **changes}) as (run, rollout):
        policy, p = run.policy, run.settings
        stir(policy, 0.004)
        chosen = taught(rollout, values=p.values)
        result = update_gradient(run, rollout, chosen)

        elements = by_hand(policy, rollout, chosen)
        ratios = rollout.log_prob.shape[2]
        old = rollout.log_prob.flatten(0, 1)[chosen.row, chosen.step if ratios > 1 else 0][:, :4, :3]
        there = (torch.arange(4) < rollout.n_executed.flatten()[chosen.row, None])[..., None].expand(elements.shape)
        old = torch.where(there, old, 0.0)
        if p.level != "element":
            axes = (1, 2) if p.level == "chunk" else (2,)
            elements, old = elements.sum(axes), old.sum(axes)
            there = there.any(2).any(1) if p.level == "chunk" else there[..., 0]
            if p.reduction == "mean":
                count = 12 if p.level == "chunk" else 3
                elements, old = elements / count, old / count
        ratio = (elements - old).exp()
        shape = (-1,) + (1,) * (ratio.dim() - 1)
        advantage, low = chosen.advantage.float(), torch.full((len(chosen.row),), p.clip_below)
        if kind == "diffusion":
            inner = p.denoising_gamma ** (ratios - 1 - chosen.step)
            advantage = advantage * inner.view(-1, *[1] * (advantage.dim() - 1))
            if p.clip_base is not None:
                rise = (torch.exp(3.0 * chosen.step / (ratios - 1)) - 1) / (math.e**3 - 1)
                low = p.clip_base + (p.clip_below - p.clip_base) * rise
        high = torch.full_like(low, p.clip_range[1]) if isinstance(p.clip_range, tuple) else low
        low, high = low.view(shape), high.view(shape)
        own = shape if p.values == "chunk" else (-1, 4) + (1,) * (ratio.dim() - 2)  # action j has advantage j
        a = advantage.view(own)
        loss = torch.maximum(-a * ratio, -a * torch.minimum(torch.maximum(ratio, 1 - low), 1 + high))
        clipped = float((loss > -a * ratio).float().mean())
        assert name != "dual clip" or bool((loss > 1.01 * a.abs()).any())
        if p.dual_clip is not None:
            loss = torch.minimum(loss, p.dual_clip * a.abs())
        unclipped = ("reinflow", "flow_sde last", "ddpm", "ratios of actions, means")
        assert name in unclipped or 0.02 < clipped < 0.9  # the clip matters
        total = torch.where(there, loss * chosen.weight.float().view(own), 0.0).sum() / loss.numel()
        seen = [training_rows(rollout, row[None]).observation for row in chosen.row]
        value = torch.cat([policy.value(policy.encode(observation)) for observation in seen])
        before = rollout.values.flatten(0, 1)[chosen.row]
        returns = chosen.returns.float().view(value.shape)

        def error(v: Tensor) -> Tensor:
            e, bound = (v - returns).abs(), p.huber_delta or 1e6
            return torch.where(e <= bound, 0.5 * e**2, bound * (e - bound / 2))

        values = error(value)
        if p.value_clip is not None:
            values = torch.maximum(values, error(before + (value - before).clamp(-p.value_clip, p.value_clip)))
        total = total + p.value_weight * (values * chosen.weight.float().view(value.shape)).mean()
        if p.entropy_weight:
            stds = []
            for row in chosen.row:
                part = training_rows(rollout, row[None])
                context = policy.encode(part.observation)
                for n in range(3):
                    raw = policy.velocity_and_noise(context, part.states[:, n], torch.tensor([1 - n / 3]))[1]
                    stds.append(0.2 * (0.6 / 0.2) ** ((torch.tanh(raw) + 1) / 2))
            total = total - p.entropy_weight * (0.5 * math.log(2 * math.pi * math.e) + torch.stack(stds).log()).mean()
        total.backward()
        reached = vla_runs.assert_gradients(result, run, 2e-3)
        assert "value_head" in reached and reached & {"expert", "body"}


def test_processes_number_their_decisions_as_one_would(tmp_path: Path) -> None:
    with acted(tmp_path, "diffusion") as (run, rollout):
        every, slots = taught(rollout), rollout.valid.shape[1]
        assert len({int(n) for n in rollout.valid.sum(0)}) > 1
        shared = []
        for first in (0, slots // 2):
            own = slice(first, first + slots // 2)
            length = int(rollout.valid[:, own].any(1).nonzero().max()) + 1
            part = rollout._replace(valid=rollout.valid[:length, own], log_prob=rollout.log_prob[:length, own])
            result = decisions(part, *torch.ones(3, *part.valid.shape))
            local = slots // 2
            shared.append((result.row // local * slots + result.row % local + first, result.step))
        assert torch.equal(torch.cat([row for row, _ in shared]), every.row)
        assert torch.equal(torch.cat([step for _, step in shared]), every.step)


def test_the_success_filter_leaves_out_what_always_or_never_succeeds(tmp_path: Path) -> None:
    changes = {"trainer": {"success_filter": [0.1, 0.9]}, "environment": {"group_size": 4}}
    with acted(tmp_path, "flow_sde", **changes) as (run, rollout):
        rewards = torch.zeros_like(rollout.rewards)
        rewards[0, 0, 0] = 1.0
        mixed = rollout._replace(rewards=rewards, group=torch.arange(8) // 4)
        assert scores.filtered(mixed, run.settings).tolist() == [True] * 4 + [False] * 4
        rewards[0, 1:4, 0] = 1.0
        assert not scores.filtered(mixed, run.settings).any()
        lost = rollout.valid.clone()
        lost[:, 0] = False  # the simulator of the only failure was lost: of the rest all succeed
        rewards[0, 0, 0] = 0.0
        assert scores.filtered(mixed, run.settings).tolist() == [True] * 4 + [False] * 4
        assert not scores.filtered(mixed._replace(valid=lost), run.settings).any()


def test_the_entropy_is_of_what_can_reach_the_robot(tmp_path: Path) -> None:
    """A chunk's tail that is never executed (pi0: 45 of 50 actions, 25 of 32 columns) must not water the bonus down."""
    with acted(tmp_path, "flow_noise", environment={"chunk": 2}, trainer={"entropy_weight": 0.1}) as (run, rollout):
        result = scored_by(run, rollout, taught(rollout))
        with torch.no_grad():  # the head's last layer: numbers [4, 3], the last two actions' stds at the upper bound
            run.policy.noise_head[-1].bias.view(4, 3)[2:] = 100.0
        again = scored_by(run, rollout, taught(rollout))
        assert torch.equal(result.entropy, again.entropy)
        low, high = (0.5 * math.log(2 * math.pi * math.e * std**2) for std in (0.2, 0.6))
        assert bool((result.entropy > low).all()) and bool((result.entropy < high).all())
        result.entropy.sum().backward()
        assert bool((run.policy.noise_head[-1].bias.grad.view(4, 3)[:2] != 0).all())


def test_lost_episodes_are_not_counted_as_failures(tmp_path: Path) -> None:
    with acted(tmp_path, "flow_sde") as (run, rollout):
        won = rollout._replace(success=torch.ones_like(rollout.success), rewards=torch.ones_like(rollout.rewards))
        rows: list[dict[str, float]] = []
        run.loop.finish = rows.append  # type: ignore[method-assign, assignment]
        for lost in (torch.arange(8) < 3, torch.ones(8, dtype=torch.bool)):
            less = won._replace(valid=won.valid & ~lost, success=won.success & ~lost)
            run.finish(less, {})
        assert rows[0]["rollout/success"] == 1.0 and rows[1]["rollout/success"] == 0.0
