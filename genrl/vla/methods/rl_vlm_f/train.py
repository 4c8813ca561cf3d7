"""RL-VLM-F on offline data: rewards from preferences over pictures, then implicit Q-learning (arXiv 2411.05273).

The data have no rewards. A judge compares pictures of them (`preference_labels`), an ensemble learns what it prefers,
every transition gets that reward, IQL learns critics, and the policy is regressed on the data's actions with weights
that grow with their advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import genrl_rewards
from genrl.mdp.noise import derive_seed, seeded
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import World, world_of
from genrl.vla.methods.rl_vlm_f.preference_labels import (
    UNUSABLE,
    LabelCache,
    Pairs,
    RewardEnsemble,
    choose,
    draw_pairs,
    label_pairs,
    relabel,
    train_rewards,
)
from genrl.vla.methods.rl_vlm_f.settings import RLVLMF, Labels
from genrl.vla.offline.critics import Critics, advantage_of, regress, wayward_data, weighted_cloning
from genrl.vla.offline.critics import new_policy as new_regressed
from genrl.vla.offline.transitions import Store, Transitions
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, rows
from genrl.vla.rollout.sampling import Acting
from genrl_rewards.placing import open_reward
from genrl_rewards.service.remote import Outage

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

CANDIDATES = 10
"""Pairs that are looked at for each that is asked about."""
RIGHT = 0.35
"""Share of the data's episodes in which the player does what it is told."""


def new_policy(config: VLAConfig) -> Any:
    """A policy for the data, with weights by the seed."""
    assert isinstance(config.trainer, RLVLMF)
    return new_regressed(config, config.trainer.episodes, RIGHT, (STATE, ENVIRONMENT, TOKENS))


def learn_rewards(
    world: World,
    ensemble: RewardEnsemble,
    data: Transitions,
    lines: list[str],
    settings: Labels,
    cache: LabelCache,
    *,
    seed: int,
    device: str = "cpu",
    advance: Callable[[int], None] = lambda pairs: None,
) -> dict[str, float]:
    """Rounds of asking and learning; the figures of the last one. device: of a judge that is loaded here."""
    outage = Outage(**settings.outage.model_dump())
    judge = open_reward(settings.judge, settings.args, device=device, remote=settings.remote, outage=outage)
    frames, figures = data.next_observation, Meter()
    labelled, labels = Pairs(*(torch.zeros(0, dtype=torch.int64) for _ in range(2))), torch.zeros(0, dtype=torch.int64)
    try:
        for number in range(settings.rounds):
            num_candidates = settings.pairs if number == 0 else CANDIDATES * settings.pairs
            pairs = draw_pairs(lines, num_candidates, seed=seed, round_number=number)
            if number:  # before the first labels there is nothing to go by
                pairs = choose(ensemble, frames, pairs, settings.pairs)
            answers = label_pairs(
                judge,
                lambda asked: world.pictures(rows(frames, asked), settings.image_size),
                lines,
                pairs,
                cache,
                margin=settings.margin,
                batch_size=settings.batch_size,
                advance=advance,
            )
            labelled = Pairs(*(torch.cat(both) for both in zip(labelled, pairs, strict=True)))
            labels = torch.cat([labels, answers])
            figures, round_seed = Meter(), derive_seed(seed, "round", number)
            for row in train_rewards(ensemble, frames, labelled, labels, steps=settings.steps, seed=round_seed):
                figures.note({f"labels/{name}": value for name, value in row.items()})
    finally:
        genrl_rewards.close(judge)
    shares = {"dropped": labels < 0, "unusable": labels == UNUSABLE}
    found = {f"labels/{name}": float(which.float().mean()) for name, which in shares.items()}
    return figures.result() | found | {"labels/pairs": float(len(labels))}


def train(run: VLARun, settings: RLVLMF) -> None:
    """Labels, rewards and critics once; then iterations of advantage-weighted regression."""
    config, loop, policy = run.config, run.loop, run.policy
    device, world = loop.process.accelerator.device, world_of(config)
    data = wayward_data(config, settings.episodes, RIGHT, policy, policy.horizon)
    with seeded(config.seed, "critics"):
        inputs, stats = policy.config.inputs, policy.stats
        ensemble = RewardEnsemble(inputs, stats).to(device)
        critics = Critics(inputs, stats, policy.horizon * policy.action_dim).to(device)
    store = Store(rewards=ensemble, critics=critics)
    loop.keep("rl_vlm_f", store, changes=False)
    if not store.ready:
        num_labels = settings.labels
        loop.phase("labelling", num_labels.rounds * num_labels.pairs)
        path = loop.process.run.folder / "labels.jsonl" if num_labels.cache is None else Path(num_labels.cache)
        # what answers depend on besides the pictures
        cache = LabelCache(path, f"{num_labels.judge} {sorted(num_labels.args.items())} margin {num_labels.margin}")
        lines = world.instructions(data.next_observation, policy)
        figures: dict[str, Any] = learn_rewards(
            world,
            ensemble,
            data,
            lines,
            num_labels,
            cache,
            seed=config.seed,
            device=str(device),
            advance=loop.advance_or_leave,
        )
        figures["labels/asked"] = float(cache.asked)
        # success is told to the figures alone
        paid = relabel(ensemble, data)
        advantage, learned = advantage_of(run, settings, critics, paid, "data/advantage_gap", batch_size=256)
        store.data = {"advantage": advantage, "figures": figures | learned}
        store.ready = True
    regress(run, settings, loss, data, store.data["advantage"], store.data["figures"])


def loss(settings: RLVLMF, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """Advantage-weighted regression of the policy on chunks of the data, []."""
    return {"loss": weighted_cloning(acting, given)}
