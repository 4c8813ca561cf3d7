"""Advantage-weighted regression of a policy on data (arXiv 1910.00177, with IQL's critics 2110.06169, eq. 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genrl.mdp import ddpm
from genrl.mdp.noise import generator
from genrl.objectives import actor_critic
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter
from genrl.vla import setup
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import world_of
from genrl.vla.offline.critics import Critics, Learning, train_iql
from genrl.vla.offline.descent import followed, stepper
from genrl.vla.offline.imitation import cloning_errors, recorded_chunks
from genrl.vla.offline.transitions import (
    Reader,
    Transitions,
    Words,
    frames_of,
    successful,
    take,
)
from genrl.vla.policies.policy import PredictsNoise, vocabulary
from genrl.vla.rollout.sampling import Acting

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

LARGEST_WEIGHT = 100.0
"""Bound of the weight of a data action in the policy's regression (IQL: 100)."""


GAMMA = 0.97
"""Discount of an action, of the data and of their critics."""


def wayward_data(config: VLAConfig, episodes: int, right: float, reads: Reader, horizon: int) -> Transitions:
    """So many episodes of a player of the world who does what it is told in a share `right` of them."""
    data: Transitions = world_of(config).wayward_data(config, episodes, right, reads, horizon, GAMMA)
    return data


def new_policy(config: VLAConfig, episodes: int, right: float, inputs: tuple[str, ...]) -> Any:
    """A policy for `wayward_data`, which reads these inputs, with weights by the seed."""
    assert config.policy.new is not None
    words = vocabulary(world_of(config).lines)
    data = wayward_data(config, episodes, right, Words(words, inputs), config.policy.new.horizon)
    return setup.new_policy(config, frames_of(data), words)


def advantage_of(
    run: VLARun, settings: Any, critics: Critics, data: Transitions, gap: str, *, batch_size: int
) -> tuple[Tensor, dict[str, float]]:
    """Train the critics on data whose episodes are known to have succeeded or not: the advantage of the data's chunks
    [N], and figures, among them, as `gap`, how much more it is in the episodes that succeeded. settings: `episodes` of
    the data and `critic_steps`."""
    steps, how = settings.critic_steps, Learning(GAMMA, batch_size=batch_size)
    figures = train_iql(critics, data, how, steps=steps, seed=run.config.seed)
    metrics = followed(run, "learning critics", steps, figures, "critic")
    won, advantage = successful(data), critics.advantage(data.observation, data.action).cpu()
    metrics["data/success_mean"] = float(data.success.sum()) / settings.episodes
    return advantage, metrics | {gap: float(advantage[won].mean() - advantage[~won].mean())}


def weighted_cloning(acting: Acting, given: Recorded) -> Tensor:
    """Mean of weight times the squared error of the policy's prediction, over chunks of the data, []."""
    return (given["weight"] * cloning_errors(acting.policy, given)).mean()


def regress(
    run: VLARun, settings: Any, loss: Loss, data: Transitions, advantage: Tensor, figures: Mapping[str, float]
) -> None:
    """All iterations: `steps_per_iteration` steps on `batch_size` decisions, weighted by exp(`temperature` advantage).

    advantage [N] of the data's chunks; figures: logged with every iteration.
    """
    config, loop, policy = run.config, run.loop, run.policy
    # `advantage_weights` takes Q and V: the advantage stands for both.
    device, nothing = loop.process.accelerator.device, torch.zeros_like(advantage)
    weight = actor_critic.advantage_weights(
        advantage, nothing, temperature=settings.temperature, largest=LARGEST_WEIGHT
    )
    alpha_bars = ddpm.cosine_alpha_bars(policy.train_steps if isinstance(policy, PredictsNoise) else 20)
    step = stepper(run, settings, loss)
    for _ in loop.iterations():
        loop.phase("training", settings.steps_per_iteration)
        meter = Meter()
        with loop.timed("train"):
            for _ in range(settings.steps_per_iteration):
                rng = generator(config.seed, "regression", loop.optimizer_steps)
                index = torch.randint(len(advantage), (settings.batch_size,), generator=rng)
                batch = take(data, index)
                actions, paid = batch.action.to(device), weight[index].to(device)
                recorded = recorded_chunks(policy, batch.observation, actions, alpha_bars, rng, paid)
                meter.note({"loss/policy": step(recorded)["loss"].item()})
                loop.advance(1)
        loop.finish(dict(figures) | meter.result() | {"lr": loop.lr})
