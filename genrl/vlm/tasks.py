"""Tasks: questions with answers that a rule can check. Those built in draw pictures and need no download.

A task of your own is named by `task.name: path/file.py:Name`, or by an entry point of the group `genrl.tasks`. It is

- a function `(rng, split) -> Question`. rng is a numpy generator, seeded by the question's number, so that a question
  is a pure function of its task, its split and its number; split is "train" or "eval", and what is held out the task
  decides by it; or
- a class: `Name(split)` has a length, and `[number]` gives a `Question`; for questions that are read, not made.

`Question(parts, answer, level, columns)`: `parts` are texts and PIL images in the order in which the model gets them,
`answer` and `columns` are what rewards may ask for, and `level` grows with difficulty, for a curriculum.

A format of published data sets is a function from a row, a mapping of its columns with decoded pictures, to the columns
of a question: those that `task.prompt` and `task.image` name (`prompt`, `image`), and those that the rewards ask for.
One of your own is named by `task.format: path/file.py:name`, or by an entry point of the group `genrl.formats`. The
names and kinds of the columns are those of the data sets' cards; how a question is worded is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from genrl.config.plugins import find
from genrl.mdp.noise import derive_seed
from genrl.vlm.config.names import TASKS
from genrl.vlm.policies.processor import Prompt
from genrl_rewards.scorers.texts.expected import letters_in
from genrl_rewards.scorers.texts.verifiable import answer_in

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


Columns = dict[str, Any]


def lettered(question: str, options: Sequence[str]) -> str:
    """The question, and below it the options as A, B, C ..."""
    listed = (f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
    return "\n".join([question, *listed])


def clevr(row: Mapping[str, Any]) -> Columns:
    """leonardPKU/clevr_cogen_a_train (R1-V): `image`, `problem`, `solution` = "<answer> 3 </answer>"."""
    return {"prompt": row["problem"], "image": row["image"], "answer": answer_in(row["solution"]) or ""}


def scienceqa(row: Mapping[str, Any]) -> Columns:
    """derek-thomas/ScienceQA: `image` or none, `question`, `hint`, `choices`, `answer` = number of the right choice."""
    question = f"{row['hint']}\n{row['question']}" if row["hint"] else row["question"]
    answer = ascii_uppercase[row["answer"]]
    return {"prompt": lettered(question, row["choices"]), "image": row["image"], "answer": answer}


def mathvista(row: Mapping[str, Any]) -> Columns:
    """AI4Math/MathVista: `decoded_image`, `question`, `unit` or none, `choices` or none, `answer`, which is one of the
    choices, as text, or a number. The column `options` is for the reward `math_or_choice`."""
    options, answer = list(row["choices"] or ()), row["answer"] or ""
    question = f"{row['question']} (Unit: {row['unit']})" if row["unit"] else row["question"]
    if options and answer:
        answer = ascii_uppercase[options.index(answer)]
    return {
        "prompt": lettered(question, options),
        "image": row["decoded_image"],
        "answer": answer,
        "options": options,
    }


def refcoco(row: Mapping[str, Any]) -> Columns:
    """lmms-lab/RefCOCO, RefCOCOplus and RefCOCOg: `image`, `answer` = expressions, of which the first is asked for, and
    `bbox` = [left, top, width, height] in pixels. `box`: [left, top, right, bottom] in thousandths of the picture."""
    width, height = row["image"].size
    left, top, wide, high = row["bbox"]
    corners = (left / width, top / height, (left + wide) / width, (top + high) / height)
    question = f"Give the box of: {row['answer'][0]}. Write [left, top, right, bottom], each from 0 to 1000."
    return {"prompt": question, "image": row["image"], "box": [round(1000 * value) for value in corners]}


def chartqa(row: Mapping[str, Any]) -> Columns:
    """HuggingFaceM4/ChartQA: `image`, `query`, `label` = a list with the answer."""
    return {"prompt": row["query"], "image": row["image"], "answer": row["label"][0]}


def docvqa(row: Mapping[str, Any]) -> Columns:
    """lmms-lab/DocVQA: `image`, `question`, `answers` = a list, none in the split test."""
    return {"prompt": row["question"], "image": row["image"], "answer": list(row["answers"] or ())}


NOT = {"did": "didn't", "does": "doesn't", "do": "don't", "is": "isn't", "are": "aren't", "was": "wasn't"}
NOT |= {"were": "weren't", "would": "wouldn't", "will": "won't"}


def negated(question: str) -> str | None:
    """The question with a `not` in its first or second word, as in "What didn't the person do ?", or None."""
    first, _, remainder = question.strip().partition(" ")
    second, _, others = remainder.partition(" ")
    if second.lower() in NOT:
        return f"{first} {NOT[second.lower()]} {others}"
    if first.lower() in NOT:
        word = NOT[first.lower()]
        return f"{word.capitalize() if first.istitle() else word} {remainder}"
    return f"{first} didn't happen {others}" if second.lower() == "happened" else None


def _unlettered(options: Sequence[str]) -> list[str]:
    """Options without the letters of their places, such as "(A) ", "A. " and "A: "."""
    pairs = zip(ascii_uppercase, options, strict=False)
    return [re.sub(rf"^\s*\(?{letter}[.:)]\s+", "", text) for letter, text in pairs]


def inversion(row: Mapping[str, Any]) -> Columns:
    """TW-GRPO's question-answer inversion (arXiv 2505.24718 and its `question_answer_inverse`) of rows with `question`
    or `problem`, `options`, and `answer` or `solution`, the letter of the right one. Other columns stay.

    Half of the rows, drawn by their texts, are asked by `negated`, and their wrong options are right: from one to all
    of them are kept, so that their number tells nothing, with the one that was right, in an order that is drawn, too.
    Rows with several right options, and questions that `negated` cannot turn, stay as they are.
    """
    question = row["question"] if "question" in row else row["problem"]
    answer = row["answer"] if "answer" in row else row["solution"]
    right, options = sorted(letters_in(answer_in(answer) or answer)), _unlettered(row["options"])
    # By its text: a row is the same question in every epoch and process.
    draw, other = Random("\n".join([question, *options])), negated(question)
    if draw.random() < 0.5 and other is not None and len(right) == 1 < len(options):
        wrong = [text for letter, text in zip(ascii_uppercase, options, strict=False) if letter != right[0]]
        old, wrong_options = options[ascii_uppercase.index(right[0])], draw.sample(wrong, draw.randint(1, len(wrong)))
        question, options = other, draw.sample([old, *wrong_options], 1 + len(wrong_options))
        right = [letter for letter, text in zip(ascii_uppercase, options, strict=False) if text != old]
    return {**row, "prompt": lettered(question, options), "options": options, "answer": ", ".join(right)}
