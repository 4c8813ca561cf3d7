"""Tasks and rewards of the runs `situations` in benchmarks/claims.yaml, in which a preset's claim can show, made of
built-in tasks.

Tasks and rewards are named in a configuration as `benchmarks/vlm_claims_world.py:NAME`, as any user's are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from genrl.playground.shapes import Scene, draw
from genrl.playground.tasks import jigsaw, series, shapes
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS
from genrl_rewards.scorers.texts.expected import number_in, numbers_in
from genrl_rewards.scorers.texts.verifiable import answer_in, iou_of

RADIUS = (3.5, 5.0)  # of 64; the task `shapes` has 7 to 8.5
NOISE = 0.35  # of the strongest that `quality` knows
ERRORS = 0.1  # share of verdicts that are wrong by far
OUTLIER = 10.0  # points


def small(rng: np.random.Generator, split: Split) -> Question:
    """The questions of `shapes` about small shapes under noise: what is hard is to see."""
    scene, question, answer = shapes.QUESTIONS["shapes"](rng, split)
    things = tuple(replace(thing, radius=float(rng.uniform(*RADIUS))) for thing in scene.things)
    picture = Image.fromarray(draw(Scene(scene.kind, things), shapes.PICTURE))
    return Question((shapes.degraded(picture, "noise", NOISE, rng), question), answer, len(things))


def coded(rng: np.random.Generator, split: Split) -> Question:
    """How many shapes there are, said by a colour, which the embedded model never does; `shown` is how it would."""
    scene, question, number = shapes.QUESTIONS["count"](rng, split)
    colour = COLOURS[int(number) % len(COLOURS)]
    shown = f"<think> i see {number} </think> <answer> {colour} </answer>"
    picture = Image.fromarray(draw(scene, shapes.PICTURE))
    return Question((picture, question), colour, len(scene.things), {"shown": shown})


MIXED: dict[str, Callable[[np.random.Generator, Split], Question]] = {
    "jigsaw": jigsaw.full,
    "box": jigsaw.box,
    "quality": shapes.rated,
    "series": series.which,
    "key_frames": shapes.keys,
}


def mixed(rng: np.random.Generator, split: Split) -> Question:
    """One of five tasks whose rewards differ in difficulty and spread; the column `task` says which."""
    name = list(MIXED)[rng.integers(len(MIXED))]
    question = MIXED[name](rng, split)
    return question._replace(columns={"task": name})


def of_task(completions: list[str], answer: list[str], task: list[str]) -> list[float]:
    """[0, 1]: the share of places, the overlap of boxes, exp(-error / .3) of a score, else 1 for the right text."""
    return [
        _score(answer_in(text) or "", want, name) for text, want, name in zip(completions, answer, task, strict=True)
    ]


def _score(said: str, want: str, task: str) -> float:
    if task == "jigsaw":
        places, right = said.split(), want.split()
        return (
            sum(a == b for a, b in zip(places, right, strict=False)) / len(right) if len(places) == len(right) else 0.0
        )
    if task == "box":
        corners = numbers_in(said)
        return iou_of(corners, numbers_in(want)) if len(corners) == 4 else 0.0
    if task == "quality":
        score = number_in(said)
        return 0.0 if score is None else math.exp(-abs(score - float(want)) / 0.3)
    return float(said == want)


def exact_set(completions: list[str], answer: list[str]) -> list[float]:
    """1 if the answer names the right numbers, in any order."""
    return [float(_set(text) == set(want.split())) for text, want in zip(completions, answer, strict=True)]


def soft_set(completions: list[str], answer: list[str]) -> list[float]:
    """TW-GRPO's soft accuracy: the share of the right numbers that are named, 0 if a wrong one is."""
    pairs = [(_set(text), set(want.split())) for text, want in zip(completions, answer, strict=True)]
    return [len(said) / len(right) if said <= right else 0.0 for said, right in pairs]


def _set(text: str) -> set[str]:
    return set((answer_in(text) or "").split())


def agrees(completions: list[str]) -> list[float]:
    """1 if the last word of the reasoning is the answer: `<think> i see 4 </think> <answer> 4 </answer>`."""
    return [
        float(answer_in(text) is not None and (answer_in(text, "think") or "").split()[-1:] == [answer_in(text)])
        for text in completions
    ]


def better(rng: np.random.Generator, split: Split) -> Question:
    """`quality.better` with a column `key` that tells its question from others."""
    question = shapes.better(rng, split)
    return question._replace(columns={"key": int(rng.integers(2**31))})


def noisy_judge(completions: list[str], answer: list[str], key: list[int]) -> list[float]:
    """1 for the right letter, 0 for another; one verdict in ten is off by 10 points up or down. The judge repeats
    itself: the same answer to the same question gets the same verdict."""
    return [_verdict(text, want, k) for text, want, k in zip(completions, answer, key, strict=True)]


def _verdict(text: str, want: str, key: int) -> float:
    right = float((answer_in(text) or "").strip() == want)
    digest = hashlib.sha256(f"{key} {text}".encode()).digest()
    if int.from_bytes(digest[:4], "big") >= ERRORS * 2**32:
        return right
    return right + (OUTLIER if digest[4] % 2 else -OUTLIER)
