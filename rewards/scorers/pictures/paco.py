"""Rewards: do pictures belong together? PaCo-Reward (2025), pairs of pictures before a yes-or-no judge.

A pair's score is P(yes) / (P(yes) + P(no)) as the first word of the answer. Three tasks: the cells of a grid, an edited
picture beside its source, and the samples of a group.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rewards.scorers.judges import templates
from rewards.scorers.judges.vlm import Question, open_vlm

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL = "X-GenGroup/PaCo-Reward-7B"

CONSISTENT = (
    'Given two subfigures generated based on the theme: "{prompt}", do the two images maintain consistency in terms of '
    'style, logic and identity? Answer "Yes" or "No" first.'
)
KEPT = """The second picture was made from the first by this instruction: "{prompt}". Is everything that the instruction
does not mention the same in both pictures? Answer "Yes" or "No" first."""
FOLLOWED = """The second picture was made from the first by this instruction: "{prompt}". Was the instruction carried
out? Answer "Yes" or "No" first."""


def cells(picture: Image, rows: int, columns: int) -> list[Image]:
    """The cells of a grid from left to right and top to bottom, all of the same size; a remainder is cut off."""
    width, height = picture.width // columns, picture.height // rows
    corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
    return [picture.crop((x, y, x + width, y + height)) for x, y in corners]


def mean(values: Sequence[float]) -> float:
    """Mean of the values that are numbers; NaN if none is."""
    valid = [value for value in values if not math.isnan(value)]
    return math.fsum(valid) / len(valid) if valid else math.nan


def edit_consistency(kept: float, followed: float) -> float:
    """sqrt(kept followed): an edit must change what was asked and nothing else."""
    return math.sqrt(kept * followed)


class PacoGrid:
    """Do the cells of one picture belong together? Mean of the judge's yes over all pairs of cells, in [0, 1].

    `grid`        `2x2` (rows x columns, the default), or the column of the prompt file that holds such a value
    `both_orders` ask each pair in both orders (default false, as in the paper)
    `question`    with a place `{prompt}` for the theme: the text itself, `file.txt` or `file.py:CONSTANT`
    `model`, `server`, `dtype` as in `judge`
    """

    def __init__(
        self,
        grid: str = "2x2",
        both_orders: bool = False,
        question: str = CONSISTENT,
        model: str = MODEL,
        server: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.fixed = parse_grid(grid) if re.match(r"\d", grid) else None
        self.pairs = itertools.permutations if both_orders else itertools.combinations
        self.question = templates.read(question, "paco_grid", holding="{prompt}")
        self.vlm = open_vlm(model, server, dtype, device, "paco_grid")
        # What is declared depends on `grid`; see rewards.contract.needs.
        names = ("pil_images", "prompts") if self.fixed else ("pil_images", "prompts", grid)
        self.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])

    def to(self, device: str) -> None:
        """Move the model, if it is here."""
        self.vlm.to(device)

    def __call__(
        self, pil_images: Sequence[Image], prompts: Sequence[str], **grids: Sequence[str]
    ) -> tuple[list[float], dict[str, list[float]]]:
        shapes = [parse_grid(grid) for grid in next(iter(grids.values()))] if grids else [self.fixed] * len(prompts)
        pairs: list[list[Question]] = []
        for picture, prompt, shape in zip(pil_images, prompts, shapes, strict=True):
            assert shape is not None
            asked = templates.put(self.question, "{prompt}", prompt)
            pairs.append([[a, b, asked] for a, b in self.pairs(cells(picture, *shape), 2)])
        answers = iter(self.vlm.yes_no([question for questions in pairs for question in questions]))
        rows = [list(itertools.islice(answers, len(questions))) for questions in pairs]
        return [mean([a.yes for a in row]) for row in rows], {"mass": [mean([a.mass for a in row]) for row in rows]}


def parse_grid(grid: str) -> tuple[int, int]:
    """`2x3` as (2, 3): at least two cells, at most 64. ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,2})x(\d{1,2})", str(grid).strip())
    shape = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 2 <= shape[0] * shape[1] <= 64:
        raise ValueError(f"paco_grid: grid {grid!r} should be rows x columns such as '2x2', with 2 to 64 cells")
    return shape


class PacoEdit:
    """Was the picture edited as asked, and nothing else? sqrt(kept followed) of two questions, in [0, 1].

    `kept`, `followed` what is asked about source and result, in that order, with a place `{prompt}` for the instruction
    `model`, `server`, `dtype` as in `judge`

    The source picture is the file in the column `source_image`. Both answers are reported as parts.
    """

    def __init__(
        self,
        kept: str = KEPT,
        followed: str = FOLLOWED,
        model: str = MODEL,
        server: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.questions = [templates.read(text, "paco_edit", holding="{prompt}") for text in (kept, followed)]
        self.vlm = open_vlm(model, server, dtype, device, "paco_edit")

    def to(self, device: str) -> None:
        """Move the model, if it is here."""
        self.vlm.to(device)

    def __call__(
        self, pil_images: Sequence[Image], prompts: Sequence[str], source_images: Sequence[Image]
    ) -> tuple[list[float], dict[str, list[float]]]:
        asked: list[Question] = [
            [source, picture, templates.put(question, "{prompt}", prompt)]
            for question in self.questions
            for source, picture, prompt in zip(source_images, pil_images, prompts, strict=True)
        ]
        yes = [answer.yes for answer in self.vlm.yes_no(asked)]
        kept, followed = yes[: len(prompts)], yes[len(prompts) :]
        scores = [edit_consistency(a, b) for a, b in zip(kept, followed, strict=True)]
        return scores, {"kept": kept, "followed": followed}


class PacoGroup:
    """Does the picture belong with the others of its group? The judge's yes for every ordered pair, in [0, 1].

    Pairwise: a sample's score is the mean over its pairs. `question`, `model`, `server`, `dtype` as in `paco_grid`.
    """

    def __init__(
        self,
        question: str = CONSISTENT,
        model: str = MODEL,
        server: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.question = templates.read(question, "paco_group", holding="{prompt}")
        self.vlm = open_vlm(model, server, dtype, device, "paco_group")

    def to(self, device: str) -> None:
        """Move the model, if it is here."""
        self.vlm.to(device)

    def __call__(
        self, pil_images: Sequence[Image], prompts: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> tuple[list[float], dict[str, list[float]]]:
        asked: list[Question] = [
            [pil_images[i], pil_images[j], templates.put(self.question, "{prompt}", prompts[i])] for i, j in pairs
        ]
        answers = self.vlm.yes_no(asked)
        return [answer.yes for answer in answers], {"mass": [answer.mass for answer in answers]}
