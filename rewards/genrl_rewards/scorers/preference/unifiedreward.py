"""Reward: UnifiedReward (Wang et al. 2025, arXiv 2503.05236), a vision-language model that writes scores of 1 to 5."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from genrl_rewards.contract import Scored, check_choice
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import AsksVLM, about, parse_score

MODEL = "CodeGoat24/UnifiedReward-qwen-7b"
TOKENS = {"final": 512, "acs": 4096}
AXES = ("Alignment", "Coherence", "Style")


def final_score(answer: str) -> float:
    """The last "Final Score: X" of an answer, X from 1 to 5; NaN if there is none, or if it is out of that range."""
    return parse_score(answer, "Final Score", 1, 5)


def axis_scores(answer: str) -> list[float]:
    """The scores after "Alignment Score (1-5):", "Coherence ...:" and "Style ...:", NaN for a missing one."""
    plain = re.sub(r"(\s+Score)?(\s*\(1-5\))?[\s*]*:", ":", answer)
    return [parse_score(plain, axis, 1, 5) for axis in AXES]


@dataclass(kw_only=True, eq=False)
class UnifiedReward(AsksVLM):
    """Quality and fit to the prompt as UnifiedReward writes them, (score - 1) / 4, in [0, 1].

    `question` the text that the checkpoint was trained with, which belongs to its authors: a `file.txt` of it, with its
               placeholder `{prompt}`. It is in the examples of their repository, CodeGoat24/UnifiedReward, in
               inference_qwen/image_generation (one text for each `scores`). Another wording gives other scores
    `scores`   `final` (default): one "Final Score"; `acs`: the mean of alignment, coherence and style, parts as well
    `model`    hub id or folder (Qwen2.5-VL, Qwen3-VL, LLaVA-OneVision), or the model's name on the server
    `server`, `dtype` as in `judge`

    No score if the answer has none, or one outside 1 to 5.
    """

    differentiable = False
    reward = "unifiedreward"

    question: str
    scores: str = "final"
    model: str = MODEL

    def __post_init__(self) -> None:
        check_choice("unifiedreward: unknown scores", self.scores, TOKENS)
        self.question = judge.read(self.question, "unifiedreward", holding="{prompt}")
        super().__post_init__()

    def __call__(self, pil_images: list[Any], prompts: list[str]) -> Scored:
        questions = about(self.question, pil_images, prompts)
        answers = self.vlm.answers(questions, TOKENS[self.scores])
        if self.scores == "final":
            return [(final_score(answer) - 1) / 4 for answer in answers], {}
        rows = [axis_scores(answer) for answer in answers]
        parts = {axis.lower(): [row[k] for row in rows] for k, axis in enumerate(AXES)}
        return [(math.fsum(row) / 3 - 1) / 4 for row in rows], parts
