"""Gymnasium environments with discrete actions, told in words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from genrl.vlm.environments.contract import Layout, Observation, Split

Answer = Literal["json", "plain"]
Invalid = Literal["noop", "random"]

SMALLEST = 32  # pixels a side: smaller arrays of three channels are codes of cells (MiniGrid), not pictures
SUCCESS = ("success", "is_success")
TOYS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "wait", "right"),
    "Acrobot": ("left", "wait", "right"),
}
"""Words of gymnasium's own environments, which have none."""


class Misuse(ValueError):
    """An environment that cannot be acted in by words and seen in pictures; says what to do."""


class Discrete:
    """A gymnasium environment as `contract.Environment`.

    words: one per action; None = the environment's own (`action_words`, or an enumeration `actions`, or `TOYS`).
    Pictures are its observations where these are pictures, else what it renders. success: info["success"] or
    ["is_success"]; where it has neither, an end with a positive reward. A text that names no action is paid
    `invalid_reward` more and does nothing, or (`invalid`) is a random action, a function of the seed and the step.
    Raises Misuse for what has no discrete actions, no words for them, or no picture, and, where nothing may be done,
    for what has no limit of steps.
    """

    layout: Layout = "steps"
    begun = ""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        name: str,
        words: Sequence[str] | None = None,
        instruction: str = "",
        answer: Answer = "json",
        picture: int | None = None,
        max_steps: int | None = None,
        invalid: Invalid = "noop",
        invalid_reward: float = -0.05,
    ) -> None:
        space = env.action_space
        if not isinstance(space, spaces.Discrete):
            raise Misuse(
                f"{name} takes actions of {space}, which cannot be named in words: take an environment with discrete "
                "actions, or write one of your own (path/file.py:function) that reads the text itself"
            )
        self.words = tuple(words or _own_words(env, name, int(space.n)))
        if len(self.words) != space.n:
            raise Misuse(f"{name} has {space.n} actions, and environment.actions has {len(self.words)} words for them")
        if len(set(map(str.casefold, self.words))) < len(self.words):
            raise Misuse(f"{name}: two actions have one word: {', '.join(self.words)}; write environment.actions")
        self.env, self.name, self.instruction, self.answer = env, name, instruction, answer
        self.first, self.picture, self.max_steps = int(space.start), picture, max_steps or limit_of(env)
        if invalid == "noop" and self.max_steps is None:
            raise Misuse(
                f"{name} has no limit of steps, so an agent that names no action would never end: write "
                "environment.max_steps, or environment.invalid: random"
            )
        self.invalid, self.invalid_reward = invalid, invalid_reward
        form = 'answer {"thoughts": "...", "action": "..."}' if answer == "json" else "answer with one of them"
        self.help = f"actions: {', '.join(self.words)}. {form}"

    def reset(self, seed: int, split: Split) -> Observation:
        """See `contract.Environment`."""
        self.seed, self.elapsed = seed, 0
        self.raw, _ = self.env.reset(seed=seed, options={"split": split})
        return self._shown()

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. Raises ValueError for a reward that is not a number."""
        self.elapsed += 1
        chosen = named(text, self.words, self.answer)
        action, late = chosen, self.max_steps is not None and self.elapsed >= self.max_steps
        if action is None:
            if self.invalid == "noop":
                return self._shown(), self.invalid_reward, False, late, {"valid": False, "success": False}
            action = int(np.random.default_rng([self.seed, self.elapsed]).integers(len(self.words)))
        self.raw, paid, terminated, truncated, info = self.env.step(self.first + action)
        reward = float(paid) + (self.invalid_reward if chosen is None else 0.0)
        if not math.isfinite(reward):
            raise ValueError(
                f"{self.name} pays {reward} in step {self.elapsed} of the episode of seed {self.seed}, after the "
                f"action {self.words[action]!r}: rewards must be numbers"
            )
        told = [bool(info[key]) for key in SUCCESS if key in info]
        success = told[0] if told else bool(terminated) and float(paid) > 0
        cut = bool(truncated or late) and not terminated
        return self._shown(), reward, bool(terminated), cut, {"valid": chosen is not None, "success": success}

    def render(self) -> NDArray[np.uint8]:
        """See `contract.Environment`. Raises Misuse where it renders no picture."""
        drawn = np.asarray(self.env.render())
        if drawn.ndim != 3 or drawn.shape[2] != 3 or drawn.dtype != np.uint8:
            modes = ", ".join(self.env.metadata.get("render_modes") or []) or "none"
            raise Misuse(
                f"{self.name} has no picture: it renders {drawn.dtype} {list(drawn.shape)} (its render modes: {modes}),"
                " and a vision-language model needs uint8 [H, W, 3]; make it with render_mode='rgb_array'"
            )
        return drawn

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _shown(self) -> Observation:
        raw = self.raw
        seen = np.asarray(raw["image"]) if isinstance(raw, dict) and "image" in raw else raw
        drawn = seen if _is_picture(seen) else self.render()
        picture = Image.fromarray(np.asarray(drawn))
        if self.picture is not None and picture.size != (self.picture, self.picture):
            picture = picture.resize((self.picture, self.picture), Image.Resampling.BOX)
        mission = raw.get("mission", "") if isinstance(raw, dict) else ""
        text = self.instruction or mission or str(getattr(self.env.unwrapped, "mission", ""))
        return (picture, text) if text else (picture,)


def named(text: str, words: Sequence[str], answer: Answer) -> int | None:
    """The action that a text names, None where it names none.

    "json": "action" of the first JSON object in it. "plain": the text, or the only one of the words that stands in it.
    """
    places = {word.casefold(): place for place, word in enumerate(words)}
    if answer == "json":
        begin = text.find("{")
        try:
            found, _ = json.JSONDecoder().raw_decode(text[begin:]) if begin >= 0 else (None, 0)
        except ValueError:
            return None
        said = found.get("action") if isinstance(found, dict) else None
        return places.get(said.strip().casefold()) if isinstance(said, str) else None
    said = text.strip().casefold()
    if said in places:
        return places[said]
    inside = [word for word in places if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said)]
    return places[inside[0]] if len(inside) == 1 else None


def limit_of(env: gymnasium.Env[Any, Any]) -> int | None:
    """Steps after which an environment cuts an episode, where it says so."""
    registered = env.spec.max_episode_steps if env.spec is not None else None
    limit = registered or getattr(env.unwrapped, "max_steps", None)
    return limit if isinstance(limit, int) else None


def _own_words(env: gymnasium.Env[Any, Any], name: str, number: int) -> Sequence[str]:
    inner = env.unwrapped
    if hasattr(inner, "action_words"):
        return tuple(inner.action_words)
    if hasattr(inner, "actions") and hasattr(inner.actions, "__members__"):  # MiniGrid's enumeration
        return tuple(inner.actions.__members__)[:number]
    toy = TOYS.get(name.rpartition("/")[2].rpartition("-v")[0])
    if toy is None:
        raise Misuse(
            f"{name} has no words for its {number} actions: write environment.actions, one word each, in their order"
        )
    return toy


def _is_picture(seen: Any) -> bool:
    if not isinstance(seen, np.ndarray):
        return False
    return seen.ndim == 3 and seen.shape[2] == 3 and seen.dtype == np.uint8 and min(seen.shape[:2]) >= SMALLEST
