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

import rewards
from genrl.config.vla import VLAConfig
from genrl.mdp.noise import derive_seed
from genrl.runtime.recorded import Recorded
from genrl.vla import setup
from genrl.vla.methods.critics import Critics, train_iql
from genrl.vla.methods.offline import (
    Reader,
    Store,
    Transitions,
    Words,
    frames_of,
    successful,
)
from genrl.vla.methods.play import table_of
from genrl.vla.methods.regression import regress, weighted_cloning
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
from genrl.vla.methods.update import Figures
from genrl.vla.methods.wayward import wayward_data
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, rows, vocabulary
from genrl.vla.rollout.sampling import Acting
from genrl.vla.simulators.minitable import INSTRUCTIONS, render
from genrl.vla.simulators.minitable.task import task_numbers
from rewards.placing import open_reward
from rewards.service.remote import Outage

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

CANDIDATES = 10
"""Pairs that are looked at for each that is asked about."""


def new_policy(config: VLAConfig) -> Any:
    """A policy for the data, with weights by the seed."""
    assert isinstance(config.trainer, RLVLMF) and config.policy.new is not None
    words = vocabulary([INSTRUCTIONS[number] for number in task_numbers(config.environment.tasks or ())])
    data = unlabelled(config, config.trainer, Words(words), config.policy.new.horizon)
    return setup.new_policy(config, frames_of(data), words)


def unlabelled(config: VLAConfig, settings: RLVLMF, reads: Reader, horizon: int) -> Transitions:
    """Rewards, success and ends are in the transitions (for figures); nothing here that learns reads them."""
    gamma = settings.critics.gamma
    return wayward_data(config, reads, horizon, episodes=settings.episodes, right=settings.right, gamma=gamma)


def pictures(observation: Batch, size: int) -> Tensor:
    """What the table looked like, uint8 [N, S, S, 3], from the numbers in an observation."""
    numbers = torch.cat([observation[STATE], observation[ENVIRONMENT]], 1).numpy()
    return torch.from_numpy(render(table_of(numbers), size))


def instructions(observation: Batch, reads: Reader) -> list[str]:
    """The instruction of each row, found again from its tokens."""
    known = {}
    for line in INSTRUCTIONS:
        try:
            known[tuple(reads.tokenise([line])[0].tolist())] = line
        except ValueError:  # the policy has not learned its words, so it is in no row either
            continue
    return [known[tuple(int(n) for n in row if n)] for row in observation[TOKENS].tolist()]


def learn_rewards(
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
    judge = open_reward(
        settings.judge,
        settings.args,
        device=device,
        remote=settings.remote,
        outage=Outage(**settings.outage.model_dump()),
    )
    frames, found = data.next_observation, {}
    kept, labels = Pairs(*(torch.zeros(0, dtype=torch.int64) for _ in range(2))), torch.zeros(0, dtype=torch.int64)
    try:
        for number in range(settings.rounds):
            wanted = settings.pairs if number == 0 or settings.select == "uniform" else CANDIDATES * settings.pairs
            candidates = draw_pairs(lines, wanted, seed=seed, round_number=number)
            how = "uniform" if number == 0 else settings.select  # before the first labels there is nothing to go by
            pairs = choose(ensemble, frames, candidates, settings.pairs, how)
            told = label_pairs(
                judge,
                lambda asked: pictures(rows(frames, asked), settings.image_size),
                lines,
                pairs,
                cache,
                margin=settings.margin,
                batch_size=settings.batch_size,
                advance=advance,
            )
            kept = Pairs(*(torch.cat(both) for both in zip(kept, pairs, strict=True)))
            labels = torch.cat([labels, told])
            figures = Figures()
            for row in train_rewards(
                ensemble, frames, kept, labels, steps=settings.steps, seed=derive_seed(seed, "round", number)
            ):
                figures.add({f"labels/{name}": value for name, value in row.items()})
            found = figures.means
    finally:
        rewards.close(judge)
    unusable = float((labels == UNUSABLE).float().mean())
    found |= {"labels/pairs": float(len(labels)), "labels/dropped": float((labels < 0).float().mean())}
    return found | {"labels/unusable": unusable}


def train(run: VLARun, settings: RLVLMF) -> None:
    """Labels, rewards and critics once; then iterations of advantage-weighted regression."""
    config, loop, policy = run.config, run.loop, run.policy
    device, data = loop.process.accelerator.device, unlabelled(config, settings, policy, policy.horizon)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "critics") % 2**32)
        inputs, stats = policy.config.inputs, policy.stats
        ensemble = RewardEnsemble(inputs, stats).to(device)
        critics = Critics(inputs, stats, policy.horizon * policy.action_dim).to(device)
    store = Store(rewards=ensemble, critics=critics)
    loop.keep("rl_vlm_f", store, changes=False)
    if not store.ready:
        asked = settings.labels
        loop.phase("labelling", asked.rounds * asked.pairs)
        path = loop.process.run.folder / "labels.jsonl" if asked.cache is None else Path(asked.cache)
        cache = LabelCache(path, _name(asked))
        lines = instructions(data.next_observation, policy)
        found: dict[str, Any] = learn_rewards(
            ensemble, data, lines, asked, cache, seed=config.seed, device=str(device), advance=loop.advance_or_leave
        )
        found["labels/asked"] = float(cache.asked)
        labelled, learned = relabel(ensemble, data), Figures()
        loop.phase("learning critics", settings.critic_steps)
        for row in train_iql(critics, labelled, settings.critics, steps=settings.critic_steps, seed=config.seed):
            learned.add({f"critic/{name}": value for name, value in row.items()})
            loop.advance(1)
        won = successful(data)
        advantage = critics.advantage(data.observation, data.action).cpu()
        found |= learned.means | {"data/success_mean": float(data.success.sum()) / settings.episodes}
        found["data/advantage_gap"] = float(advantage[won].mean() - advantage[~won].mean())
        store.data = {"advantage": advantage, "figures": found}
        store.ready = True
    regress(run, settings, loss, data, store.data["advantage"], store.data["figures"])


def loss(settings: RLVLMF, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """Advantage-weighted regression of the policy on chunks of the data, []."""
    return {"loss": weighted_cloning(acting, given)}


def _name(settings: Labels) -> str:
    """What answers depend on besides the pictures."""
    return f"{settings.judge} {sorted(settings.args.items())} margin {settings.margin}"
