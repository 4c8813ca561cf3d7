"""Rewards: do pictures belong together? PaCo-Reward (2025): pairs of pictures shown to a yes-or-no judge.

A pair's score is P(yes) / (P(yes) + P(no)) as the first word of the answer. There are three tasks: the cells of a grid,
an edited picture and its source, and the samples of a group.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from PIL.Image import Image

from genrl_rewards.contract import Scored, declare, mean
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import AsksVLM, judged
from genrl_rewards.scorers.judges.vlm import Question
from genrl_rewards.scorers.pictures.grids import CONSISTENT, GridShape, cells, theme_of

MODEL = "X-GenGroup/PaCo-Reward-7B"

KEPT = """The second picture was made from the first by this instruction: "{prompt}". Is everything that the instruction
does not mention the same in both pictures? Answer "Yes" or "No" first."""
FOLLOWED = """The second picture was made from the first by this instruction: "{prompt}". Was the instruction carried
out? Answer "Yes" or "No" first."""


def edit_consistency(kept: float, followed: float) -> float:
    """sqrt(kept followed): an edit must change what was asked for and nothing else."""
    return math.sqrt(kept * followed)


@dataclass(kw_only=True, eq=False)
class AsksPaco(AsksVLM):
    """What these three share: PaCo-Reward's own model."""

    model: str = MODEL


@dataclass(kw_only=True, eq=False)
class PacoGrid(AsksPaco):
    """Do the cells of one picture belong together? The mean of a judge's yes over all pairs of cells, in [0, 1].

    `grid`        `2x2` (rows x columns, the default), or the column of the prompt file that holds such a value
    `both_orders` ask about each pair in both orders (default false, as in the paper)
    `question`    may have a placeholder `{prompt}` for the theme, which is the prompt up to its first label: the text
                  itself, `file.txt` or `file.py:CONSTANT`
    `model`, `server`, `dtype` as in `judge`
    """

    differentiable = False
    reward = "paco_grid"

    grid: str = "2x2"
    both_orders: bool = False
    question: str = CONSISTENT

    def __post_init__(self) -> None:
        self.shapes = GridShape(self.grid, "paco_grid")
        self.pairs = itertools.permutations if self.both_orders else itertools.combinations
        self.question = judge.read(self.question, "paco_grid")
        super().__post_init__()
        self.__signature__ = declare(["pil_images", "prompts", *self.shapes.columns])

    def __call__(self, pil_images: list[Image], prompts: list[str], **grids: list[str]) -> Scored:
        asked: list[list[Question]] = []
        shapes = self.shapes(grids, len(prompts))
        for picture, prompt, shape in zip(pil_images, prompts, shapes, strict=True):
            text = judge.put(self.question, "{prompt}", theme_of(prompt))
            asked.append([[a, b, text] for a, b in self.pairs(cells(picture, *shape), 2)])
        answers = iter(self.vlm.yes_no([question for questions in asked for question in questions]))
        rows = [list(itertools.islice(answers, len(questions))) for questions in asked]
        return [mean(a.yes for a in row) for row in rows], {"mass": [mean(a.mass for a in row) for row in rows]}


@dataclass(kw_only=True, eq=False)
class PacoEdit(AsksPaco):
    """Was a picture edited as asked, and nothing else changed? sqrt(kept followed) of a judge's yes to both, in [0, 1].

    `kept`, `followed` the questions about source and result, in that order, with a placeholder `{prompt}` for the
                       instruction
    `model`, `server`, `dtype` as in `judge`

    The source picture is the file in the column `source_image`. Both answers are reported as parts.
    """

    differentiable = False
    reward = "paco_edit"

    kept: str = KEPT
    followed: str = FOLLOWED

    def __post_init__(self) -> None:
        texts = self.kept, self.followed
        self.questions = [judge.read(text, "paco_edit", holding="{prompt}") for text in texts]
        super().__post_init__()

    def __call__(self, pil_images: list[Image], prompts: list[str], source_images: list[Image]) -> Scored:
        questions: list[Question] = [
            [source, picture, judge.put(question, "{prompt}", prompt)]
            for question in self.questions
            for source, picture, prompt in zip(source_images, pil_images, prompts, strict=True)
        ]
        yes, _ = judged(self.vlm, questions)
        consistent, followed = yes[: len(prompts)], yes[len(prompts) :]
        return list(map(edit_consistency, consistent, followed)), {"kept": consistent, "followed": followed}


@dataclass(kw_only=True, eq=False)
class PacoGroup(AsksPaco):
    """Does a picture belong with the others of its group? A judge's yes, mean over its pairs, in [0, 1].

    Pairwise: every ordered pair is asked about. `question`, `model`, `server`, `dtype` as in `paco_grid`.
    """

    differentiable = False
    reward = "paco_group"

    question: str = CONSISTENT

    def __post_init__(self) -> None:
        self.question = judge.read(self.question, "paco_group")
        super().__post_init__()

    def __call__(self, pil_images: list[Image], prompts: list[str], pairs: list[tuple[int, int]]) -> Scored:
        questions: list[Question] = [
            [pil_images[i], pil_images[j], judge.put(self.question, "{prompt}", prompts[i])] for i, j in pairs
        ]
        return judged(self.vlm, questions)
