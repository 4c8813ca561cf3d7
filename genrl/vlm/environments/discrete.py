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
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from genrl.data.rows import flag
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.environments.contract import Layout, Observation, Split
from genrl_rewards.pictures import check_pixels

Answer = Literal["json", "plain"]

SMALLEST = 32  # pixels a side: smaller arrays of three channels are codes of cells (MiniGrid), not pictures
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


class Worded:
    """A gymnasium environment told in words, as `contract.Environment`. success: the first of `success_keys` that is in
    its info; where it has none, an end with a positive reward."""

    layout: Layout = "steps"
    begun = ""
    success_keys: ClassVar[tuple[str, ...]] = ("success", "is_success")

    def __init__(self, env: gymnasium.Env[Any, Any], settings: Settings) -> None:
        self.env, self.settings, self.name = env, settings, settings.name
        self.max_steps = settings.max_steps or limit_of(env)

    @property
    def late(self) -> bool:
        """Whether the running step is the last one."""
        return self.max_steps is not None and self.elapsed >= self.max_steps

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _begun(self, seed: int, split: Split) -> tuple[Any, dict[str, Any]]:
        """Observation and info of the episode of this seed; `options` of the inner reset: `split`."""
        self.seed, self.elapsed = seed, 0
        return self.env.reset(seed=seed, options={"split": split})

    def _done(self, action: Any, said: str) -> tuple[Any, float, bool, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, success, info) of an action. ValueError for a reward that is no
        number."""
        raw, paid, terminated, truncated, info = self.env.step(action)
        if not math.isfinite(float(paid)):
            where = f"step {self.elapsed} of the episode of seed {self.seed}"
            raise ValueError(f"{self.name} pays {paid} in {where}, after {said!r}: rewards must be numbers")
        ended, cut = (flag(end, f"{self.name}: an end that step returns") for end in (terminated, truncated))
        outcomes = [flag(info[key], f"{self.name}: info[{key!r}]") for key in self.success_keys if key in info]
        success = outcomes[0] if outcomes else ended and float(paid) > 0
        # Not both: behind a cut the return would have gone on, behind an end it would not.
        return raw, float(paid), ended, (cut or self.late) and not ended, success, info


class Discrete(Worded):
    """One with discrete actions: a word each, those of `environment.actions`, else its own (`action_words`, or an
    enumeration `actions`, or `TOYS`).

    Pictures are its observations where these are pictures, else what it renders. A text that names no action is paid
    `invalid_reward` more and does nothing, or (`invalid`) is a random action, a function of the seed and the step.
    Raises Misuse for what has no discrete actions, no words for them, or no picture, and, where nothing may be done,
    for what has no limit of steps.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], settings: Settings) -> None:
        super().__init__(env, settings)
        name = self.name
        space = env.action_space
        if not isinstance(space, spaces.Discrete):
            raise Misuse(
                f"{name} takes actions of {space}, which cannot be named in words: take an environment with discrete "
                "actions, or write one of your own (path/file.py:function) that reads the text itself"
            )
        self.words = settings.actions or tuple(_own_words(env, name, int(space.n)))
        if len(self.words) != space.n:
            raise Misuse(f"{name} has {space.n} actions, and environment.actions has {len(self.words)} words for them")
        if len(set(map(str.casefold, self.words))) < len(self.words):
            raise Misuse(f"{name}: two actions have one word: {', '.join(self.words)}; write environment.actions")
        self.first = int(space.start)
        if settings.invalid == "noop" and self.max_steps is None:
            raise Misuse(
                f"{name} has no limit of steps, so an agent that names no action would never end: write "
                "environment.max_steps, or environment.invalid: random"
            )
        plain = settings.answer == "plain"
        form = "answer with one of them" if plain else 'answer {"thoughts": "...", "action": "..."}'
        self.help = f"actions: {', '.join(self.words)}. {form}"

    def reset(self, seed: int, split: Split) -> Observation:
        """See `contract.Environment`."""
        self.raw, _ = self._begun(seed, split)
        return self._shown()

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. Raises ValueError for a reward that is not a number."""
        self.elapsed += 1
        action, fine = named(text, self.words, self.settings.answer), self.settings.invalid_reward
        valid = action is not None
        if action is None:
            if self.settings.invalid == "noop":
                return self._shown(), fine, False, self.late, {"valid": False, "success": False}
            # keyed by episode and step, so that an episode that is played again goes the same way
            action = int(np.random.default_rng([self.seed, self.elapsed]).integers(len(self.words)))
        self.raw, reward, ended, cut, success, _ = self._done(self.first + action, self.words[action])
        return self._shown(), reward + (0.0 if valid else fine), ended, cut, {"valid": valid, "success": success}

    def render(self) -> NDArray[np.uint8]:
        """See `contract.Environment`. Raises Misuse where it renders no picture."""
        pixels = np.asarray(self.env.render())
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
            modes = ", ".join(self.env.metadata.get("render_modes") or []) or "none"
            raise Misuse(
                f"{self.name} has no picture: it renders {pixels.dtype} {list(pixels.shape)} (its render modes: "
                f"{modes}), and a vision-language model needs uint8 [H, W, 3]; make it with render_mode='rgb_array'"
            )
        return pixels

    def _shown(self) -> Observation:
        raw = self.raw
        seen = np.asarray(raw["image"]) if isinstance(raw, dict) and "image" in raw else raw
        frame = seen if _is_picture(seen) else self.render()
        picture = Image.fromarray(np.asarray(frame))
        side = self.settings.picture
        if side is not None and picture.size != (side, side):
            picture = picture.resize((side, side), Image.Resampling.BOX)
        mission = raw.get("mission", "") if isinstance(raw, dict) else ""
        text = self.settings.instruction or mission or str(getattr(self.env.unwrapped, "mission", ""))
        return (picture, text) if text else (picture,)


def named(text: str, words: Sequence[str], answer: Answer) -> int | None:
    """The action that a text names, None where it names none.

    "json": "action" of the first JSON object in it. "plain": the text, or the only one of the words that stands in it.
    """
    places = {word.casefold(): place for place, word in enumerate(words)}
    if answer == "json":
        begin = text.find("{")
        try:
            parsed, _ = json.JSONDecoder().raw_decode(text[begin:]) if begin >= 0 else (None, 0)
        except ValueError:
            return None
        said = parsed.get("action") if isinstance(parsed, dict) else None
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


class Texts(Worded):
    """One with texts as actions. An answer is the action as it stands, without space around it. Where the environment
    lists what may be said, another answer does nothing and is paid `invalid_reward`. Raises Misuse for no limit of
    steps."""

    success_keys: ClassVar[tuple[str, ...]] = (*Worded.success_keys, "won")

    def __init__(self, env: gymnasium.Env[Any, Any], settings: Settings) -> None:
        super().__init__(env, settings)
        if self.max_steps is None:
            raise Misuse(f"{self.name} has no limit of steps: write environment.max_steps")
        self.help = settings.instruction or _action_help(env) or "answer with one action"

    def reset(self, seed: int, split: Split) -> Observation:
        """See `contract.Environment`."""
        return self._shown(*self._begun(seed, split))

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. Raises ValueError for a reward that is not a number."""
        self.elapsed += 1
        answer = text.strip()
        if not answer or (self.commands and answer not in self.commands):
            return self.seen, self.settings.invalid_reward, False, self.late, {"valid": False, "success": False}
        raw, reward, ended, cut, success, info = self._done(answer, answer)
        valid = not (isinstance(raw, dict) and raw.get("last_action_error"))
        return self._shown(raw, info), reward, ended, cut, {"valid": valid, "success": success}

    def render(self) -> NDArray[np.uint8]:
        """See `contract.Environment`: the last picture, black where there are only texts."""
        return next((np.array(p) for p in self.seen if not isinstance(p, str)), np.zeros((64, 64, 3), np.uint8))

    def _shown(self, raw: Any, info: dict[str, Any]) -> Observation:
        self.commands = list(map(str, info.get(COMMANDS, ())))
        parts, texts = list[str | Image.Image](), [raw] if isinstance(raw, str) else []
        if isinstance(raw, dict):
            frame = next((raw[key] for key in PICTURES if key in raw), None)
            if frame is not None:
                picture = Image.fromarray(check_pixels(frame, f"{self.env}, a picture"))
                side = self.settings.picture
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
