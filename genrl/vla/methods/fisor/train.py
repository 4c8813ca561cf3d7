"""FISOR: safe offline learning by feasibility-guided diffusion cloning (arXiv 2401.10700).

Three things from fixed data, side by side: how good (reward IQL), how safe at best (V_h, Q_h: the least worst violation
that can be reached, by a reversed expectile), and a diffusion policy cloned with weights that ask for reward where
safety can be kept and for less violation where it cannot. It acts by the least Q_h of several samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from genrl.mdp import ddpm, levels
from genrl.mdp.kernels import Transition
from genrl.mdp.noise import generator, seeded
from genrl.objectives import actor_critic
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.runtime.show.compare.statistics import wilson
from genrl.runtime.show.sheet import ContactSheet
from genrl.vla import setup
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import frames_of as demonstrated_frames
from genrl.vla.data.demonstrations import recorded, world_of
from genrl.vla.data.recordings import Steps, extremes
from genrl.vla.evaluate import Judged, Watched, sheet_of
from genrl.vla.methods.fisor.settings import FISOR
from genrl.vla.offline.critics import Critics
from genrl.vla.offline.imitation import Step, observation_of, recorded_chunks, step_beside, stepper
from genrl.vla.offline.transitions import (
    Behaviour,
    Reader,
    Store,
    Transitions,
    Words,
    frames_of,
    from_steps,
    merge,
    play,
    take,
)
from genrl.vla.policies.embedded import DiffusionMLP
from genrl.vla.policies.policy import ACTION, STATE, Batch, Policy, PredictsNoise, rows, vocabulary
from genrl.vla.rollout.sampling import Acting, ChunkNoise, Diffusion
from genrl.vla.simulators.contract import Environment

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

SAFE = -1.0
"""h of a transition without cost."""
COST_EXPECTILE, COST_TEMPERATURE = 0.9, 5.0
"""Reversed expectile of V_h, and how strongly safer actions are preferred in infeasible states (FISOR: the same)."""
GAMMA, EXPECTILE = 0.99, 0.9
"""Discount of an action, and the expectile of the reward's V (FISOR: the same)."""
LEARNING_RATE, BATCH = 1e-3, 256
"""Of the critics (FISOR: 3e-4), and transitions per step, of the actor too (FISOR: 1024 for it)."""
CAREFUL = 0.4
"""Share of the behaviour's episodes, on the table, in which it avoids the other discs."""
ACTOR_RATE = 0.005
"""How fast the copy that acts follows in a step (FISOR: 0.001)."""
TASKS = ("touch",)
"""Tasks of the table, where the configuration names none."""


class Fisor(nn.Module):
    """The networks: `reward` and `violation` critics, the `actor`, and `slow_actor`, the copy that acts."""

    def __init__(self, actor: DiffusionMLP, *, width: int = 128) -> None:
        super().__init__()
        inputs, numbers = actor.config.inputs, actor.horizon * actor.action_dim
        self.reward = Critics(inputs, actor.stats, numbers, width=width)
        self.violation = Critics(inputs, actor.stats, numbers, width=width)
        self.actor = actor
        self.slow_actor = copy.deepcopy(actor).requires_grad_(False)


def critic_losses(nets: Fisor, batch: Transitions, settings: FISOR) -> dict[str, Tensor]:
    """The four regressions of one batch, [] each: "v", "q" of rewards, "v_h", "q_h" of violations."""
    observation, action = batch.observation, batch.action
    values = nets.reward.v(observation)
    # The lower of two for rewards, the higher of two for violations: in both, the estimate that promises less.
    better = nets.reward.slow_q(observation, action).amin(0)
    worst = nets.violation.v(observation)
    violating = nets.violation.slow_q(observation, action).amax(0)
    with torch.no_grad():
        # V of the data's own actions, so that no action is judged which the data do not have (IQL).
        following, ahead = nets.reward.v(batch.next_observation), nets.violation.v(batch.next_observation)
    target = actor_critic.q_target(batch.reward, following, batch.terminated, batch.discount)
    h = torch.where(batch.cost > 0, settings.violation, SAFE)
    reach = actor_critic.feasibility_target(h, ahead, ~batch.terminated, GAMMA)
    return {
        "v": actor_critic.expectile_loss(better - values, EXPECTILE).mean(),
        "q": (nets.reward.q_values(observation, action) - target).square().mean(),
        "v_h": actor_critic.reversed_expectile_loss(violating - worst, COST_EXPECTILE).mean(),
        "q_h": (nets.violation.q_values(observation, action) - reach).square().mean(),
    }


@torch.no_grad()
def weights(nets: Fisor, observation: Batch, action: Tensor, settings: FISOR) -> Tensor:
    """`actor_critic.cloning_weights` of data actions, [N]."""
    return actor_critic.cloning_weights(
        nets.reward.slow_q(observation, action).amin(0),
        nets.reward.v(observation),
        nets.violation.slow_q(observation, action).amax(0),
        nets.violation.v(observation),
        reward_temperature=settings.temperature,
        cost_temperature=COST_TEMPERATURE,
        largest_cost_weight=settings.largest_cost_weight,
    )


def recorded_batch(
    nets: Fisor, batch: Transitions, sampler: Diffusion, settings: FISOR, rng: torch.Generator
) -> Recorded:
    """The chunks of a batch with noise, timesteps and cloning weights."""
    weight = torch.ones(len(batch.action))
    if settings.weighted:
        weight = weights(nets, batch.observation, batch.action, settings)
    bars = sampler.grid.alpha_bar.flip(0)
    return recorded_chunks(nets.actor, batch.observation, batch.action, bars, rng, weight)


def loss(settings: FISOR, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """Weighted noise regression on the chunks of a batch, []."""
    actor, noise, timestep = acting.policy, given["noise"], given["level"]
    x = levels.diffusion_sample(given["actions"], noise, given["alpha_bars"][timestep])
    predicted = actor.noise(actor.encode(observation_of(given)), x, timestep)
    return {"loss": actor_critic.weighted_noise_loss(predicted.flatten(1), noise.flatten(1), given["weight"])}


def train_step(
    nets: Fisor,
    data: Transitions,
    sampler: Diffusion,
    settings: FISOR,
    critics: torch.optim.Optimizer,
    step_actor: Step,
    *,
    seed: int,
    step: int,
) -> dict[str, float]:
    """One update of the critics and one of the actor, each with a batch of its own; then the slow copies follow."""
    rng = generator(seed, "fisor", step)
    figures: dict[str, float] = {}
    if settings.weighted:
        index = torch.randint(len(data.reward), (BATCH,), generator=rng)
        losses = critic_losses(nets, take(data, index), settings)
        step_beside(critics, torch.stack(list(losses.values())).sum())
        nets.reward.follow(settings.target_rate)
        nets.violation.follow(settings.target_rate)
        figures = {f"critic/{name}_loss": value.item() for name, value in losses.items()}
    batch = take(data, torch.randint(len(data.reward), (BATCH,), generator=rng))
    results = step_actor(recorded_batch(nets, batch, sampler, settings, rng))
    with torch.no_grad():
        for slow, fast in zip(nets.slow_actor.parameters(), nets.actor.parameters(), strict=True):
            slow.lerp_(fast, ACTOR_RATE)
    return figures | {"loss/policy": results["loss"].item()}


def chain_noise(nets: Fisor, sampler: Diffusion, count: int, decision: int, *, candidates: int, seed: int) -> Tensor:
    """What `samples` begins with for `count` tables, [count, candidates, K + 1, H, A]: a function of (seed, decision,
    slot)."""
    policy = nets.slow_actor
    shape = (count, candidates, sampler.steps + 1, policy.horizon, policy.action_dim)
    return torch.randn(shape, generator=generator(seed, "safest", decision))


def samples(nets: Fisor, sampler: Diffusion, observation: Batch, noise: Tensor) -> Tensor:
    """Chunks of the slow actor in robot units from noise [B, N, K + 1, H, A]: [B, N, H, A]."""
    policy, (count, candidates) = nets.slow_actor, noise.shape[:2]
    chunk_noise = ChunkNoise(noise.flatten(0, 1), torch.ones(count * candidates, sampler.steps, dtype=torch.bool))
    context = rows(policy.encode(observation), torch.arange(count).repeat_interleave(candidates))
    actions: Tensor = policy.actions(sampler.sample(policy, context, chunk_noise).chunk)
    return actions.view(count, candidates, *actions.shape[1:])


def risks(nets: Fisor, observation: Batch, chunks: Tensor) -> Tensor:
    """max Q_h of chunks [B, N, H, A], at least `SAFE`, [B, N]: nothing is safer than safe, and what is estimated below
    it is error, and no reason."""
    count, candidates = chunks.shape[:2]
    repeated = rows(observation, torch.arange(count).repeat_interleave(candidates))
    worst: Tensor = nets.violation.slow_q(repeated, chunks.flatten(0, 1)).amax(0)
    return worst.view(count, candidates).clamp(min=SAFE)


def safest(nets: Fisor, sampler: Diffusion, *, candidates: int, seed: int) -> Behaviour:
    """The behaviour of a trained policy: of N samples of the slow actor the one of least max Q_h."""

    @torch.no_grad()
    def behave(observation: Batch, decision: int) -> Tensor:
        count = len(observation[STATE])
        noise = chain_noise(nets, sampler, count, decision, candidates=candidates, seed=seed)
        chunks = samples(nets, sampler, observation, noise)
        best: Tensor = chunks[torch.arange(count), risks(nets, observation, chunks).argmin(1)]
        return best

    return behave


@dataclass(frozen=True)
class Released(Diffusion):
    """The chain of FISOR's program: noise of variance beta, not clipped, and every state clipped to +-1."""

    noise_clip: float = math.inf

    def transition(
        self, policy: Policy, context: Batch, x: Tensor, index: Tensor, noisy: Tensor | None = None
    ) -> Transition:
        """See `Diffusion`."""
        assert isinstance(policy, PredictsNoise)
        later = (index > 0).to(x.device).view(-1, *[1] * (x.dim() - 1))
        x = torch.where(later, x.clamp(-1.0, 1.0), x)  # that of the step before; the chain clips the last one itself
        step = ddpm.ancestral(x, policy.noise(context, x, self.grid.timesteps[index]), self.grid, index)
        return ddpm.with_floor(step, self.floor)


def sampler_of(actor: DiffusionMLP) -> Diffusion:
    """All of the actor's noise levels."""
    count = actor.config.train_steps
    return Released(train_steps=count, steps=count, ft_denoising_steps=count, floor=1e-3, schedule="vp")


def new_policy(config: VLAConfig) -> DiffusionMLP:
    """A diffusion policy for the data, with weights by the seed."""
    assert isinstance(config.trainer, FISOR) and config.policy.new is not None
    if config.demonstrations is not None and config.demonstrations.dataset is not None:
        policy = setup.new_policy(config, *demonstrated_frames(config, None))
        assert isinstance(policy, DiffusionMLP)
        return policy
    words = vocabulary(world_of(config, TASKS).lines)
    data = table_data(config, config.trainer, Words(words), config.policy.new.horizon)
    policy = setup.new_policy(config, frames_of(data), words)
    assert isinstance(policy, DiffusionMLP)
    return policy


def table_data(config: VLAConfig, settings: FISOR, reads: Reader, horizon: int) -> Transitions:
    """Episodes of a behaviour on the table that is not always careful."""
    world = world_of(config, TASKS)
    data: Transitions = world.careless_data(config, settings.episodes, CAREFUL, reads, horizon, GAMMA)
    return data


def table(config: VLAConfig, num_envs: int) -> Environment:
    """The constrained table of the configuration."""
    assert config.policy.new is not None
    chunk = config.environment.chunk or config.policy.new.horizon
    env: Environment = world_of(config, TASKS).with_hazards(num_envs, chunk)
    return env


def file_data(config: VLAConfig, reads: Reader, steps: Steps) -> Transitions:
    """The steps of a file as decisions of one action, with rewards scaled as in FISOR's released code: so that the
    range of returns is the number of actions of the longest episode."""
    low, high = extremes(steps.totals()[0])
    # Temperatures are in units of reward: without this each file would need its own.
    scale = np.bincount(steps.episode).max() / (high - low)
    scaled = steps._replace(reward=(steps.reward * scale).astype(np.float32))
    return from_steps(scaled, reads, config.environment, horizon=1, executed=1, gamma=GAMMA)


def judged(data: Transitions) -> dict[str, float]:
    """Success with its interval, mean cost of an episode (decisions in a hazard), share of episodes with any."""
    episodes, place = data.episode.unique(return_inverse=True)
    count = len(episodes)
    cost = torch.zeros(count).index_add(0, place, data.cost)
    won = torch.zeros(count).index_add(0, place, data.success.float())
    length = torch.zeros(count).index_add(0, place, data.n_executed.float())
    low, high = wilson(int(won.sum()), count)
    return {
        "eval/success_mean": float(won.mean()),
        "eval/success_low": low,
        "eval/success_high": high,
        "eval/length_mean": float(length.mean()),
        "eval/return_mean": float(won.mean()),
        "eval/cost_mean": float(cost.mean()),
        "eval/violating": float((cost > 0).float().mean()),
    }


def judged_by(data: Transitions, steps: Steps, limit: float) -> dict[str, float]:
    """`judged` of decisions of one action in a file's environment, with the return that it pays, and DSRL's two figures
    (arXiv 2306.09303): by the extreme returns of the file, and by the limit. Of success, which the file may not know,
    nothing."""
    metrics = {name: value for name, value in judged(data).items() if "success" not in name}
    metrics["eval/return_mean"] = float(data.reward.sum()) / len(data.episode.unique())
    low, high = extremes(steps.totals()[0])
    # DSRL adds one to both where the limit is 0, which it could not divide by.
    more = float(limit == 0)
    return metrics | {
        "eval/normalized_return": (metrics["eval/return_mean"] - low) / (high - low),
        "eval/normalized_cost": (metrics["eval/cost_mean"] + more) / (limit + more),
    }


def judge(run: VLARun, settings: FISOR, behave: Behaviour, steps: Steps | None) -> Callable[[int], dict[str, float]]:
    """Evaluates a behaviour on the table, or where the steps of a file come from."""
    config, actor, count = run.config, run.policy, run.config.evaluation.episodes

    def evaluate(iteration: int) -> dict[str, float]:
        run.loop.phase("evaluating", count)
        together = count if steps is None else setup.side_by_side(config, count)
        opened = table(config, count) if steps is None else setup.open_tables(config, actor, num_envs=together)
        with closing(opened) as env:
            decisions = setup.longest_episode(env)
            assert decisions is not None  # neither is opened without a limit
            seeds = [config.evaluation.seed, *[None] * (-(-count // together) - 1)]  # None: the next ones of the seed
            parts = [play(env, behave, actor, decisions=decisions, seed=seed, one_episode=True) for seed in seeds]
            lost = env.dropped
        played = merge(*parts)
        if not len(played.done):
            raise RuntimeError(f"evaluating: all {lost} episodes were lost by their simulator")
        run.note_sheet(lambda: sheet_of_decisions(actor, played))
        metrics = {"eval/lost": float(lost)} if lost else {}
        metrics |= judged(played) if steps is None else judged_by(played, steps, settings.cost_limit)
        return metrics | {"eval/within_limit": float(metrics["eval/cost_mean"] <= settings.cost_limit)}

    return evaluate


def train(run: VLARun, settings: FISOR) -> None:
    """Data of a behaviour that is not safe; then critics and actor side by side, and evaluation with costs."""
    config, loop, actor = run.config, run.loop, run.policy
    sampler = sampler_of(actor)
    with seeded(config.seed, "critics"):
        nets = Fisor(actor).to(loop.process.accelerator.device)
    trained = [p for net in (nets.reward, nets.violation) for p in net.parameters() if p.requires_grad]
    critics = torch.optim.Adam(trained, lr=LEARNING_RATE)
    loop.keep("fisor", Store(reward=nets.reward, violation=nets.violation, slow=nets.slow_actor, optimiser=critics))
    steps = recorded(config)
    if steps is None:
        data = table_data(config, settings, actor, actor.horizon)
        metrics = judged(data)
        data_figures = {"data/success_mean": metrics["eval/success_mean"], "data/cost_mean": metrics["eval/cost_mean"]}
    else:
        data = file_data(config, actor, steps)
        data_figures = {
            "data/return_mean": float(steps.totals()[0].mean()),
            "data/cost_mean": float(steps.totals()[1].mean()),
        }
    run.judge = judge(
        run,
        settings,
        safest(nets, sampler, candidates=settings.candidates if settings.weighted else 1, seed=config.evaluation.seed),
        steps,
    )
    step_actor = stepper(run, settings, loss, sampler)
    for iteration in loop.iterations():
        loop.phase("training", settings.steps_per_iteration)
        figures = Meter()
        with loop.timed("train"):
            for step in range(settings.steps_per_iteration):
                number = iteration * settings.steps_per_iteration + step
                figures.note(
                    train_step(nets, data, sampler, settings, critics, step_actor, seed=config.seed, step=number)
                )
                loop.advance(1)
        loop.finish(figures.result() | data_figures | {"lr": loop.lr})


def sheet_of_decisions(policy: Policy, played: Transitions) -> ContactSheet:
    """The sheet of whole episodes that were recorded by their decisions, as methods with costs play them."""
    numbers, place = played.episode.unique(return_inverse=True)

    def total(values: Tensor) -> list[float]:
        return torch.zeros(len(numbers)).index_add(0, place, values.float()).tolist()

    won, steps = [one > 0 for one in total(played.success)], [int(one) for one in total(played.n_executed)]
    evaluated = Judged([f"cost {cost:g}" for cost in total(played.cost)], won, steps, total(played.reward), [])
    watched = Watched()
    watched.frames = {k: v for k, v in played.observation.items() if v.is_floating_point()}
    watched.frames[ACTION] = played.action[:, :1]
    return sheet_of(policy, evaluated, watched, None)
