"""Reward: are the things that a prompt asks for there? One question for each, asked of a vision-language model.

GenEval 2's Soft-TIFA (Kamath et al. 2025, arXiv 2512.16853) takes the probability of the expected answer to each
question and their mean or geometric mean; T2I-CompBench's BLIP-VQA (Huang et al. 2023, arXiv 2307.06350) the product of
P(yes).

Questions stand with their expected answers in a row of a prompt file; `genrl check` reads them from there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from genrl_rewards.contract import Scored, check_choice, declare
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import AsksVLM, shown
from genrl_rewards.scorers.judges.vlm import Question

COLUMN = "vqa_list"  # GenEval 2's


def pairs(row: Any) -> list[tuple[str, str]]:
    """The questions of a row and the answers expected, which are yes where a question stands alone.

    Raises ValueError for an entry of another form, and for an answer that is no single word.
    """
    if not isinstance(row, list | tuple | None):
        raise ValueError(f"questions are a list, found {row!r:.60}")
    pairs_of_row = [_pair(entry) for entry in row or ()]
    for question, answer in pairs_of_row:
        if len(answer.split()) != 1:
            raise ValueError(
                f"the answer {answer!r} to {question!r:.80} is compared with the first word that a model says; expect "
                "one word, or ask for each word of it"
            )
    return pairs_of_row


def _pair(entry: Any) -> tuple[str, str]:
    if isinstance(entry, str):
        return entry, "yes"
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[0], str):
        raise ValueError(f"a question is text, or a pair of text and answer, found {entry!r:.80}")
    return entry[0], str(entry[1])


ASKED = "{question} Answer with one word."


def combined(chances: Sequence[float], combine: str) -> float:
    """The chances of the expected answers as one score, by `geometric`, `mean` or `product`; NaN without any."""
    if not chances:
        return math.nan
    if combine == "mean":
        return math.fsum(chances) / len(chances)
    product = math.prod(chances)
    return product if combine == "product" else product ** (1 / len(chances))


@dataclass(kw_only=True, eq=False)
class Questions(AsksVLM):
    """Are the things that a prompt asks for there? A vision-language model's answers to a question for each, in [0, 1].

    `questions` the column with the list of them (default `vqa_list`, as in GenEval 2's file): each a pair of question
                and expected answer, one word or a number up to ten, or a question whose answer is to be yes
    `combine`   the chances of the expected answers: `geometric` mean (default; Soft-TIFA), `mean`, `product` (BLIP-VQA)
    `asked`     the text with the placeholder `{question}`, `file.txt` or `file.py:CONSTANT`
    `model`, `server`, `dtype` as in `judge`

    The chance of an answer is that of its spellings as the first word. The part `least` is the lowest chance. No score
    for a prompt without questions. A video is shown as all its frames.
    """

    differentiable = False
    reward = "questions"

    questions: str = COLUMN
    combine: str = "geometric"
    asked: str = ASKED

    def __post_init__(self) -> None:
        check_choice("questions: unknown combine", self.combine, ("geometric", "mean", "product"))
        self.asked = judge.read(self.asked, "questions", holding="{question}")
        super().__post_init__()
        self.__signature__ = declare(["pil_images", self.questions])

    def check_row(self, **column: Any) -> None:
        """Raise ValueError for expected answers that the model cannot say as its first word."""
        (row,) = column.values()
        self.vlm.check_words([answer for _, answer in pairs(row)])

    def __call__(self, pil_images: list[Any], **column: list[Any]) -> Scored:
        (lists,) = column.values()
        rows = [pairs(row) for row in lists]
        questions: list[Question] = [
            [*shown(pictures), judge.put(self.asked, "{question}", question)]
            for pictures, row in zip(pil_images, rows, strict=True)
            for question, _ in row
        ]
        chances = iter(self.vlm.first_words(questions, [answer for row in rows for _, answer in row]))
        answers = [list(itertools.islice(chances, len(row))) for row in rows]
        return [combined(row, self.combine) for row in answers], {
            "least": [min(row, default=math.nan) for row in answers]
        }
