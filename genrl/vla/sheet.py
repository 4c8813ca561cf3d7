"""The sheet of a policy in simulation: what it is shown and told, whole episodes as films, and every dimension of
states and actions as it comes and as the policy reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrl.runtime.show.pictures import Picture
from genrl.runtime.show.sheet import SHOWN, ContactSheet, Look, dimensions, score_text
from genrl.vla.data.spread import normalised
from genrl.vla.evaluate import Judged
from genrl.vla.policies.policy import ACTION, IMAGE, IMAGES, Batch
from genrl.vla.rollout.collect import policy_name
from genrl.vla.simulators.contract import Environment, Observation

LONGEST = 300
"""Decisions whose numbers are remembered."""


class Watched:
    """An environment that remembers what it showed first, and the numbers that it showed and was told."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.first: Observation = {}
        self.seen: list[Observation] = []
        self.actions: list[NDArray[np.float32]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **how: Any) -> Any:
        return self._noted(self.env.reset(**how))

    def step(self, actions: NDArray[np.float32]) -> Any:
        if len(self.actions) < LONGEST:
            self.actions.append(np.array(actions))
        return self._noted(self.env.step(actions))

    def _noted(self, outcome: Any) -> Any:
        raw: Observation = outcome[0]
        self.first = self.first or {name: np.array(value) for name, value in raw.items()}
        if len(self.seen) < LONGEST:
            numbers = {name: value for name, value in raw.items() if np.asarray(value).dtype.kind == "f"}
            self.seen.append({name: np.array(value) for name, value in numbers.items()})
        return outcome

    def frames(self) -> Batch:
        """Numbers of observations by the policy's names, and the actions, [F, ...]."""
        named = {name: policy_name(name) for name in self.seen[0]}
        joined = {own: np.concatenate([one[name] for one in self.seen]) for name, own in named.items() if own}
        actions = np.concatenate([one.reshape(-1, 1, one.shape[-1]) for one in self.actions])
        return {name: torch.from_numpy(value) for name, value in joined.items()} | {ACTION: torch.from_numpy(actions)}


def of_episodes(policy: Any, found: Judged, watched: Watched, frames: Batch | None) -> ContactSheet:
    """The sheet of evaluated episodes that were watched. frames: what is imitated, whose numbers are then in the table,
    for these are what is learnt."""
    first = {policy_name(name) or "": value for name, value in watched.first.items()}
    read = [name for name in policy.inputs if name.startswith((IMAGE, IMAGES)) and name in first]
    pictures = {name: torch.from_numpy(first[name]) for name in read}
    looks = []
    for k, instruction in enumerate(found.instruction[:SHOWN]):
        told = {"success": str(found.success[k]) if found.measured else "not measured", "steps": str(found.steps[k])}
        told["return"] = score_text(found.returns[k])
        seen: list[tuple[str, Picture]] = []
        if not found.lost:  # else the numbers of slots and of episodes differ
            seen = [(f"{name}, at the start", _chw(value[k])) for name, value in pictures.items()]
        if len(found.clips) == len(found.instruction):  # else some were chosen
            seen.append(("film", _chw(torch.from_numpy(np.array(found.clips[k].frames)))))
        looks.append(Look(instruction or "(no instruction)", told, seen))
    if found.lost:
        looks.append(Look(f"{found.lost} episodes were lost with their simulators", {}))
    raw = watched.frames() if frames is None else frames
    numbers = normalised(policy, raw)
    flat = {name: raw[name].flatten(0, -2) for name in numbers if name != ACTION} | {ACTION: raw[ACTION][:, 0]}
    return ContactSheet(looks, dimensions(flat, numbers))


def _chw(picture: Tensor) -> Tensor:
    """[..., H, W, 3] uint8 as [..., 3, H, W] in [0, 1]."""
    return picture[..., :3].movedim(-1, -3).float() / 255
