"""TW-GRPO's question-answer inversion: what is asked, what is right then, and its soft reward."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase

import datasets
import pytest

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.rollout.data import Questions
from genrl.vlm.tasks.formats import inversion, negated
from tests.vlm import vlm_runs

OPTIONS = ["Lied on", "Took", "Put down", "Washed"]
ROWS = [
    {"video": f"{k}.mp4", "question": f"What did person {k} do ?", "options": OPTIONS, "answer": "(C)"}
    for k in range(400)
]


def parts(row: dict[str, str]) -> tuple[str, dict[str, str]]:
    question, *options = row["prompt"].split("\n")
    return question, dict(option.split(". ", 1) for option in options)


def test_the_right_options_of_an_inverted_question_are_the_wrong_ones() -> None:
    numbers, places, turned = [], [], 0
    for row in ROWS:
        made = inversion(row)
        question, options = parts(made)
        said = {options[letter] for letter in made["answer"].split(", ")}
        assert made["video"] == row["video"] and made["options"] == list(options.values())
        if "didn't" not in question:
            assert question == row["question"] and list(options.values()) == OPTIONS and said == {"Put down"}
            continue
        turned += 1
        assert said == set(options.values()) - {"Put down"} and "Put down" in options.values()
        assert set(options.values()) <= set(OPTIONS) and len(set(options.values())) == len(options)
        assert list(options) == list(ascii_uppercase[: len(options)])
        numbers.append(len(said))
        places.append(list(options.values()).index("Put down"))
    assert 160 < turned < 240
    assert set(numbers) == {1, 2, 3} and min(numbers.count(n) for n in (1, 2, 3)) > turned / 5
    assert set(places) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("What did the person do with the clothes?", "What didn't the person do with the clothes?"),
        ("why are they here", "why aren't they here"),
        ("Did the ball hit it?", "Didn't the ball hit it?"),
        ("What will happen next?", "What won't happen next?"),
        ("What happened after that?", "What didn't happen after that?"),
        ("Which object moves?", None),
        ("Why?", None),
    ],
)
def test_a_question_is_negated_by_its_verb(question: str, wanted: str | None) -> None:
    assert negated(question) == wanted


def test_letters_and_tags_of_a_data_set_are_read_and_several_right_ones_stay() -> None:
    lettered = [f"({letter}) {text}" for letter, text in zip(ascii_uppercase, OPTIONS, strict=False)]
    row = {"problem": "What did he do ?", "options": lettered, "solution": "<answer>A, D</answer>"}
    assert inversion(row)["prompt"] == "What did he do ?\nA. Lied on\nB. Took\nC. Put down\nD. Washed"
    assert inversion(row)["answer"] == "A, D"
    plain = {"problem": "Which moved ?", "options": ["A. The cup", "B. A. Smith"], "solution": "<answer>B</answer>"}
    assert inversion(plain)["prompt"] == "Which moved ?\nA. The cup\nB. A. Smith"


def test_a_run_reads_such_rows_by_the_name_of_the_format(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{k: v for k, v in row.items() if k != "video"} for row in ROWS[:8]])
    for split in ("train", "test"):
        table.to_parquet(tmp_path / f"{split}.parquet")
    task = {"name": None, "train": f"{tmp_path}:train", "eval": f"{tmp_path}:test"}
    task |= {"format": "inversion", "image": None}
    rewards = [{"name": "choice", "args": {"partial": True}}]
    config: VLMConfig = vlm_runs.config(tmp_path, task=task, rewards=rewards)
    questions = Questions(config, "train")
    for number, row in enumerate(ROWS[:8]):
        made = inversion(row)
        assert questions[number].prompt.parts == (made["prompt"],)
        assert questions[number].columns["answer"] == made["answer"]
