"""Environments of agents: the same for the same seed, words to actions, held-out episodes, what cannot be opened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from genrl.config.vlm_agents import Environment
from genrl.vlm.agents import crop, grid
from genrl.vlm.agents.contract import Environment as Contract
from genrl.vlm.agents.contract import Observation
from genrl.vlm.agents.discrete import Misuse, named
from genrl.vlm.agents.opening import open_environment


def opened(**options: Any) -> Contract:
    return open_environment(Environment(**options))


def say(word: str) -> str:
    return f'{{"thoughts": "so", "action": "{word}"}}'


def same(one: Observation, other: Observation) -> bool:
    pairs = [(a, b) if isinstance(a, str) else (a.tobytes(), b.tobytes()) for a, b in zip(one, other, strict=True)]  # type: ignore[union-attr]
    return all(a == b for a, b in pairs)


@pytest.mark.parametrize("name", ["grid", "crop", "FrozenLake-v1"])
def test_an_episode_is_a_function_of_its_seed_and_what_is_said(name: str) -> None:
    if name == "FrozenLake-v1":
        pytest.importorskip("pygame")
    texts = [say("left"), "nonsense", say("up"), "<bbox>[0,0,20,20]</bbox>", say("right")] * 2
    found = []
    for _ in range(2):
        one, steps = opened(name=name), []
        steps.append((one.reset(5, "train"), 0.0, False))
        for text in texts:
            seen, reward, terminated, truncated, info = one.step(text)
            steps.append((seen, reward, bool(info["valid"])))
            if terminated or truncated:
                break
        found.append(steps)
    assert len(found[0]) == len(found[1]) > 2
    for (seen, *told), (again, *told_again) in zip(*found, strict=True):
        assert same(seen, again) and told == told_again


def test_the_planner_reaches_the_goal_of_held_out_rooms_and_is_paid_for_speed() -> None:
    one = opened()
    for seed in range(20):
        one.reset(seed, "eval")
        room: grid.Grid = one.env.unwrapped  # type: ignore[attr-defined]
        assert grid.held_out(room.agent, room.goal)
        steps, ended = room.ways()[room.agent], False
        for _ in range(steps):
            assert not ended
            _, reward, ended, _, info = one.step(say(room.shortest()[0]))
        assert ended and info["success"] and reward == pytest.approx(1 - 0.9 * steps / 8)


def test_the_wrong_thing_ends_and_the_limit_cuts() -> None:
    one = opened()
    one.reset(0, "train")
    room: grid.Grid = one.env.unwrapped  # type: ignore[attr-defined]
    assert not grid.held_out(room.agent, room.goal)
    room.walls, room.agent, room.goal, room.other = frozenset(), (1, 0), (2, 2), (1, 1)
    room.kinds = {}
    _, reward, terminated, truncated, info = one.step(say("right"))
    assert (reward, terminated, truncated, info["success"]) == (-1.0, True, False, False)
    one.reset(1, "train")
    room.agent, room.goal, room.other, room.walls = (0, 0), (2, 2), (2, 1), frozenset()
    room.kinds = {}
    ends = [one.step(say("up"))[2:4] for _ in range(8)]
    assert ends == [(False, False)] * 7 + [(False, True)]


def test_an_answer_without_an_action_is_a_random_one_and_is_told() -> None:
    one, moves = opened(), set()
    for seed in range(12):
        one.reset(seed, "train")
        room: grid.Grid = one.env.unwrapped  # type: ignore[attr-defined]
        room.walls, room.agent, room.goal, room.other = frozenset(), (1, 1), (2, 2), (0, 0)
        _, _, _, _, info = one.step("i do not know")
        assert info["valid"] is False
        moves.add(room.agent)
    assert len(moves) > 1


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ('{"thoughts": "x", "action": "left"}', "json", 0),
        ('so: {"thoughts":" right ","action":" UP "} and more', "json", 2),
        ('{"thoughts": "left"}', "json", None),
        ('{"action": 1}', "json", None),
        ('["left"]', "json", None),
        ("left", "json", None),
        ('{"action": "left"', "json", None),
        ("left", "plain", 0),
        (" Pick Up ", "plain", 3),
        ("i go left now", "plain", 0),
        ("left or up", "plain", None),
        ("upwards", "plain", None),
        ("", "plain", None),
    ],
)
def test_words_become_actions(text: str, answer: Any, found: int | None) -> None:
    assert named(text, ["left", "right", "up", "pick up"], answer) == (3 if text == " Pick Up " else found)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30), st.sampled_from(["json", "plain"]))
def test_any_text_is_an_action_or_none(text: str, answer: Any) -> None:
    assert named(text, ["left", "right"], answer) in (None, 0, 1)


class TestCrop:
    def test_patterns_are_one_colour_in_what_is_shown_and_differ_in_a_part(self) -> None:
        things = {4: ("red", "square")}
        drawn = [crop.draw({cell: (kind, pattern) for cell, kind in things.items()}) for pattern in crop.PATTERNS]
        inside = (20, 20, 28, 28)  # of the shape, away from its edge
        small = [np.asarray(one.reduce(4).crop(inside)) for one in drawn]
        assert (
            all((pixels == small[0]).all() for pixels in small) and len(np.unique(small[0].reshape(-1, 3), axis=0)) == 1
        )
        large = [np.asarray(one.resize((48, 48), Image.Resampling.BOX, box=(64, 64, 128, 128)), int) for one in drawn]
        for a in range(4):
            for b in range(a):
                assert np.abs(large[a] - large[b]).mean() > 5

    def test_a_part_is_cut_from_the_large_picture_in_the_coordinates_of_the_small_one(self) -> None:
        one = opened(name="crop")
        assert isinstance(one, crop.Crop)
        one.reset(3, "train")
        seen, _, ended, _, info = one.step("<think> look </think> <bbox> [ 16 , 0 , 32 , 16 ] </bbox>")
        assert one.crops == [(64, 0, 128, 64)] and info["valid"] and not ended
        picture = seen[0]
        assert isinstance(picture, Image.Image)
        wanted = one.large.resize((48, 48), Image.Resampling.BOX, box=(64, 0, 128, 64))
        assert picture.tobytes() == wanted.tobytes()

    @pytest.mark.parametrize(
        "text", ["<bbox>[0,0,4,4]</bbox>", "<bbox>[1,2,3]</bbox>", "hello", "<bbox>[9,9,1,1]</bbox>"]
    )
    def test_what_cannot_be_done_is_explained(self, text: str) -> None:
        one = opened(name="crop")
        one.reset(3, "train")
        seen, reward, terminated, truncated, info = one.step(text)
        assert isinstance(seen[0], str) and "<bbox>" in seen[0]
        assert not info["valid"] and reward == 0 and not terminated and not truncated

    @pytest.mark.parametrize(("rule", "worth"), [("accuracy", 1.0), ("para_grpo", 1 + 1 + 0.8), ("vrag_rl", 1.0)])
    def test_a_right_answer_after_a_look_is_worth_all(self, rule: str, worth: float) -> None:
        one = opened(name="crop", options={"rule": rule})
        assert isinstance(one, crop.Crop)
        one.reset(7, "train")
        x, y = (round(value / 4) for value in one.middle)
        one.step(f"<think> i look closer </think> <bbox>[{x - 8},{y - 8},{x + 8},{y + 8}]</bbox>")
        _, reward, ended, _, info = one.step(f"<think> it is it </think> <answer> {one.answer} </answer>")
        assert ended and info["success"] and reward == pytest.approx(worth) and info["parts"]["looked"] == 1

    def test_the_last_turn_cuts_and_held_out_pictures_are_arranged_otherwise(self) -> None:
        one = opened(name="crop", options={"turns": 2})
        assert isinstance(one, crop.Crop)
        one.reset(1, "eval")
        assert crop.held_out(tuple(one.things))
        assert one.step("<bbox>[0,0,16,16]</bbox>")[2:4] == (False, False)
        assert one.step("<bbox>[0,0,16,16]</bbox>")[2:4] == (False, True)


class Odd(gymnasium.Env[Any, Any]):
    """Pays what it is told to; shows nothing."""

    metadata = {"render_modes": ["ansi"]}
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)

    def reset(self, **options: Any) -> Any:
        return 0, {}

    def step(self, action: int) -> Any:
        return np.zeros((40, 40, 3), np.uint8), float("nan"), False, False, {}

    def render(self) -> Any:
        return "text"


class Seen(Odd):
    def reset(self, **options: Any) -> Any:
        return np.zeros((40, 40, 3), np.uint8), {}


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"name": "gird"}, "did you mean grid"),
            ({"name": "FrozenLak-v1"}, "did you mean FrozenLake"),
            ({"name": "Pendulum-v1"}, "cannot be named in words"),
            ({"name": "grid", "options": {"limits": 3}}, "limits"),
            ({"name": "grid", "actions": ("a", "b")}, "has 4 actions"),
            ({"name": "grid", "actions": ("a", "b", "c", "A")}, "two actions have one word"),
            ({"name": "nowhere.py:f"}, "there is no file"),
            ({"name": "crop", "options": {"rule": "best"}}, "rule is accuracy"),
        ],
    )
    def test_with_advice(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            opened(**options)

    def test_an_extra_that_is_not_installed_says_how_to_get_it(self) -> None:
        if importlib.util.find_spec("minigrid"):
            pytest.skip("it is installed")
        with pytest.raises(Misuse, match=r"pip install 'genrl\[minigrid\]'"):
            opened(name="MiniGrid-Empty-5x5-v0")

    def test_no_words_no_picture_and_no_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, kind in (("Odd-v0", Odd), ("Seen-v0", Seen)):
            monkeypatch.setitem(gymnasium.registry, name, gymnasium.envs.registration.EnvSpec(name, entry_point=kind))
        with pytest.raises(Misuse, match="draws no pictures: its render modes are ansi"):
            opened(name="Odd-v0")
        monkeypatch.setattr(Odd, "metadata", {"render_modes": ["rgb_array"]})
        monkeypatch.setattr(Odd, "__init__", lambda self, render_mode=None: None)
        with pytest.raises(Misuse, match="write environment.actions"):
            opened(name="Odd-v0")
        one = opened(name="Odd-v0", actions=("a", "b"))
        with pytest.raises(Misuse, match="has no picture"):
            one.reset(0, "train")
        one = opened(name="Seen-v0", actions=("a", "b"))
        one.reset(0, "train")
        with pytest.raises(ValueError, match=r"pays nan in step 1 of the episode of seed 0.*'b'"):
            one.step(say("b"))


def test_minigrid_is_shown_from_the_agent() -> None:
    pytest.importorskip("minigrid")
    one = opened(name="MiniGrid-Empty-5x5-v0")
    picture, mission = one.reset(0, "train")
    assert isinstance(picture, Image.Image) and picture.size == (56, 56) and mission == "get to the green goal square"
    assert "left, right, forward" in one.help


def test_an_environment_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n"
        "    layout, help, begun = 'steps', 'say yes', ''\n"
        "    def reset(self, seed, split): return ('well ?',)\n"
        "    def step(self, text): return ('done',), float(text == 'yes'), True, False, {'success': text == 'yes'}\n"
        "    def render(self): ...\n"
        "    def close(self): ...\n"
    )
    one = opened(name=f"{file}:Own")
    assert one.reset(0, "train") == ("well ?",) and one.step("yes")[1] == 1.0
    with pytest.raises(Misuse, match="did you mean Own"):
        opened(name=f"{file}:Owm")
    file.write_text("def half():\n    return object()\n")
    with pytest.raises(Misuse, match="without 'layout'"):
        opened(name=f"{file}:half")
