"""Rewards: which of two pictures is nearer to a goal, asked of a vision-language model in two stages (RL-VLM-F).

Wang et al. 2024, arXiv 2402.03681: first both pictures are described and compared against the goal, then the answer is
one number, 0, 1 or -1. The wording is ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rewards.scorers.judges import templates
from rewards.scorers.judges.judge import shown
from rewards.scorers.judges.vlm import Question, open_vlm

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
ANALYSIS = "{analysis}"

COMPARE = """These are two pictures of the same scene at two moments, picture 0 and then picture 1. The goal is:
<text>
{prompt}
</text>
What does picture 0 show, and what does picture 1? What of it matters for the goal? In which of the two is the goal
nearer to being achieved?"""
ANSWER = """Somebody compared two pictures, picture 0 and picture 1, with this goal:
<text>
{prompt}
</text>
This is the comparison:
<text>
{analysis}
</text>
Is the goal nearer to being achieved in picture 0 or in picture 1? Answer with one number: 0, 1, or -1 if there is no
difference or it cannot be told."""


class PreferenceJudge:
    """Is the goal nearer in one picture than in the other? 1 for yes, 0 for no; no score where the model cannot tell.

    Pairwise: every ordered pair of a group is asked about. `compare` what is asked with both pictures, `answer` what is
    asked about that answer, with the places `{prompt}` and `{analysis}`; `model`, `server`, `dtype`, `max_tokens` (of
    the comparison) as in `judge`.
    """

    def __init__(
        self,
        model: str = MODEL,
        compare: str = COMPARE,
        answer: str = ANSWER,
        server: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        max_tokens: int = 256,
        device: str = "cpu",
    ):
        self.compare = templates.read(compare, "preference_judge", holding="{prompt}")
        self.answer, self.max_tokens = templates.read(answer, "preference_judge", holding=ANALYSIS), max_tokens
        self.vlm = open_vlm(model, server, dtype, device, "preference_judge")

    def to(self, device: str) -> None:
        """Move the model, if it is here."""
        self.vlm.to(device)

    def __call__(
        self, pil_images: Sequence[Image], prompts: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> list[float]:
        both = [[*shown(pil_images[i]), *shown(pil_images[j])] for i, j in pairs]
        goals = [prompts[i] for i, _ in pairs]
        first: list[Question] = [
            [*pictures, templates.put(self.compare, "{prompt}", goal)]
            for pictures, goal in zip(both, goals, strict=True)
        ]
        analyses = self.vlm.answers(first, self.max_tokens)
        second: list[Question] = [
            [*pictures, templates.put(templates.put(self.answer, "{prompt}", goal), ANALYSIS, analysis)]
            for pictures, goal, analysis in zip(both, goals, analyses, strict=True)
        ]
        return [preference(answer) for answer in self.vlm.answers(second, 8)]


def preference(answer: str) -> float:
    """1.0 where picture 0 is preferred, 0.0 where picture 1 is; NaN for -1, and where neither number stands there."""
    found = re.findall(r"(?<![\d.\w-])-?[01](?![\d.]*\d)", answer)
    return {"0": 1.0, "1": 0.0}.get(found[-1], math.nan) if found else math.nan
