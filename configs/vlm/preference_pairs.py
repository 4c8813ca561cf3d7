"""Questions about drawn shapes with a right and a wrong answer, and with one that is marked."""

from __future__ import annotations

import numpy as np

from genrl.playground.tasks.shapes import MOST, either
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS


def pairs(rng: np.random.Generator, split: Split) -> Question:
    """`answer` is right, `rejected` wrong; `completion` is one of them, `label` whether it is the right one."""
    asked = either(rng, split)
    known = [str(number) for number in range(1, MOST + 1)] if asked.answer.isdigit() else list(COLOURS)
    wrong = str(rng.choice([one for one in known if one != asked.answer]))
    right = bool(rng.random() < 0.5)
    columns = {"rejected": wrong, "completion": asked.answer if right else wrong, "label": right}
    return asked._replace(columns=columns)
