"""Sums of two numbers from 0 to 9, without any picture: the text-only stage of LMM-R1. A quarter is held out."""

from __future__ import annotations

import numpy as np

from genrl.vlm.tasks import Question, Split


def held_out(first: int, second: int) -> bool:
    """Whether this sum is for evaluation only."""
    return (first + 2 * second) % 4 == 0


def plus(rng: np.random.Generator, split: Split) -> Question:
    """What two numbers make together."""
    while True:
        first, second = (int(k) for k in rng.integers(10, size=2))
        if held_out(first, second) == (split == "eval"):
            return Question((f"what is {first} plus {second} ?",), str(first + second), first + second)
