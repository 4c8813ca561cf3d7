"""Tasks: questions with answers that a rule can check. Those built in draw pictures and need no download.

A task of your own is named by `task.name: path/file.py:Name`, or by an entry point of the group `genrl.tasks`. It is

- a function `(rng, split) -> Question`. rng is a numpy generator, seeded by the question's number, so that a question
  is a pure function of its task, its split and its number; split is "train" or "eval", and what is held out the task
  decides by it; or
- a class: `Name(split)` has a length, and `[number]` gives a `Question`; for questions that are read, not made.

`Question(parts, answer, level, columns)`: `parts` are texts and PIL images in the order in which the model gets them,
`answer` and `columns` are what rewards may ask for, and `level` grows with difficulty, for a curriculum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from genrl.config.plugins import find
from genrl.mdp.noise import derive_seed
from genrl.vlm.config.names import TASKS
from genrl.vlm.policies.processor import Prompt

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Row:
    """One question. `columns` are for the rewards; they have at least `answer`. `name` is its key, within its split."""

    name: str
    prompt: Prompt
    columns: dict[str, Any]


class Question(NamedTuple):
    """Texts and pictures in the order in which the model gets them, the expected answer, a number that grows with
    difficulty (for a curriculum), and further columns."""

    parts: tuple[str | Image.Image, ...]
    answer: str
    level: float
    columns: dict[str, Any] = {}


class Generated:
    """The questions of a task and a split: `[number]` gives a `Row`. Raises ValueError for an unknown task."""

    def __init__(self, task: str, split: Split) -> None:
        task_made: Any = find(task, TASKS)
        self.task, self.split = task, split
        self.read = task_made(split) if isinstance(task_made, type) else None
        self.make = task_made

    def number(self, wanted: int) -> int:
        """How many there are of so many: all where they are made, or those that are there to be read."""
        return wanted if self.read is None else min(wanted, len(self.read))

    def __getitem__(self, number: int) -> Row:
        """Raises ValueError for what is no question."""
        name = f"{self.task.rpartition(':')[2]}/{self.split}/{number}"
        rng = np.random.default_rng(derive_seed(name))
        row = self.make(rng, self.split) if self.read is None else self.read[number]
        if not isinstance(row, tuple) or len(row) not in (3, 4):
            kind = type(row).__name__
            raise ValueError(f"task {self.task} gives a {kind}; it must be a Question(parts, answer, level, columns)")
        question = Question(*row)
        text = " ".join(part for part in question.parts if isinstance(part, str))
        columns = {"answer": question.answer, "question": text, "level": float(question.level), **question.columns}
        return Row(name, Prompt(question.parts, where=name), columns)


def row(task: str, split: Split, number: int) -> Row:
    """The question of this number."""
    return Generated(task, split)[number]
