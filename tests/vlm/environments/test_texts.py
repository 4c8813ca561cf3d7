"""Environments that take texts, by stand-ins with the interfaces of BrowserGym and ALFWorld: the games are not here."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.discrete import Misuse, Texts
from genrl.vlm.environments.opening import open_environment

ENVIRONMENT = '''
import gymnasium
from gymnasium import spaces
class Kitchen(gymnasium.Env):
    """ALFWorld's manner: texts alone, and what may be said in the info."""
    action_space = spaces.Text(64)
    max_steps = 4
    def reset(self, *, seed=None, options=None):
        self.seed, self.open = seed, False
        return f"you are in kitchen {seed} of {options['split']}", {"admissible_commands": ["open fridge", "look"]}
    def step(self, action):
        self.open = self.open or action == "open fridge"
        won = self.open and action == "take apple"
        may = ["take apple", "look"] if self.open else ["open fridge", "look"]
        return f"you {action}", float(won), won, False, {"admissible_commands": may, "won": won}
def make():
    return Kitchen()
'''


def test_what_may_be_said_is_shown_and_other_texts_do_nothing(tmp_path: Path) -> None:
    (tmp_path / "kitchen.py").write_text(ENVIRONMENT)
    one = open_environment(Environment(name=f"{tmp_path / 'kitchen.py'}:make", instruction="take the apple"))
    assert isinstance(one, Texts) and one.help == "take the apple"
    assert one.reset(3, "eval") == ("you are in kitchen 3 of eval\nyou may say: open fridge, look",)
    assert one.step("take apple")[1:] == (-0.05, False, False, {"valid": False, "success": False})
    seen, paid, *_ = one.step(" open fridge\n")
    assert seen == ("you open fridge\nyou may say: take apple, look",) and paid == 0.0
    assert one.step("take apple")[1:] == (1.0, True, False, {"valid": True, "success": True})
    one.reset(3, "train")
    assert [one.step("look")[3] for _ in range(4)] == [False, False, False, True]
    assert one.render().shape == (64, 64, 3)


class Unicode(spaces.Space[str]):
    """BrowserGym's own space, by name."""


class Actions:
    def describe(self, with_long_description: bool = True) -> str:
        return "click(bid), fill(bid, value)"

    def to_python_code(self, action: str) -> str:
        return action


class Browser(gymnasium.Env[Any, Any]):
    """BrowserGym's manner: a dictionary with screenshot, goal and tree; wrong actions are told in the observation."""

    action_space = Unicode()
    max_steps = 5

    def __init__(self) -> None:
        self.action_mapping = Actions().to_python_code

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.seen(""), {"task_info": {}}

    def seen(self, error: str) -> dict[str, Any]:
        screenshot = np.full((214, 332, 3), 7, np.uint8)
        return {"goal": "click it", "screenshot": screenshot, "axtree_object": {"n": 1}, "last_action_error": error}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = action == "click('13')"
        return self.seen("" if right else f"Error: {action}"), float(right), right, False, {"task_info": {}}


def test_a_browser_shows_its_picture_goal_and_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("browsergym.utils.obs")
    module.flatten_axtree_to_str = lambda tree: f"[13] button, {tree['n']} of them"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "browsergym.utils.obs", module)
    one = Texts(Browser(), name="browsergym/miniwob.click-test", picture=96)
    assert one.help == "click(bid), fill(bid, value)"
    picture, text = one.reset(0, "train")
    assert isinstance(picture, Image.Image) and picture.size == (96, 96) and np.array(picture).min() == 7
    assert text == "click it\n[13] button, 1 of them"
    seen, paid, terminated, _, info = one.step("press('13')")
    assert (paid, terminated, info["valid"]) == (0.0, False, False) and "Error: press('13')" in str(seen[1])
    assert one.step("click('13')")[1:] == (1.0, True, False, {"valid": True, "success": True})


def test_what_cannot_be_opened_says_what_to_do() -> None:
    unlimited = Browser()
    unlimited.max_steps = None  # type: ignore[assignment]
    with pytest.raises(Misuse, match="has no limit of steps: write environment.max_steps"):
        Texts(unlimited, name="browsergym/miniwob.click-test")
    if importlib.util.find_spec("browsergym") is None:
        with pytest.raises(Misuse, match="pip install browsergym-miniwob"):
            open_environment(Environment(name="browsergym/miniwob.click-test"))
