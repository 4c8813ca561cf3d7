"""The recipe in which a language model writes a reward: what it is asked, when its code runs, that a run uses it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from genrl.config.plugins import import_file
from genrl.runtime.folder.run import read_metrics
from genrl.vlm.train import train
from tests.vlm.methods.episodes import agent_runs

GOOD = """Here it is:
```python
def reward(before, action, after):
    def far(room):
        (row, column), _ = room.pose
        return abs(row - room.goal[0]) + abs(column - room.goal[1])
    return float(far(before) - far(after)) + (5.0 if far(after) == 0 else 0.0)
```"""
RAISES = "```python\nprint('ran')\ndef reward(before, action, after):\n    return before.position[0]\n```"
NO_NUMBER = "```python\ndef reward(before, action, after):\n    return float('nan')\n```"


class Stub:
    """Answers what it is told to, and notes what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.left, self.asked = list(answers), []

    def answers(self, questions: list[list[str]], max_tokens: int) -> list[str]:
        self.asked += [text for (text,) in questions]
        return [self.left.pop(0) for _ in questions]


@pytest.fixture
def example(root: Path) -> ModuleType:
    return import_file(root / "docs" / "example_text2reward.py")


def test_code_runs_only_where_it_is_asked_for(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reward.py"
    assert example.write(file, "reach it", Stub(RAISES)) == ""
    assert "before.position" in file.read_text() and capsys.readouterr().out == ""
    assert "position" in example.check(file) and "ran" in capsys.readouterr().out


def test_errors_are_shown_to_the_model_until_the_code_works(example: Any, tmp_path: Path) -> None:
    file, stub = tmp_path / "reward.py", Stub(RAISES, NO_NUMBER, GOOD)
    assert example.write(file, "reach the square", stub, run=True) == ""
    assert "reach the square" in stub.asked[0] and "frozenset" in stub.asked[0] and "failed" not in stub.asked[0]
    assert "AttributeError" in stub.asked[1] and "nan, not a finite number" in stub.asked[2]
    assert example.check(file) == ""
    assert "not a finite" in example.write(file, "x", Stub(NO_NUMBER, NO_NUMBER), run=True, tries=2)


def test_the_code_cannot_move_the_agent(example: Any, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward(before, action, after):\n    after.pose = (after.goal, 0)\n    return 1.0\n")
    room = example.shaped(f"{file}:reward")
    room.reset(seed=3)
    where = room.room.pose
    _, paid, terminated, _, info = room.step(0)
    assert paid == 1.0 and room.room.pose[0] == where[0] and not terminated and not info["success"]


def test_a_run_is_paid_by_it(example: Any, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    example.write(file, "reach the green square", Stub(GOOD), run=True)
    place = {"name": f"{root / 'docs' / 'example_text2reward.py'}:shaped", "options": {"reward": f"{file}:reward"}}
    config = agent_runs.config(tmp_path, "vl_dac", environment={**place, "answer": "plain", "parallel": 4, "steps": 8})
    run = train(config)
    row = read_metrics(run / "metrics.jsonl")[-1]
    assert row["rollout/env_steps"] == 32.0
