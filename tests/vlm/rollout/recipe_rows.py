"""Rows of our own in the formats of published data sets, with the columns and kinds that their cards name."""

from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets import Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw


class Sample(NamedTuple):
    """rows: with their pictures; answers: of each row a right and a wrong answer, None where it has no score."""

    features: Features
    rows: list[dict[str, Any]]
    answers: list[tuple[str, str] | None]


def picture(things: int = 3, size: tuple[int, int] = (40, 32)) -> Pictures.Image:
    made = Pictures.new("RGB", size, "white")
    for k in range(things):
        ImageDraw.Draw(made).rectangle((2 + 8 * k, 4, 7 + 8 * k, 20), fill=("red", "green", "blue", "black")[k % 4])
    return made


TEXT, TEXTS, SHOWN = Value("string"), List(Value("string")), Image()


def geometry3k() -> Sample:
    truths = [r"2 \sqrt { 221 }", r"\frac { 1 } { 2 }", "12", r"[ 1 , 3 )", "cannot be determined", r"90 ^ { \circ }"]
    answers = [(r"\sqrt{884}", "29.7"), ("0.5", "0.2"), ("12 cm", "13 cm"), ("[1,3)", "(1,3)"), None, ("90", "45")]
    rows = [{"images": [picture(k)], "problem": "<image>Find x .", "answer": truth} for k, truth in enumerate(truths)]
    rows[2] = {"images": [picture(1), picture(2)], "problem": "In <image> and <image>, find x .", "answer": "12"}
    return Sample(Features(images=List(SHOWN), problem=TEXT, answer=TEXT), rows, answers)


def mathvista() -> Sample:
    def row(question: str, answer: str | None, choices: list[str] | None = None, unit: str | None = None) -> Any:
        own = {"pid": "1", "question": question, "image": "images/1.jpg", "decoded_image": picture()}
        return own | {"choices": choices, "unit": unit, "precision": 1.0, "answer": answer}

    rows = [row("What is x ?", "145°", ["135°", "140°", "145°"]), row("How far ?", "1.2", unit="m")]
    rows += [row("How many ?", "3"), row("How many ?", "")]
    features = dict.fromkeys(("pid", "question", "image", "unit", "answer"), TEXT)
    features |= {"decoded_image": SHOWN, "choices": TEXTS, "precision": Value("float64")}
    return Sample(Features(features), rows, [("C", "A"), (r"\frac{6}{5} m", "1.4"), ("3", "4"), None])


def scienceqa() -> Sample:
    def row(image: Any, choices: list[str], answer: int, hint: str = "") -> Any:
        return {"image": image, "question": "Which one ?", "choices": choices, "answer": answer, "hint": hint}

    rows = [row(picture(), ["red", "green"], 1), row(None, ["an ox", "a cat", "a bee"], 0, "It is large.")]
    kinds = Features(image=SHOWN, question=TEXT, choices=TEXTS, answer=Value("int8"), hint=TEXT)
    return Sample(kinds, rows, [("B", "A"), ("A. an ox", "A, B")])


def refcoco() -> Sample:
    kinds = Features(image=SHOWN, question=TEXT, answer=TEXTS, bbox=List(Value("float64")))
    rows = [{"image": picture(), "question": "Describe it.", "answer": ["the red one"], "bbox": [2.0, 4.0, 5.0, 16.0]}]
    return Sample(kinds, rows, [("[50, 125, 175, 625]", "[500, 125, 675, 625]")])


def clevr() -> Sample:
    asked = "How many items are there?"
    rows = [{"image": picture(k), "problem": asked, "solution": f"<answer> {k} </answer>"} for k in (2, 3)]
    return Sample(Features(image=SHOWN, problem=TEXT, solution=TEXT), rows, [("2", "3"), ("3 items", "30")])


def chartqa() -> Sample:
    truths = ["14", "Yes", "23.5%", "0"]
    answers = [("$14.5", "15"), ("yes", "no"), ("23.5 %", "30%"), ("0", "1")]
    rows = [{"image": picture(), "query": "How high ?", "label": [truth], "human_or_machine": 0} for truth in truths]
    who = datasets.ClassLabel(names=["human", "machine"])
    kinds = Features(image=SHOWN, query=TEXT, label=TEXTS, human_or_machine=who)
    return Sample(kinds, rows, answers)


def docvqa() -> Sample:
    rows = [{"image": picture(), "question": "Who ?", "answers": ["ITC Limited", "itc limited"]}]
    rows.append({"image": picture(), "question": "Who ?", "answers": None})
    return Sample(Features(image=SHOWN, question=TEXT, answers=TEXTS), rows, [("ITC Limitd", "nobody"), None])


SAMPLES = {make.__name__: make for make in (geometry3k, mathvista, scienceqa, refcoco, clevr, chartqa, docvqa)}


def written(name: str, folder: Path) -> Sample:
    """The sample, as the files of a data set with the splits train and test in `folder`."""
    sample = SAMPLES[name]()
    table = datasets.Dataset.from_list(sample.rows, features=sample.features)
    for split in ("train", "test"):
        table.to_parquet(folder / f"{split}.parquet")
    return sample
