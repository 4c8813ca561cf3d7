"""What RL-100 learns from and judges by: the expert's decisions, episodes of the policy, and imagined decisions in a
model of the data; and its last stage, a policy that acts in one call, from one whose chain has many.

A policy that looks at pictures or points is learned from what its encoder, which is frozen then, has seen in them: this
takes their place (`SEEN`), and can be imagined.

Which of two policies is better is judged without acting, as RL-100 gates its updates (arXiv 2510.14830): by the average
Q of chunks that are imagined in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.mdp.noise import derive_seed, generator, seeded
from genrl.vla.config.names import WORLDS
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import recorded, world_of
from genrl.vla.evaluate import success_rates
from genrl.vla.methods.rl100.settings import RL100
from genrl.vla.offline.critics import Critics
from genrl.vla.offline.imitation import mean_of_last, step_beside
from genrl.vla.offline.transitions import Transitions, from_rollout, from_steps, merge, take
from genrl.vla.policies.embedded import TinyFlowConfig, TinyFlowVLA
from genrl.vla.policies.encoder import MODES
from genrl.vla.policies.folder import save_policy
from genrl.vla.policies.policy import (
    ACTION,
    ENVIRONMENT,
    IMAGE,
    POINTS,
    SEEN,
    STATE,
    TOKENS,
    Batch,
    Policy,
    Statistics,
    rows,
)
from genrl.vla.policies.robot import normalise
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan
from genrl.vla.rollout.sampling import Acting, LearnedNoise, Sampler
from genrl.vla.setup import longest_episode, sampler_of

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
    loop.memory["env_steps"] = loop.memory.get("env_steps", 0) + int(rollout.n_executed.sum())
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


class Dynamics(nn.Module):
    """(observation, chunk) -> the observation after it, and whether the episode is over: what the policy is judged in.

    Numbers only: `STATE`, and of `ENVIRONMENT` and `SEEN`, what a frozen encoder sees, those that the data have;
    instructions stay what they are. stats: of all of these (`seen_statistics` for `SEEN`).
    """

    scale: Tensor

    def __init__(self, data: Transitions, stats: Statistics, *, width: int = 256) -> None:
        super().__init__()
        self.stats = stats
        self.names = [name for name in (STATE, ENVIRONMENT, SEEN) if name in data.observation]
        moved = torch.cat([data.next_observation[n] - data.observation[n] for n in self.names], 1)
        ones = [torch.ones(data.observation[n].shape[1]) if n != SEEN else self.stats[n]["std"] for n in self.names]
        # At least a hundredth of the number's own size: one that hardly ever moves would rule the loss.
        self.register_buffer("scale", torch.maximum(moved.std(0), 0.01 * torch.cat(ones)))
        numbers, moving = data.action[0].numel(), moved.shape[1]
        self.body = nn.Sequential(
            nn.Linear(moving + numbers, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, moving + 1),
        )  # fmt: skip

    def forward(self, observation: Batch, action: Tensor) -> tuple[Tensor, Tensor]:
        """The change in units of its spread [B, S], and the logit of an end [B]."""
        device = self.scale.device
        normalised = [normalise(observation[name].to(device), self.stats[name], "MEAN_STD") for name in self.names]
        chunk = normalise(action.to(device), self.stats[ACTION], MODES["ACTION"]).clamp(-1.0, 1.0)
        hidden = self.body(torch.cat([*normalised, chunk.flatten(1)], 1))
        return hidden[:, :-1], hidden[:, -1]

    @torch.no_grad()
    def after(self, observation: Batch, action: Tensor) -> tuple[Batch, Tensor]:
        """The next observation, and whether the episode is over, bool [B], on the CPU, where data are."""
        change, over = self(observation, action)
        moved, new, first = (change * self.scale).cpu(), dict(observation), 0
        for name in self.names:
            width = observation[name].shape[1]
            new[name] = observation[name] + moved[:, first : first + width]
            first += width
        return new, over.cpu() > 0

    def loss(self, batch: Transitions) -> Tensor:
        """Squared error of the change and cross-entropy of the end, []."""
        change, over = self(batch.observation, batch.action)
        moved = torch.cat([batch.next_observation[n] - batch.observation[n] for n in self.names], 1)
        ended = functional.binary_cross_entropy_with_logits(over, batch.terminated.to(over))
        error: Tensor = (change - moved.to(change) / self.scale).square().mean() + ended
        return error


def train_dynamics(
    model: Dynamics, data: Transitions, *, steps: int, batch_size: int, learning_rate: float, seed: int
) -> Iterator[float]:
    """Train it on the data, yielding the loss of every step; batches are functions of (seed, step)."""
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for step in range(steps):
        index = torch.randint(len(data.reward), (batch_size,), generator=generator(seed, "dynamics", step))
        yield step_beside(optimiser, model.loss(take(data, index)))


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
    values, total = torch.zeros(count), 0.0
    for step in range(steps):
        noise = torch.randn(count, policy.horizon, policy.action_dim, generator=generator(seed, "judged", step))
        actions = policy.actions(sampler.act(policy, policy.encode(observation), noise))
        values = torch.where(over, values, critics.slow_q(observation, actions).amin(0).cpu())
        total += float(values.mean())
        following, ended = model.after(observation, actions)
        observation = {
            name: torch.where(over.view(-1, *[1] * (value.dim() - 1)), value, following[name])
            for name, value in observation.items()
        }
        over = over | ended
    return total / steps


LEARNING_RATE = 1e-3
"""Learning rate of the one-step copy."""


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
        batch = rows(observations, index)
        noise = torch.randn((batch_size, teacher.horizon, teacher.action_dim), generator=rng)
        with torch.no_grad():
            goal = sampler.act(teacher, teacher.encode(batch), noise)
        loss = (one_step(student, student.encode(batch), noise) - goal).square().mean()
        loss_value = step_beside(optimiser, loss)
        schedule.step()
        yield loss_value


def distilled(run: VLARun, settings: RL100, observations: Batch) -> dict[str, float]:
    """Make the one-step copy, judge it in the environment, and save it as `one_step` in the run folder."""
    config, loop, policy = run.config, run.loop, run.policy
    with seeded(config.seed, "student"):
        inputs = policy.config.inputs
        student = TinyFlowVLA(TinyFlowConfig(inputs, policy.action_dim, policy.horizon), policy.stats)
    if inputs.looks:  # the data hold what the policy's encoder has seen
        student.encoder.load_state_dict(policy.encoder.state_dict())
        student.encoder.requires_grad_(False)
    student = student.to(loop.process.accelerator.device)
    loop.phase("distilling")
    sampler = sampler_of(config, policy)
    how = {"steps": settings.distil_steps, "batch_size": settings.batch_size, "seed": config.seed}
    error = mean_of_last(distil(student, policy, sampler, observations, learning_rate=LEARNING_RATE, **how))
    save_policy(student, loop.process.run.folder / "one_step")
    # one Euler step of a flow policy: nothing of the sampler's noise is used without exploration
    judged = run.play(Acting(student, LearnedNoise(steps=1)), range(config.evaluation.episodes))
    return {"distil/error": error, "distil/success_mean": success_rates(judged)["eval/success_mean"]}
