"""RL-VLM-F on offline data: rewards from preferences over pictures, then implicit Q-learning (arXiv 2411.05273).

The data have no rewards. A judge compares pictures of them (`preference_labels`), an ensemble learns what it prefers,
every transition gets that reward, IQL learns critics, and the policy is regressed on the data's actions with weights
that grow with their advantage.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import rewards
from genrl.config.vla import VLAConfig
from genrl.mdp import ddpm
from genrl.mdp.noise import derive_seed, generator
from genrl.objectives.surrogates import iql
from genrl.runtime.recorded import Recorded
from genrl.vla import setup
from genrl.vla.methods.critics import Critics, train_iql
from genrl.vla.methods.offline import (
    Reader,
    Store,
    Transitions,
    Words,
    cloning_errors,
    frames_of,
    play,
    recorded_chunks,
    stepper,
    successful,
    take,
)
from genrl.vla.methods.rl_vlm_f.preference_labels import (
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
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, PredictsNoise, vocabulary
from genrl.vla.rollout.sampling import Acting
from genrl.vla.simulators.minitable import INSTRUCTIONS, MiniTable, State, expert_chunk, render
from genrl.vla.simulators.minitable.task import MAX_STEPS, task_numbers

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

CANDIDATES = 10
"""Pairs that are looked at for each that is asked about."""
NOISE = 0.3
"""Standard deviation of what is added to the moves of the player whose data are learned from."""
LARGEST_WEIGHT = 100.0
"""Bound of the weight of a data action in the policy's regression (IQL: 100)."""


def new_policy(config: VLAConfig) -> Any:
    """A policy for the data, with weights by the seed."""
    assert isinstance(config.trainer, RLVLMF) and config.policy.new is not None
    words = vocabulary([INSTRUCTIONS[number] for number in task_numbers(config.environment.tasks or ())])
    data = wayward_data(config, config.trainer, Words(words), config.policy.new.horizon)
    return setup.new_policy(config, frames_of(data), words)


def wayward_data(config: VLAConfig, settings: RLVLMF, reads: Reader, horizon: int) -> Transitions:
    """Unlabelled episodes of a player who does what it is told in a share `right` of them, and else something else.

    Rewards, success and ends are in the transitions (for figures); nothing here that learns reads them.
    """
    env = config.environment
    tasks = task_numbers(env.tasks or ())
    chunk, limit = env.chunk or horizon, env.max_steps or MAX_STEPS
    table = MiniTable(settings.episodes, tasks=tasks, image_size=0, chunk=chunk, max_steps=limit)
    seed = derive_seed(config.seed, "wayward")
    rng = np.random.default_rng([seed, 0])
    right, other = rng.random(settings.episodes) < settings.right, rng.integers(len(tasks), size=settings.episodes)

    def behave(observation: Batch, decision: int) -> Tensor:
        state = table.state
        chunk = expert_chunk(state._replace(task=np.where(right, state.task, np.array(tasks)[other])), horizon)
        noise = np.random.default_rng([seed, 1, decision]).normal(0.0, NOISE, chunk[..., :2].shape)
        chunk[..., :2] += noise.astype(np.float32)
        return torch.from_numpy(np.clip(chunk, -1.0, 1.0))

    decisions = -(-table.max_steps // table.chunk)
    gamma = settings.critics.gamma
    return play(table, behave, reads, decisions=decisions, seed=seed, gamma=gamma, one_episode=True)


def pictures(observation: Batch, size: int) -> Tensor:
    """What the table looked like, uint8 [N, S, S, 3], from the numbers in an observation."""
    gripper, discs = observation[STATE][:, :2].numpy(), observation[ENVIRONMENT].view(-1, 3, 2).numpy()
    nearest = np.linalg.norm(discs - gripper[:, None], axis=-1).argmin(1)
    held = np.where(observation[STATE][:, 2].numpy() > 0, nearest, -1)
    return torch.from_numpy(render(State(gripper, discs, held, np.zeros(len(held), dtype=np.int64)), size))


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
    images: Tensor,
    settings: Labels,
    cache: LabelCache,
    *,
    seed: int,
) -> dict[str, float]:
    """Rounds of asking and learning; the figures of the last one."""
    judge = rewards.load(settings.judge, settings.args)
    frames, found = data.next_observation, {}
    kept, labels = Pairs(*(torch.zeros(0, dtype=torch.int64) for _ in range(2))), torch.zeros(0, dtype=torch.int64)
    try:
        for number in range(settings.rounds):
            wanted = settings.pairs if number == 0 or settings.select == "uniform" else CANDIDATES * settings.pairs
            candidates = draw_pairs(lines, wanted, seed=seed, round_number=number)
            how = "uniform" if number == 0 else settings.select  # before the first labels there is nothing to go by
            pairs = choose(ensemble, frames, candidates, settings.pairs, how)
            told = label_pairs(judge, images, lines, pairs, cache, margin=settings.margin)
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
    return found | {"labels/pairs": float(len(labels)), "labels/dropped": float((labels < 0).float().mean())}


def train(run: VLARun, settings: RLVLMF) -> None:
    """Labels, rewards and critics once; then iterations of advantage-weighted regression."""
    config, loop, policy = run.config, run.loop, run.policy
    device, data = loop.process.accelerator.device, wayward_data(config, settings, policy, policy.horizon)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "critics") % 2**32)
        inputs, stats = policy.config.inputs, policy.stats
        ensemble = RewardEnsemble(inputs, stats).to(device)
        critics = Critics(inputs, stats, policy.horizon * policy.action_dim).to(device)
    store = Store(rewards=ensemble, critics=critics)
    loop.keep("rl_vlm_f", store, changes=False)
    if not store.ready:
        loop.phase("labelling")
        path = settings.labels.cache
        cache = LabelCache(
            loop.process.run.folder / "labels.jsonl" if path is None else Path(path), _name(settings.labels)
        )
        shown = data.next_observation
        images, lines = pictures(shown, settings.labels.image_size), instructions(shown, policy)
        found: dict[str, Any] = learn_rewards(ensemble, data, lines, images, settings.labels, cache, seed=config.seed)
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
    advantage, temperature = store.data["advantage"], settings.temperature
    nothing = torch.zeros_like(advantage)
    weight = iql.advantage_weights(advantage, nothing, temperature=temperature, largest=LARGEST_WEIGHT)
    alpha_bars = ddpm.cosine_alpha_bars(policy.train_steps if isinstance(policy, PredictsNoise) else 20)
    step = stepper(run, settings, loss)
    for _ in loop.iterations():
        loop.phase("training", settings.steps_per_iteration)
        figures = Figures()
        with loop.timed("train"):
            for _ in range(settings.steps_per_iteration):
                rng = generator(config.seed, "regression", loop.optimizer_steps)
                index = torch.randint(len(advantage), (settings.batch_size,), generator=rng)
                batch = take(data, index)
                actions, paid = batch.action.to(device), weight[index].to(device)
                recorded = recorded_chunks(policy, batch.observation, actions, alpha_bars, rng, paid)
                figures.add({"loss/policy": step(recorded)["loss"].item()})
                loop.advance(1)
        loop.finish(store.data["figures"] | figures.means | {"lr": loop.lr})


def loss(settings: RLVLMF, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """Advantage-weighted regression of the policy on chunks of the data, []."""
    return {"loss": (given["weight"] * cloning_errors(acting.policy, given)).mean()}


def _name(settings: Labels) -> str:
    """What answers depend on besides the pictures."""
    return f"{settings.judge} {sorted(settings.args.items())} margin {settings.margin}"
