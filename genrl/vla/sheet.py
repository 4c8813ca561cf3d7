"""The sheet of a policy in simulation: what it is shown and told, whole episodes as films, and every dimension of
states and actions as it comes and as the policy reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.runtime.show.sheet import SHOWN, ContactSheet, Look, dimensions, score_text
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.spread import normalised
from genrl.vla.data.videos import Clip
from genrl.vla.evaluate import Judged, chunk
from genrl.vla.offline.transitions import Transitions
from genrl.vla.policies.policy import ACTION, IMAGE, IMAGES, Batch
from genrl.vla.rollout.rollout import ChunkRollout, episode_returns
from genrl.vla.rollout.sampling import Acting

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


def of_episodes(policy: Any, found: Judged, watched: Watched, imitated: Batch | None) -> ContactSheet:
    """The sheet of evaluated episodes. imitated: frames, whose numbers are then in the table: these are learnt."""
    looks = [Look(f"{found.lost} episodes were lost with their simulators", {})] if found.lost else []
    several = dist.is_initialized() and dist.get_world_size() > 1
    for k, instruction in enumerate(found.instruction[:SHOWN]):
        scores = {"success": str(found.success[k]) if found.measured else "not measured", "steps": str(found.steps[k])}
        scores["return"] = score_text(found.returns[k])
        pictures = []
        if not (found.lost or several):  # else the numbers of slots here and of episodes differ
            observation = {name: value[k] for name, value in watched.first.items() if name.startswith((IMAGE, IMAGES))}
            pictures = [(f"{name}, at the start", _chw(value)) for name, value in observation.items()]
        if len(found.clips) == len(found.instruction):  # else some were chosen
            pictures.append(("film", _chw(torch.from_numpy(np.array(found.clips[k].frames)))))
        looks.append(Look(instruction or "(no instruction)", scores, pictures))
    raw = imitated or watched.frames
    numbers = normalised(policy, raw)
    flat = {name: raw[name].flatten(0, -2) for name in numbers if name != ACTION} | {ACTION: raw[ACTION][:, 0]}
    return ContactSheet(looks, dimensions(flat, numbers))


def of_decisions(policy: Any, played: Transitions) -> ContactSheet:
    """The sheet of whole episodes that were recorded by their decisions, as methods with costs play them."""
    numbers, place = played.episode.unique(return_inverse=True)

    def total(values: Tensor) -> list[float]:
        return torch.zeros(len(numbers)).index_add(0, place, values.float()).tolist()

    won, steps = [one > 0 for one in total(played.success)], [int(one) for one in total(played.n_executed)]
    found = Judged([f"cost {cost:g}" for cost in total(played.cost)], won, steps, total(played.reward), [])
    watched = Watched()
    watched.frames = {k: v for k, v in played.observation.items() if v.is_floating_point()}
    watched.frames[ACTION] = played.action[:, :1]
    return of_episodes(policy, found, watched, None)


@torch.no_grad()
def of_rollout(who: Acting, rollout: ChunkRollout, config: VLAConfig) -> ContactSheet:
    """The sheet of an iteration's first episodes, of a run without evaluation: what was seen, and what the policy does
    there without exploration."""
    first = rollout.valid & (rollout.episode == 0)
    slots = first.any(0).nonzero()[:SHOWN, 0].tolist()  # of the others the episode was lost with its simulator
    won, returns = (rollout.success & first).any(0), episode_returns(rollout)
    steps = (rollout.n_executed * first).sum(0)
    columns = [[values[slot].item() for slot in slots] for values in (won, steps, returns)]
    said = [rollout.instruction[slot] for slot in slots]
    films = [value[:-1] for name, value in rollout.observations.items() if name.startswith((IMAGE, IMAGES))][:1]
    clips = [
        Clip(film[first[:, slot], slot, ..., :3].numpy(), text, flag)
        for film in films
        for slot, text, flag in zip(slots, said, columns[0], strict=True)
    ]
    watched = Watched()
    watched.first = {name: value[0, slots] for name, value in rollout.observations.items()}
    for t in range(min(len(first), DECISIONS)):
        if first[t].any():
            seen = {name: value[t, first[t]] for name, value in rollout.observations.items()}
            shape = len(seen[next(iter(seen))]), who.policy.horizon, who.policy.action_dim
            watched(seen, chunk(who, seen, torch.randn(shape, generator=generator(config.seed, "sheet", t))))
    judged = Judged(said, *columns, clips).of(config.environment.success_key)
    return of_episodes(who.policy, judged, watched, None)


def _chw(picture: Tensor) -> Tensor:
    """[..., H, W, 3] uint8 as [..., 3, H, W] in [0, 1]."""
    return picture[..., :3].movedim(-1, -3).float() / 255
