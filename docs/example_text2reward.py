"""A language model writes the reward of an agent, after Text2Reward (arXiv 2309.11489).

    python docs/example_text2reward.py write reward.py "reach the green square, facing it early" --model NAME
    python docs/example_text2reward.py check reward.py     # runs the code; read the file before

NAME is a transformers causal language model, or, with --server http://host:port/v1, the name of one on an
OpenAI-compatible server. `write --run` checks at once and shows the model what went wrong, `--tries` times.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import gymnasium

from genrl.config.plugins import import_file
from genrl.playground.grid import Grid

STATE = '''class Room:
    """5 x 5 cells; rows count down, columns to the right, both from 0."""
    goal: tuple[int, int]                    # (row, column) of the green square
    blocks: frozenset[tuple[int, int]]       # cells that cannot be entered
    pose: tuple[tuple[int, int], int]        # ((row, column), facing): 0 up, 1 right, 2 down, 3 left
    elapsed: int                             # steps of the episode
    max_steps: int                           # after which it is cut
action: int                                  # 0 turns left, 1 turns right, 2 goes forward'''
ASK = """Write the reward of a step for reinforcement learning. The task: {task}
What can be read, as Python:
{state}
Write one function `reward(before, action, after)` with `before` and `after` of class Room, the room before and after
the step. It returns a finite float, larger where the step helps, and changes nothing. Imports inside of it are allowed
from math and numpy alone. Answer with the code in one ```python block."""
AGAIN = "\n\nYour last answer was:\n{code}\nIt failed: {error}\nWrite it again."


def code_in(answer: str) -> str:
    """The Python of an answer: its last block of code, or all of it."""
    blocks = re.findall(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
    return (blocks[-1] if blocks else answer).strip() + "\n"


def write(file: Path, task: str, model: Any, *, run: bool = False, tries: int = 3) -> str:
    """Have `model` (with `answers(questions, max_tokens)`) write the reward. run: execute it, and show the model its
    errors, so many times. Returns what is still wrong with it, "" where nothing is known to be."""
    question = ASK.format(task=task, state=STATE)
    error = ""
    for _ in range(tries if run else 1):
        code = code_in(model.answers([[question]], 1024)[0])
        file.write_text(f"# Written by a language model for the task: {task}\n{code}", encoding="utf-8")
        error = check(file) if run else ""
        if not error:
            break
        question = ASK.format(task=task, state=STATE) + AGAIN.format(code=code, error=error)
    return error


def check(file: Path) -> str:
    """Run `reward` of a file on all steps of some walks. What is wrong with it, "" where nothing is."""
    try:
        room = shaped(f"{file}:reward")
        for seed in range(4):
            room.reset(seed=seed)
            for step in range(12):
                room.step((0, 1, 2, 2)[(seed + step) % 4])
    except Exception as error:  # noqa: BLE001 - whatever it is, the model that wrote the code is told
        return f"{type(error).__name__}: {error}"
    return ""


class Shaped(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The built-in room with another reward. What counts as success stays the room's own."""

    def __init__(self, room: Grid, reward: Any) -> None:
        super().__init__(room)
        self.room, self.paid = room, reward

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = _state(self.room)
        seen, _, terminated, truncated, info = self.env.step(action)
        value = self.paid(before, action, _state(self.room))
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"reward({before}, {action}, ...) is {value!r}, not a finite number")
        return seen, float(value), terminated, truncated, info


def shaped(reward: str) -> Shaped:
    """For `environment: {name: docs/example_text2reward.py:shaped, options: {reward: file.py:reward}}`."""
    path, _, name = reward.rpartition(":")
    found = getattr(import_file(Path(path).resolve()), name, None)
    if not callable(found):
        raise ValueError(f"{path} has no function {name!r}")
    return Shaped(Grid(), found)


def _state(room: Grid) -> argparse.Namespace:
    """What the code may read, as a copy: it cannot move the agent."""
    names = ("goal", "blocks", "pose", "elapsed", "max_steps")
    return argparse.Namespace(**{name: getattr(room, name) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("task", nargs="?", default=Grid.mission)
    parser.add_argument("--model")
    parser.add_argument("--server")
    parser.add_argument("--run", action="store_true", help="execute what the model wrote")
    parser.add_argument("--tries", type=int, default=3)
    given = parser.parse_args()
    if given.what == "check":
        error = check(given.file)
    else:
        from genrl_rewards.scorers.texts.answerer import open_lm

        if given.model is None:
            parser.error("write needs --model")
        model = open_lm(given.model, given.server, "bfloat16", "cpu", "text2reward")
        error = write(given.file, given.task, model, run=given.run, tries=given.tries)
        if not given.run:
            print(f"{given.file} is written and was not run. Read it, then: check {given.file}")
    if error:
        raise SystemExit(f"{given.file}: {error}")


if __name__ == "__main__":
    main()
