"""Gymnasium environments whose actions are texts: BrowserGym's, and any other with such an action space.

What an observation shows: a text itself; or of a dictionary the picture (`screenshot` or `image`) and the texts `goal`,
`text` and `last_action_error`, and BrowserGym's accessibility tree. What may be said, if the environment lists it in
`info["admissible_commands"]`, is shown behind.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from genrl.vlm.environments.contract import Layout, Observation, Split
from genrl.vlm.environments.discrete import SUCCESS, Misuse, limit_of
from genrl_rewards.pictures import check_pixels

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
