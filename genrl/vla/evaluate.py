"""How good a policy is: seeded episodes without exploration, success per task with its interval, and films of some.

Their sheet: what the policy is shown and told, whole episodes as films, and every dimension of states and actions as it
comes and as the policy reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from genrl.mdp.noise import derive_seed, generator
from genrl.runtime.show.compare.statistics import wilson
from genrl.runtime.show.sheet import SHOWN, ContactSheet, Look, dimensions, score_text
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.frames import normalised
from genrl.vla.data.videos import Clip
from genrl.vla.policies.policy import ACTION, IMAGE, IMAGES, Batch, rows
from genrl.vla.rollout.collect import ChunkRollout, episode_returns, observe
from genrl.vla.rollout.sampling import Acting, Frozen
from genrl.vla.simulators.contract import Environment, Observation


def evaluation_episodes(seed: int, count: int, *, in_order: bool = False) -> NDArray[np.uint64]:
    """Numbers of `count` episodes, a function of the seed: consecutive, so that all tasks get (nearly) equally many.
    in_order: from 0 on, so that the listed starts of every task come one after the other."""
    first = 0 if in_order else derive_seed(seed, "evaluation")
    return np.uint64(first) + np.arange(count, dtype=np.uint64)


class Judged(NamedTuple):
    """E episodes that ran to their end: instruction, success, executed actions and return of each; clips of the first
    ones; beside them how many were lost with their simulator, and whether success was measured at all."""

    instruction: list[str]
    success: list[bool]
    steps: list[int]
    returns: list[float]
    clips: list[Clip]
    lost: int = 0
    measured: bool = True

    def joined(self, other: Judged) -> Judged:
        """Joins these episodes and then the others."""
        return Judged(
            self.instruction + other.instruction,
            self.success + other.success,
            self.steps + other.steps,
            self.returns + other.returns,
            self.clips + other.clips,
            self.lost + other.lost,
            self.measured and other.measured,
        )

    def of(self, success_key: str | None) -> Judged:
        """Figures for an environment with this key: without one nothing says whether an episode succeeded."""
        return self._replace(measured=success_key is not None or any(self.success))


@torch.no_grad()
def evaluate(
    who: Acting,
    env: Environment,
    *,
    episodes: int,
    seed: int,
    first: int = 0,
    abreast: int | None = None,
    clips: int = 0,
    advance: Callable[[int], None] = lambda done: None,
    watch: Callable[[Batch, Tensor], None] = lambda seen, actions: None,
) -> Judged:
    """`episodes` of them by `Sampler.act`, numbers first, first + 1, ... of the list that the seed makes.

    Their starts and initial noise depend on the number alone: neither on how many run side by side, nor on processes.
    An episode that a simulator lost is counted as lost, neither as a success nor as a failure. abreast: so many run
    side by side, None: as many as there are slots; other slots rest. clips: so many of them are filmed, a picture per
    decision, successes and failures. advance: called with 0 after every decision, then with the episodes of a round;
    watch: with what the policy reads of the running slots, and the robot's actions.
    """
    numbers = evaluation_episodes(seed, first + episodes, in_order=env.in_order)
    judged = Judged([], [], [], [], [])
    for begin in range(first, first + episodes, abreast or env.num_envs):
        end = min(begin + (abreast or env.num_envs), first + episodes)
        raw, _ = env.reset(seed=seed, options={"episodes": numbers[begin:end], "once": True})
        rngs = [generator(seed, "evaluation", number) for number in range(begin, end)]
        judged = judged.joined(_round(who, env, raw, rngs, max(clips - len(judged.clips), 0), advance, watch))
        advance(end - begin)
    return judged


def _round(
    who: Acting,
    env: Environment,
    raw: Observation,
    rngs: list[torch.Generator],
    films: int,
    advance: Callable[[int], None],
    watch: Callable[[Batch, Tensor], None],
) -> Judged:
    """One episode in each of the first slots, as many as there are generators."""
    policy, instruction, wanted = who.policy, list(env.task_description), len(rngs)
    running, success = np.arange(env.num_envs) < wanted, np.zeros(env.num_envs, dtype=np.bool_)
    actions = np.zeros((env.num_envs, env.chunk, env.action_dim), dtype=np.float32)
    steps, returns = np.zeros(env.num_envs, dtype=np.int64), np.zeros(env.num_envs)
    lost = np.zeros(env.num_envs, dtype=np.bool_)
    filmed = list(range(min(4 * films, wanted)))  # to choose of: successes and failures
    pictures: list[list[NDArray[np.uint8]]] = [[] for _ in filmed]
    decision = 0
    while running.any():
        film(env, filmed, running, pictures)
        observation, here = observe(raw, env, policy, decision), np.flatnonzero(running)
        shape = policy.horizon, policy.action_dim
        # By each slot's own generator: an episode's noise does not depend on which others still run.
        noise = torch.stack([torch.randn(shape, generator=rngs[slot]) for slot in here])
        observation = rows(observation, torch.from_numpy(here))
        planned = chunk(who, observation, noise)[:, : env.chunk]
        watch(observation, planned)
        actions[here] = planned.cpu().numpy()
        raw, _, terminated, truncated, info = env.step(actions)
        success |= running & info["is_success"]
        lost |= running & info.get("dropped", False)
        steps += np.where(running, info["n_executed"], 0)
        returns += np.where(running, info["rewards"].sum(1), 0.0)
        ended = terminated | truncated
        # The last picture too, which shows whether it succeeded: the next step would show another episode.
        film(env, [slot for slot in filmed if ended[slot]], running, pictures)
        running &= ~ended
        decision += 1
        advance(0)
    clips = [
        Clip(np.stack(frames), instruction[slot], bool(success[slot]))
        for slot, frames in zip(filmed, pictures, strict=True)
        if not lost[slot]
    ]
    finished = [slot for slot in range(wanted) if not lost[slot]]
    columns = (
        [instruction[k] for k in finished],
        success[finished].tolist(),
        steps[finished].tolist(),
        returns[finished].tolist(),
    )
    return Judged(*columns, balanced(clips, films), wanted - len(finished))


def chunk(who: Acting, seen: Batch, noise: Tensor) -> Tensor:
    """Actions [B, H, A] of the robot without exploration, from noise [B, H, A]."""
    context = who.policy.encode(seen)
    before = None if who.frozen is None else Frozen(who.frozen, who.frozen.encode(seen))
    noise = noise.to(next(iter(context.values())).device)
    actions: Tensor = who.policy.actions(who.sampler.act(who.policy, context, noise, frozen=before))
    return actions


def balanced(clips: list[Clip], most: int) -> list[Clip]:
    """`most` of them, half successes and half failures as far as there are, in their order."""
    sides = [[clip for clip in clips if clip.success == flag] for flag in (True, False)]
    fewer = min(len(side) for side in sides)
    # The larger side fills up what the smaller one lacks.
    each = [max(most - fewer, most // 2) if len(side) > fewer else most - most // 2 for side in sides]
    chosen = {id(clip) for side, count in zip(sides, each, strict=True) for clip in side[:count]}
    return [clip for clip in clips if id(clip) in chosen][:most]


def film(env: Environment, slots: list[int], running: NDArray[np.bool_], pictures: list[list[Any]]) -> None:
    """Add a picture of each of these slots that still runs."""
    alive = [slot for slot in slots if running[slot]]
    if alive:
        for slot, picture in zip(alive, env.render(alive), strict=True):
            pictures[slot].append(picture)


def success_rates(judged: Judged) -> dict[str, float]:
    """Metrics: `eval/success_mean` with its 95 % Wilson interval, length, return, and success of each instruction;
    without success where nothing says it. Raises RuntimeError where every episode was lost."""
    if not judged.success:
        raise RuntimeError(
            f"all {judged.lost} episodes of the evaluation were lost with their simulators: none is judged"
        )
    row = {
        "eval/length_mean": sum(judged.steps) / len(judged.steps),
        "eval/return_mean": sum(judged.returns) / len(judged.returns),
        "eval/lost": float(judged.lost),
    }
    if not judged.measured:
        return row
    low, high = wilson(sum(judged.success), len(judged.success))
    row |= {
        "eval/success_mean": sum(judged.success) / len(judged.success),
        "eval/success_low": low,
        "eval/success_high": high,
    }
    return row | {f"eval/success/{slug(text)}": rate for text, (rate, _) in by_task(judged).items()}


def by_task(judged: Judged) -> dict[str, tuple[float, int]]:
    """Instruction -> (success rate, episodes), in alphabetical order."""
    rates = {}
    for text in sorted(set(judged.instruction)):
        outcomes = [flag for name, flag in zip(judged.instruction, judged.success, strict=True) if name == text]
        rates[text] = (sum(outcomes) / len(outcomes), len(outcomes))
    return rates


def slug(text: str) -> str:
    """An instruction as part of a metric's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


DECISIONS = 16
"""After so many the numbers of collected episodes are not shown: each costs a pass of the policy."""


class Watched:
    """What a policy was shown first, and the numbers of the first decisions; called as of `evaluate`."""

    def __init__(self) -> None:
        self.first: Batch = {}
        self.frames: Batch = {}

    def __call__(self, seen: Batch, actions: Tensor) -> None:
        self.first = self.first or seen
        if len(self.frames.get(ACTION, ())) < 1000:
            numbers = {name: value for name, value in seen.items() if value.is_floating_point()}
            now = numbers | {ACTION: actions[:, :1].cpu()}  # the first of a chunk is of what was seen
            self.frames = {name: torch.cat([self.frames[name], v]) if self.frames else v for name, v in now.items()}


def sheet_of(policy: Any, judged: Judged, watched: Watched, imitated: Batch | None) -> ContactSheet:
    """The sheet of evaluated episodes. imitated: frames, whose numbers are then in the table: these are learnt."""
    looks = [Look(f"{judged.lost} episodes were lost with their simulators", {})] if judged.lost else []
    several = dist.is_initialized() and dist.get_world_size() > 1
    for k, instruction in enumerate(judged.instruction[:SHOWN]):
        scores = {"success": str(judged.success[k]) if judged.measured else "not measured"}
        scores |= {"steps": str(judged.steps[k]), "return": score_text(judged.returns[k])}
        pictures = []
        if not (judged.lost or several):  # else the numbers of slots here and of episodes differ
            observation = {name: value[k] for name, value in watched.first.items() if name.startswith((IMAGE, IMAGES))}
            pictures = [(f"{name}, at the start", _chw(value)) for name, value in observation.items()]
        if len(judged.clips) == len(judged.instruction):  # else some were chosen
            pictures.append(("film", _chw(torch.from_numpy(np.array(judged.clips[k].frames)))))
        looks.append(Look(instruction or "(no instruction)", scores, pictures))
    raw = imitated or watched.frames
    if not raw:  # all were lost
        return ContactSheet(looks)
    numbers = normalised(policy, raw)
    flat = {name: raw[name].flatten(0, -2) for name in numbers if name != ACTION} | {ACTION: raw[ACTION][:, 0]}
    return ContactSheet(looks, dimensions(flat, numbers))


@torch.no_grad()
def sheet_of_rollout(who: Acting, rollout: ChunkRollout, config: VLAConfig) -> ContactSheet:
    """The sheet of an iteration's first episodes, of a run without evaluation: what was seen, and what the policy does
    there without exploration."""
    first = rollout.valid & (rollout.episode == 0)
    slots = first.any(0).nonzero()[:SHOWN, 0].tolist()  # of the others the episode was lost with its simulator
    won: list[bool] = (rollout.success & first).any(0)[slots].tolist()
    steps: list[int] = (rollout.n_executed * first).sum(0)[slots].tolist()
    said = [rollout.instruction[slot] for slot in slots]
    films = [value[:-1] for name, value in rollout.observations.items() if name.startswith((IMAGE, IMAGES))][:1]
    clips = [
        Clip(film[first[:, slot], slot, ..., :3].numpy(), text, flag)
        for film in films
        for slot, text, flag in zip(slots, said, won, strict=True)
    ]
    watched = Watched()
    watched.first = {name: value[0, slots] for name, value in rollout.observations.items()}
    for t in range(min(len(first), DECISIONS)):
        if first[t].any():
            seen = {name: value[t, first[t]] for name, value in rollout.observations.items()}
            shape = len(seen[next(iter(seen))]), who.policy.horizon, who.policy.action_dim
            watched(seen, chunk(who, seen, torch.randn(shape, generator=generator(config.seed, "sheet", t))))
    judged = Judged(said, won, steps, episode_returns(rollout)[slots].tolist(), clips).of(
        config.environment.success_key
    )
    return sheet_of(who.policy, judged, watched, None)


def _chw(picture: Tensor) -> Tensor:
    """[..., H, W, 3] uint8 as [..., 3, H, W] in [0, 1]."""
    return picture[..., :3].movedim(-1, -3).float() / 255
