"""Rows of published data sets as questions.

A format is a function from a row, a mapping of its columns with decoded pictures, to the columns of a question: those
that `task.prompt` and `task.image` name (`prompt`, `image`), and those that the rewards ask for. One of your own is
named by `task.format: path/file.py:name`, or by an entry point of the group `genrl.formats`. The names and kinds of the
columns are those of the data sets' cards; how a question is worded is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from rewards.scorers.texts.verifiable import answer_in

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
