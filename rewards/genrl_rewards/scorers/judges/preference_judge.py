"""Reward: which of two pictures is nearer to a goal, asked of a vision-language model in two stages (RL-VLM-F).

Wang et al. 2024, arXiv 2402.03681: the model first describes both pictures and compares them with respect to the goal;
then it answers with one number, 0, 1 or -1. The wording is ours.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from PIL.Image import Image

from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import AsksVLM, shown
from genrl_rewards.scorers.judges.vlm import Question

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
Is the goal nearer to being achieved in picture 0 or in picture 1? Answer with one number and nothing else: 0, 1, or -1
if there is no difference or it cannot be told."""
ANSWERS = {"0": 1.0, "1": 0.0, "-1": 0.5}


@dataclass(kw_only=True, eq=False)
class PreferenceJudge(AsksVLM):
    """Is a goal nearer in one picture than in the other? A vision-language model's answer in two stages: 1, 0 or .5.

    Pairwise: every ordered pair of a group is asked about. .5 is no preference (the model's -1); there is no score for
    any other answer than one of the three numbers. `compare` is asked with
    both pictures, `answer` about the answer to that, with the placeholders `{prompt}` and `{analysis}`; `model`,
    `server`, `dtype`, `max_tokens` (of the comparison) as in `judge`.
    """

    differentiable = False
    reward = "preference_judge"

    compare: str = COMPARE
    answer: str = ANSWER
    max_tokens: int = 256

    def __post_init__(self) -> None:
        self.compare = judge.read(self.compare, "preference_judge", holding="{prompt}")
        self.answer = judge.read(self.answer, "preference_judge", holding=ANALYSIS)
        super().__post_init__()

    def __call__(self, pil_images: list[Image], prompts: list[str], pairs: list[tuple[int, int]]) -> list[float]:
        both = [[*shown(pil_images[i]), *shown(pil_images[j])] for i, j in pairs]
        goals = [prompts[i] for i, _ in pairs]
        first: list[Question] = [
            [*pictures, judge.put(self.compare, "{prompt}", goal)] for pictures, goal in zip(both, goals, strict=True)
        ]
        analyses = self.vlm.answers(first, self.max_tokens)
        second: list[Question] = [
            [*pictures, judge.put(judge.put(self.answer, "{prompt}", goal), ANALYSIS, analysis)]
            for pictures, goal, analysis in zip(both, goals, analyses, strict=True)
        ]
        return [preference(answer) for answer in self.vlm.answers(second, 8)]


def preference(answer: str) -> float:
    """1.0 for an answer that prefers picture 0, 0.0 for picture 1, 0.5 for neither; NaN if it is no such number alone.

    Marks around the number ("0.", "**1**", "'-1'") are no part of it.
    """
    match = re.fullmatch(r"[\s\"'`*]*(-1|0|1)[\s\"'`*.]*", answer)
    return ANSWERS[match[1]] if match else math.nan
