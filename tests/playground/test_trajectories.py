"""An expert's walks as an environment: what is paid, what stands in the history, when an episode ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.playground.grid import Grid
from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.discrete import Misuse
from genrl.vlm.environments.opening import open_environment

CLICK = {"action": "click", "box": [10, 20, 30, 60]}
ACTIONS: list[Any] = [CLICK, {"action": "type", "text": "7:30"}, "back", {"action": "wait"}]


def opened(**options: Any) -> Any:
    return open_environment(Environment(name="trajectories", options=options))


@pytest.fixture
def file(tmp_path: Path) -> str:
    steps = []
    for k, action in enumerate(ACTIONS):
        Image.new("RGB", (40, 80), (k * 20, 0, 0)).save(tmp_path / f"{k}.png")
        steps.append({"image": f"{k}.png", "action": action, "thought": f"thought {k}"})
    (tmp_path / "walks.jsonl").write_text(json.dumps({"instruction": "set the alarm", "steps": steps}) + "\n")
    return str(tmp_path / "walks.jsonl")


def texts(seen: Any) -> str:
    return " ".join(part for part in seen if isinstance(part, str))


def test_an_action_is_paid_by_form_kind_and_place(file: str) -> None:
    for text, paid, valid in [
        ('{"action": "click", "coordinate": [30, 20]}', 1.0, True),
        ('so {"thoughts": "x", "action": "Click", "coordinate": [31, 20]}', 0.5, True),
        ('{"action": "click"}', 0.5, True),
        ('{"action": "type", "text": "7:30"}', 0.1, True),
        ("click it", 0.0, False),
    ]:
        one = opened(train=file)
        one.reset(0, "train")
        _, reward, _, _, info = one.step(text)
        assert reward == pytest.approx(paid) and info["valid"] == valid and info["matched"] == (paid == 1.0)


def test_the_history_is_the_policys_own_and_patched_where_it_was_wrong(file: str) -> None:
    own = '{"thoughts": "mine", "action": "click", "coordinate": [12, 30]}'
    for patch, shown in (("action", '{"action": "type", "text": "7:30"}'), ("thought", "thought 1")):
        one = opened(train=file, patch=patch)
        first = one.reset(0, "train")
        assert texts(first) == "set the alarm" and first[0].getpixel((0, 0)) == (0, 0, 0)
        second = one.step(own)[0]
        assert own in texts(second) and second[0].getpixel((0, 0)) == (20, 0, 0)
        third, _, ended, _, info = one.step("nonsense")
        assert not ended and not info["matched"] and "nonsense" not in texts(third)
        assert own in texts(third) and shown in texts(third) and ("thought 1" in texts(third)) == (patch == "thought")
    one = opened(train=file, expert=True)
    one.reset(0, "train")
    assert "mine" not in texts(one.step(own)[0])  # plain offline training
    one = opened(train=file, history=1)
    one.reset(0, "train")
    one.step(own)
    assert own not in texts(one.step("nonsense")[0])


def test_an_episode_ends_after_so_many_patches_or_with_the_walk(file: str) -> None:
    right = ['{"action": "click", "coordinate": [12, 30]}', '{"action": "type", "text": "7:30"}', '{"action": "back"}']
    for patches, split, length in ((0, "train", 1), (1, "train", 2), (None, "train", 4), (9, "eval", 1)):
        one = opened(train=file, patches=patches)
        one.reset(0, split)
        outcomes = [one.step("nonsense") for _ in range(length)]
        assert [outcome[2] for outcome in outcomes] == [False] * (length - 1) + [True]
        assert not outcomes[-1][4]["success"] and outcomes[-1][4]["parts"] == {"progress": 0.0}
    one = opened(train=file)
    one.reset(0, "eval")
    outcomes = [one.step(text) for text in [*right, '{"action": "wait"}']]
    assert outcomes[-1][2] and outcomes[-1][4]["success"] and outcomes[-1][4]["parts"] == {"progress": 1.0}


def test_without_a_file_a_planner_walks_in_training_and_other_held_out_rooms() -> None:
    one, rooms = opened(), {"train": set(), "eval": set()}
    for split in ("train", "eval"):
        for seed in range(20):
            one.reset(seed, split)
            assert 2 <= len(one.steps) <= 8
            rooms[split].add(one.steps[0].picture.tobytes())
            outcomes = [one.step(f"floor floor floor {step.action}") for step in list(one.steps)]
            assert outcomes[-1][2] and outcomes[-1][4]["success"]
            assert all(outcome[1] == pytest.approx(1.0) for outcome in outcomes)
    assert len(rooms["train"]) > 15 and Grid.action_words == one.words


def test_what_is_no_walk_is_explained(file: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for row, text in [
        ({"steps": []}, "row 1: no walk with instruction"),
        ({"instruction": "x", "steps": []}, "a walk needs a step"),
        ({"instruction": "x", "steps": [{"image": "9.png", "action": "a"}]}, "step 1: there is no picture"),
        ({"instruction": "x", "steps": [{"image": "0.png", "action": 3}]}, "step 1: 3 is no action"),
    ]:
        bad.write_text(json.dumps(row))
        with pytest.raises(Misuse, match=text):
            opened(train=str(bad))
    with pytest.raises(Misuse, match="eval is given without train"):
        opened(eval=file)
