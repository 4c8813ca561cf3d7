"""Rows of published data sets as questions.

A format is a function from a row, a mapping of its columns with decoded pictures, to the columns of a question: those
that `task.prompt` and `task.image` name (`prompt`, `image`), and those that the rewards ask for. One of your own is
named by `task.format: path/file.py:name`, or by an entry point of the group `genrl.formats`. The names and kinds of the
columns are those of the data sets' cards; how a question is worded is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from string import ascii_uppercase
from typing import Any

from genrl_rewards.scorers.texts.expected import letters_in
from genrl_rewards.scorers.texts.verifiable import answer_in

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
