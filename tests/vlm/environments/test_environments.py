"""Environments of agents: the same for the same seed, words to actions, held-out episodes, what cannot be opened."""

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

from genrl.playground import grid
from genrl.playground.cards import GAMES
from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.contract import Environment as Contract
from genrl.vlm.environments.discrete import Misuse, Texts, named
from genrl.vlm.environments.hosts import open_environment


def opened(**options: Any) -> Contract:
    return open_environment(Environment(**options))


def say(word: str) -> str:
    return f'{{"thoughts": "so", "action": "{word}"}}'


TEXTS = [say(word) for word in ("left", "forward", "+", "-", "hit", "stand", "1", "right")]
TEXTS += ["nonsense", "<search> red circle </search>", "<bbox>[0,0,20,20]</bbox>", "<clip>[1,3]</clip>"]
EPISODES: list[tuple[str, dict[str, Any]]] = [
    *((f"cards-{game}", {}) for game in GAMES),
    *(("grid", {}), ("crop", {}), ("search", {}), ("FrozenLake-v1", {})),
    *(("watch", {"rule": "conan"}), ("watch", {"rule": "para_grpo", "budgets": [2, 8]})),
]


def played(name: str, options: dict[str, Any], seed: int) -> list[Any]:
    """Pictures and texts, rewards, ends and remarks of the same texts; the next seed where an episode ends."""
    one, result = opened(name=name, options=options), []
    step: Any = (one.reset(seed, "train"),)
    for text in np.random.default_rng(0).choice(TEXTS, 40):
        seen = [part if isinstance(part, str) else part.tobytes() for part in step[0]]  # type: ignore[union-attr]
        result.append((seen, *step[1:]))
        if any(step[2:4]):
            seed += 1
            one.reset(seed, "train")
        step = one.step(str(text))
    return result


@pytest.mark.parametrize(("name", "options"), EPISODES)
def test_an_episode_is_a_function_of_its_seed_and_what_is_said(name: str, options: dict[str, Any]) -> None:
    if name == "FrozenLake-v1":
        pytest.importorskip("pygame")
    first = played(name, options, 3)
    assert first == played(name, options, 3)
    assert name == "FrozenLake-v1" or first != played(name, options, 4)


def room_of(one: Contract, seed: int, split: Any = "train") -> grid.Grid:
    one.reset(seed, split)
    result: grid.Grid = one.env.unwrapped  # type: ignore[attr-defined]
    return result


class TestGrid:
    def test_the_planner_reaches_the_goal_of_held_out_rooms_and_is_paid_for_speed(self) -> None:
        one = opened()
        for seed in range(20):
            room = room_of(one, seed, "eval")
            assert grid.held_out(room.goal, room.blocks) and len(room.blocks) == 5
            steps, ended = room.ways()[room.pose], False
            for _ in range(steps):
                assert not ended
                _, reward, ended, _, info = one.step(say(room.action_words[room.shortest()[0]]))
            assert ended and info["success"] and reward == pytest.approx(1 - 0.9 * steps / 30)

    def test_the_picture_is_what_lies_before_the_agent(self) -> None:
        """At (row 2, column 1) of the room and looking down: what is right of it is on the left."""
        room = room_of(opened(), 0)
        room.blocks, room.goal, room.pose = frozenset({(3, 1), (2, 0)}), (4, 2), ((2, 1), 2)
        cells = room.view()
        assert cells.shape == (7, 7) and cells[6, 3] == grid.FLOOR
        assert (cells[5, 3], cells[6, 4], cells[4, 2]) == (grid.BLOCK, grid.BLOCK, grid.GOAL)
        assert (cells[:4] == grid.WALL).all() and (cells[4:, 5:] == grid.WALL).all()
        shown = room.seen()
        assert shown.shape == (56, 56, 3) and (shown[4 * 8 + 4, 2 * 8 + 4] == grid.COLOURS[grid.GOAL]).all()
        assert room.render().shape == (56, 56, 3)


class TestAnswersWithoutAnAction:
    def test_do_nothing_in_a_step_that_counts_and_costs(self) -> None:
        one = opened()
        room = room_of(one, 0)
        pose, shown = room.pose, room.seen()
        turns = [one.step("i do not know") for _ in range(30)]
        assert room.pose == pose and {reward for _, reward, *_ in turns} == {-0.05}
        assert [cut for *_, cut, _ in turns] == [False] * 29 + [True]
        assert all(info == {"valid": False, "success": False} for *_, info in turns)
        assert isinstance(turns[0][0][0], Image.Image) and (np.asarray(turns[0][0][0]) == shown).all()

    def test_or_are_random_actions(self) -> None:
        one, result = opened(invalid="random", invalid_reward=0.0), set()
        for seed in range(12):
            room = room_of(one, seed)
            room.blocks, room.goal, room.pose = frozenset(), (0, 0), ((3, 3), 1)
            _, reward, *_, info = one.step("i do not know")
            assert info["valid"] is False and reward == 0
            result.add(room.pose)
        assert len(result) == 3

    def test_doing_nothing_needs_a_limit_of_steps(self) -> None:
        with pytest.raises(Misuse, match="write environment.max_steps"):
            opened(name="Blackjack-v1")
        opened(name="Blackjack-v1", max_steps=3)
        opened(name="Blackjack-v1", invalid="random")


def test_words_become_actions() -> None:
    for text, answer, result in (
        ('{"thoughts": "x", "action": "left"}', "json", 0),
        ('so: {"thoughts":" right ","action":" UP "} and more', "json", 2),
        ('{"thoughts": "left"}', "json", None),
        ('{"action": 1}', "json", None),
        ('["left"]', "json", None),
        ('{"action": "left"', "json", None),
        ("left", "plain", 0),
        (" Pick Up ", "plain", 3),
        ("i go left now", "plain", 0),
        ("left or up", "plain", None),
        ("upwards", "plain", None),
        ("", "plain", None),
    ):
        assert named(text, ["left", "right", "up", "pick up"], answer) == (3 if text == " Pick Up " else result)


class Odd(gymnasium.Env[Any, Any]):
    """Shows nothing."""

    metadata = {"render_modes": ["ansi"]}
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)

    def reset(self, **options: Any) -> Any:
        return 0, {}

    def render(self) -> Any:
        return "text"


class TestRefused:
    def test_with_advice(self) -> None:
        for options, text in (
            ({"name": "gird"}, "did you mean grid"),
            ({"name": "Pendulum-v1"}, "cannot be named in words"),
            ({"name": "grid", "actions": ("a", "b")}, "has 3 actions"),
            ({"name": "grid", "actions": ("a", "b", "A")}, "two actions have one word"),
            ({"name": "nowhere.py:f"}, "there is no file"),
        ):
            with pytest.raises(ValueError, match=text):
                opened(**options)

    def test_no_words_and_no_picture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = gymnasium.envs.registration.EnvSpec("Odd-v0", entry_point=Odd)
        monkeypatch.setitem(gymnasium.registry, "Odd-v0", spec)
        with pytest.raises(Misuse, match="draws no pictures: its render modes are ansi"):
            opened(name="Odd-v0")
        monkeypatch.setattr(Odd, "metadata", {"render_modes": ["rgb_array"]})
        monkeypatch.setattr(Odd, "__init__", lambda self, render_mode=None: None)
        with pytest.raises(Misuse, match="write environment.actions"):
            opened(name="Odd-v0")
        one = opened(name="Odd-v0", actions=("a", "b"), max_steps=9)
        with pytest.raises(Misuse, match="has no picture"):
            one.reset(0, "train")


def test_an_environment_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n"
        "    layout, help, begun = 'steps', 'say yes', ''\n"
        "    def reset(self, seed, split): return ('well ?',)\n"
        "    def step(self, text): return ('done',), float(text == 'yes'), True, False, {'success': text == 'yes'}\n"
        "    def render(self): ...\n"
        "    def close(self): ...\n"
    )
    with caplog.at_level("INFO"):
        one = opened(name=f"{file}:Own")
    assert f"running the code of {file}" in caplog.text
    assert one.reset(0, "train") == ("well ?",) and one.step("yes")[1] == 1.0
    with pytest.raises(Misuse, match="did you mean Own"):
        opened(name=f"{file}:Owm")
    file.write_text("def half():\n    return object()\n")
    with pytest.raises(Misuse, match="without 'layout'"):
        opened(name=f"{file}:half")


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


class Browser(gymnasium.Env[Any, Any]):
    """BrowserGym's manner: a dictionary with screenshot, goal and tree; wrong actions are told in the observation."""

    action_space = spaces.Text(64)
    max_steps = 5

    def __init__(self) -> None:
        self.action_mapping = self.describe  # whose owner says what may be said

    def describe(self, with_long_description: bool) -> str:
        return "click(bid), fill(bid, value)"

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.seen(""), {}

    def seen(self, error: str) -> dict[str, Any]:
        screenshot = np.full((214, 332, 3), 7, np.uint8)
        return {"goal": "click it", "screenshot": screenshot, "axtree_object": {"n": 1}, "last_action_error": error}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = action == "click('13')"
        return self.seen("" if right else f"Error: {action}"), float(right), right, False, {}


def test_a_browser_shows_its_picture_goal_and_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("browsergym.utils.obs")
    module.flatten_axtree_to_str = lambda tree: f"[13] button, {tree['n']} of them"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "browsergym.utils.obs", module)
    one = Texts(Browser(), Environment(name="browsergym/miniwob.click-test", picture=96))
    assert one.help == "click(bid), fill(bid, value)"
    picture, text = one.reset(0, "train")
    assert isinstance(picture, Image.Image) and picture.size == (96, 96) and np.array(picture).min() == 7
    assert text == "click it\n[13] button, 1 of them"
    seen, paid, terminated, _, info = one.step("press('13')")
    assert (paid, terminated, info["valid"]) == (0.0, False, False) and "Error: press('13')" in str(seen[1])
    assert one.step("click('13')")[1:] == (1.0, True, False, {"valid": True, "success": True})


def test_what_cannot_be_opened_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Browser, "max_steps", None)
    with pytest.raises(Misuse, match="has no limit of steps: write environment.max_steps"):
        Texts(Browser(), Environment(name="browsergym/miniwob.click-test"))
    if importlib.util.find_spec("browsergym") is None:
        with pytest.raises(Misuse, match="pip install browsergym-miniwob"):
            open_environment(Environment(name="browsergym/miniwob.click-test"))
