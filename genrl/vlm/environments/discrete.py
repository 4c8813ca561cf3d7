"""Gymnasium environments told in words: with discrete actions, or with texts as actions, as BrowserGym's.

What an observation of the latter shows: a text itself; or of a dictionary the picture (`screenshot` or `image`) and the
texts `goal`, `text` and `last_action_error`, and BrowserGym's accessibility tree. What may be said, if the environment
lists it in `info["admissible_commands"]`, is shown behind.
"""

from __future__ import annotations

import importlib
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
from genrl_rewards.pictures import check_pixels

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


PICTURES = ("screenshot", "image")
TEXTS = ("goal", "text", "last_action_error")
COMMANDS = "admissible_commands"


def takes_texts(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether its actions are texts: gymnasium's Text, or a space of another class that samples or contains them."""
    space = env.action_space
    return isinstance(space, spaces.Text) or type(space).__name__ == "Unicode"


class Texts:
    """A gymnasium environment with texts as actions, as `contract.Environment`.

    An answer is the action as it stands, without space around it. Where the environment lists what may be said, another
    answer does nothing and is paid `invalid_reward`. success: info["success"], ["is_success"] or ["won"]; where it has
    none, an end with a positive reward. Raises Misuse for no limit of steps.
    """

    layout: Layout = "steps"
    begun = ""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        name: str,
        instruction: str = "",
        picture: int | None = None,
        max_steps: int | None = None,
        invalid_reward: float = -0.05,
    ) -> None:
        self.env, self.name, self.picture, self.invalid_reward = env, name, picture, invalid_reward
        self.max_steps = max_steps or limit_of(env)
        if self.max_steps is None:
            raise Misuse(f"{name} has no limit of steps: write environment.max_steps")
        self.help = instruction or _action_help(env) or "answer with one action"

    def reset(self, seed: int, split: Split) -> Observation:
        """See `contract.Environment`. `options` of the inner reset: `split`."""
        self.elapsed = 0
        raw, info = self.env.reset(seed=seed, options={"split": split})
        return self._shown(raw, info)

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. Raises ValueError for a reward that is not a number."""
        self.elapsed += 1
        late, said = self.elapsed >= (self.max_steps or 0), text.strip()
        if not said or (self.commands and said not in self.commands):
            return self.seen, self.invalid_reward, False, late, {"valid": False, "success": False}
        raw, paid, terminated, truncated, info = self.env.step(said)
        if not math.isfinite(float(paid)):
            raise ValueError(f"{self.name} pays {paid} in step {self.elapsed}, after {said!r}: rewards must be numbers")
        told = [bool(info[key]) for key in (*SUCCESS, "won") if key in info]
        success = told[0] if told else bool(terminated) and float(paid) > 0
        cut = bool(truncated or late) and not terminated
        valid = not (isinstance(raw, dict) and raw.get("last_action_error"))
        shown = self._shown(raw, info)
        return shown, float(paid), bool(terminated), cut, {"valid": valid, "success": success}

    def render(self) -> NDArray[np.uint8]:
        """See `contract.Environment`: the last picture, black where there are only texts."""
        return next((np.array(p) for p in self.seen if not isinstance(p, str)), np.zeros((64, 64, 3), np.uint8))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _shown(self, raw: Any, info: dict[str, Any]) -> Observation:
        self.commands = list(map(str, info.get(COMMANDS, ())))
        parts, texts = list[str | Image.Image](), [raw] if isinstance(raw, str) else []
        if isinstance(raw, dict):
            drawn = next((raw[key] for key in PICTURES if key in raw), None)
            if drawn is not None:
                picture = Image.fromarray(check_pixels(drawn, f"{self.env}, a picture"))
                side = self.picture
                parts.append(picture if side is None else picture.resize((side, side), Image.Resampling.BOX))
            texts = [str(raw[key]) for key in TEXTS if raw.get(key)]
            if "axtree_object" in raw:
                read: Any = importlib.import_module("browsergym.utils.obs")
                texts.append(read.flatten_axtree_to_str(raw["axtree_object"]))
        if self.commands:
            texts.append("you may say: " + ", ".join(self.commands))
        self.seen: Observation = (*parts, "\n".join(texts)) if texts else tuple(parts)
        if not self.seen:
            raise Misuse(
                f"{self.name} shows no text, and none of {', '.join((*PICTURES, *TEXTS))}, in its observations"
            )
        return self.seen


def _action_help(env: gymnasium.Env[Any, Any]) -> str:
    """BrowserGym's description of what may be said, where there is one."""
    owner: Any = getattr(getattr(env.unwrapped, "action_mapping", None), "__self__", None)
    return str(owner.describe(with_long_description=False)) if hasattr(owner, "describe") else ""
