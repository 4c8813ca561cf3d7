"""RL-100 (arXiv 2510.14830): imitation, offline RL gated by offline evaluation, online RL, one-step distillation.

One surrogate serves offline and online: chunks drawn by a copy of the policy, an advantage for each (of critics that
were learned from data, or of episodes), PPO's clip at every denoising step, and an optimiser step for each of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.mdp import chains
from genrl.mdp.noise import generator
from genrl.objectives.actor_critic import approximate_kl
from genrl.objectives.gae import chunk_gae, normalise_advantages
from genrl.objectives.policy_losses import clipped_surrogate
from genrl.vla.encoder import MODES
from genrl.vla.normalise import normalise
from genrl.vla.offline import Critics, Transitions, take
from genrl.vla.policy import ACTION, ENVIRONMENT, STATE, Batch, Policy, Statistics, rows
from genrl.vla.rollout import ChunkRollout, training_rows
from genrl.vla.sampling import Sampler, act, draw, replay, sample
from genrl.vla.tiny_flow import TinyFlowVLA


class Drawn(NamedTuple):
    """B chunks and what PPO needs of them: observation; states, next_states [B, N, H, A], step_index [B, N]; log_prob
    [B, N], of the executed part of the chunk, summed; advantage [B]."""

    observation: Batch
    states: Tensor
    next_states: Tensor
    step_index: Tensor
    log_prob: Tensor
    advantage: Tensor


def decayed_clip(clip: float, decay: float, uses: int, *, until: int = 200) -> float:
    """`clip decay^min(uses, until)`: the clip range of the offline phase (.25, .96, the first 200 uses)."""
    return float(clip * decay ** min(uses, until))


@torch.no_grad()
def draw_at(
    old: Policy, sampler: Sampler, critics: Critics, observation: Batch, rng: torch.Generator, *, executed: int
) -> Drawn:
    """Chunks of the behaviour copy at states of the data, with `min Q(s, a) - V(s)` normalised over the batch."""
    count = len(observation[STATE])
    seeds = torch.randint(2**62, (count,), generator=rng).tolist()
    drawn = sample(old, sampler, old.encode(observation), draw(sampler, old, _generators(seeds)))
    actions = old.actions(drawn.chunk)
    advantage = normalise_advantages(critics.advantage(observation, actions), eps=1e-8).float()
    log_prob = _sums(drawn.log_prob, executed)
    return Drawn(observation, drawn.states, drawn.next_states, drawn.step_index, log_prob, advantage)


def surrogate_steps(
    policy: Policy, sampler: Sampler, optimiser: torch.optim.Optimizer, batch: Drawn, *, clip: float, executed: int
) -> Iterator[dict[str, float]]:
    """An optimiser step for every denoising step i, noisiest first: `-mean min(r_i A, clip(r_i, 1 -+ clip) A)`.

    r_i is of the chunk's executed part. Gradient norm clipped at .5. Yields {"loss", "kl", "clip_frac"} of each.
    Raises TypeError for a sampler whose chain is one decision (`LearnedNoise`): there is no ratio of a step.
    """
    if batch.log_prob.shape[1] != batch.states.shape[1]:
        raise TypeError(f"RL-100 needs a ratio for every denoising step, {type(sampler).__name__} has one per chain")
    assert isinstance(policy, nn.Module)
    for i in range(batch.states.shape[1]):
        one = slice(i, i + 1)
        context = policy.encode(batch.observation)
        step = (batch.states[:, one], batch.next_states[:, one], batch.step_index[:, one])
        log_prob = _sums(replay(policy, sampler, context, *step).log_prob, executed)[:, 0]
        old = batch.log_prob[:, i]
        found = clipped_surrogate(log_prob, old, batch.advantage, clip, clip)
        loss = found.loss.mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimiser.step()
        yield {
            "loss": loss.item(),
            "kl": approximate_kl(log_prob, old).mean().item(),
            "clip_frac": found.clipped.float().mean().item(),
        }


class Dynamics(nn.Module):
    """(observation, chunk) -> the observation after it, and whether the episode is over: what the policy is judged in.

    Numbers only (`STATE` and `ENVIRONMENT`, the latter where the data have it); instructions stay what they are.
    """

    scale: Tensor

    def __init__(self, data: Transitions, stats: Statistics, *, width: int = 256) -> None:
        super().__init__()
        self.stats = stats
        self.names = [name for name in (STATE, ENVIRONMENT) if name in data.observation]
        moved = torch.cat([data.next_observation[n] - data.observation[n] for n in self.names], 1)
        self.register_buffer("scale", moved.std(0).clamp(min=0.01))
        numbers, seen = data.action[0].numel(), moved.shape[1]
        self.body = nn.Sequential(
            nn.Linear(seen + numbers, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, seen + 1),
        )  # fmt: skip

    def forward(self, observation: Batch, action: Tensor) -> tuple[Tensor, Tensor]:
        """The change in units of its spread [B, S], and the logit of an end [B]."""
        shown = [normalise(observation[name], self.stats[name], "MEAN_STD") for name in self.names]
        chunk = normalise(action, self.stats[ACTION], MODES["ACTION"]).clamp(-1.0, 1.0)
        found = self.body(torch.cat([*shown, chunk.flatten(1)], 1))
        return found[:, :-1], found[:, -1]

    @torch.no_grad()
    def after(self, observation: Batch, action: Tensor) -> tuple[Batch, Tensor]:
        """The next observation, and whether the episode is over, bool [B]."""
        change, over = self(observation, action)
        moved, new, first = change * self.scale, dict(observation), 0
        for name in self.names:
            width = observation[name].shape[1]
            new[name] = observation[name] + moved[:, first : first + width]
            first += width
        return new, over > 0

    def loss(self, batch: Transitions) -> Tensor:
        """Squared error of the change and cross-entropy of the end, []."""
        change, over = self(batch.observation, batch.action)
        moved = torch.cat([batch.next_observation[n] - batch.observation[n] for n in self.names], 1)
        ended = functional.binary_cross_entropy_with_logits(over, batch.terminated.float())
        error: Tensor = (change - moved / self.scale).square().mean() + ended
        return error


def train_dynamics(
    model: Dynamics, data: Transitions, *, steps: int, batch_size: int, learning_rate: float, seed: int
) -> Iterator[float]:
    """Train it on the data, yielding the loss of every step; batches are functions of (seed, step)."""
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for step in range(steps):
        index = torch.randint(len(data.reward), (batch_size,), generator=generator(seed, "dynamics", step))
        loss = model.loss(take(data, index))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        yield loss.item()


@torch.no_grad()
def offline_value(
    policy: Policy, sampler: Sampler, model: Dynamics, critics: Critics, start: Batch, *, steps: int, seed: int
) -> float:
    """Offline policy evaluation: the mean of min Q along `steps` decisions of the policy in the model from `start`.

    Without exploration; the noise is the same for every policy that is compared. An imagined episode that is over keeps
    its last Q. The critics are those that the policy climbs, so the figure can be exploited: evaluate for real, too.
    """
    observation, count = start, len(start[STATE])
    over = torch.zeros(count, dtype=torch.bool)
    kept, total = torch.zeros(count), 0.0
    for step in range(steps):
        noise = torch.randn(count, policy.horizon, policy.action_dim, generator=generator(seed, "judged", step))
        actions = policy.actions(act(policy, sampler, policy.encode(observation), noise))
        kept = torch.where(over, kept, critics.slow_q(observation, actions).amin(0))
        total += float(kept.mean())
        following, ended = model.after(observation, actions)
        observation = {
            name: torch.where(over.view(-1, *[1] * (value.dim() - 1)), value, following[name])
            for name, value in observation.items()
        }
        over = over | ended
    return total / steps


class Gate:
    """Which policy the trust region is centred on: a candidate takes the place of the old one if it is judged better.

    best: the value of the old policy, the highest so far. accepted, refused: how many candidates were.
    """

    def __init__(self, best: float) -> None:
        self.best, self.accepted, self.refused = best, 0, 0

    def admits(self, value: float) -> bool:
        """Whether a candidate of this value is accepted, which makes it the best."""
        if value > self.best:
            self.best, self.accepted = value, self.accepted + 1
            return True
        self.refused += 1
        return False


@torch.no_grad()
def online_batch(
    rollout: ChunkRollout, critics: Critics, *, gamma: float, lam: float, executed: int
) -> tuple[Drawn, Tensor, Batch]:
    """A rollout's decisions with GAE done right, their returns [n], and their observations.

    Discount gamma^n for n executed actions, an end not bootstrapped, a time limit bootstrapped from the true next
    observation, traces cut at both, per slot: `gae.chunk_gae`, "smdp". V is that of the offline phase.
    """
    decisions, count = rollout.valid.shape
    flat = {name: value.flatten(0, 1) for name, value in rollout.observations.items()}
    values = critics.v(flat).view(decisions + 1, count)
    flags = (rollout.terminated, rollout.truncated)
    found = chunk_gae(
        *(rollout.rewards, rollout.n_executed, *flags, values[:-1], values[1:]), gamma=gamma, lam=lam, mode="smdp"
    )
    index = rollout.valid.flatten().nonzero()[:, 0]
    chosen = training_rows(rollout, index)
    advantage = normalise_advantages(found.advantages.flatten()[index], eps=1e-5).float()
    log_prob = _sums(chosen.log_prob, executed)
    record = (chosen.states, chosen.next_states, chosen.step_index)
    drawn = Drawn(chosen.observation, *record, log_prob, advantage)
    return drawn, found.returns.flatten()[index].float(), chosen.observation


def part(batch: Drawn, index: Tensor) -> Drawn:
    """Some rows of a batch."""
    return Drawn(rows(batch.observation, index), *(value[index] for value in batch[1:]))


def one_step(student: TinyFlowVLA, context: Batch, noise: Tensor) -> Tensor:
    """The student's chunk from noise [B, H, A] in one call: `x - v(x, 1)`, a flow policy's single Euler step."""
    return noise - student.velocity(context, noise, torch.ones(len(noise), device=noise.device))


def distil(
    student: TinyFlowVLA,
    teacher: Policy,
    sampler: Sampler,
    observations: Batch,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> Iterator[float]:
    """Consistency distillation: the student's one step meets the end of the teacher's chain from the same noise.

    Mean square of the difference on observations of the data, yielded for every step; the teacher does not explore.
    """
    optimiser = torch.optim.AdamW(student.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, total_iters=steps)
    for step in range(steps):
        rng = generator(seed, "distillation", step)
        index = torch.randint(len(observations[STATE]), (batch_size,), generator=rng)
        shown = rows(observations, index)
        noise = torch.randn((batch_size, teacher.horizon, teacher.action_dim), generator=rng)
        with torch.no_grad():
            goal = act(teacher, sampler, teacher.encode(shown), noise)
        loss = (one_step(student, student.encode(shown), noise) - goal).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        yield loss.item()


def _sums(log_prob: Tensor, executed: int) -> Tensor:
    """[B, N, H, A] -> [B, N], over the executed actions."""
    return chains.executed(log_prob, executed, log_prob.shape[-1]).flatten(2).sum(-1)


def _generators(seeds: list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]
