"""Solid bodies to be made of codes, for Hi-GRPO: a ball, a cube or a pyramid of one colour, in 16 x 16 x 16 voxels.

They are called by what is seen of them, "a red circle", so that rewards of pictures judge their views. A code is a
block of 8 x 8 x 8 voxels: an octant of a body of one colour, or nothing. Held out are the world's own combinations.
"""

from __future__ import annotations

import numpy as np

from genrl.playground.shapes import held_out
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, Group

BODIES = ("circle", "square", "triangle")
SIDE, BLOCK = 16, 8


def solid(body: str) -> np.ndarray:
    """Which voxels belong to it, bool [16, 16, 16] (depth, height from above, width)."""
    z, y, x = np.meshgrid(*[np.arange(SIDE) - SIDE / 2 + 0.5] * 3, indexing="ij")
    if body == "circle":
        return np.asarray(x**2 + y**2 + z**2 <= 7.0**2)
    if body == "square":
        return np.asarray(np.maximum(np.maximum(abs(x), abs(y)), abs(z)) <= 6)
    return np.asarray((y > -6.5) & (y < 5) & (np.maximum(abs(x), abs(z)) <= (y + 7) * 0.58))


def blocks() -> np.ndarray:
    """The codes' blocks, uint8 [1 + 3 * 5 * 8, 8, 8, 8]: nothing, then by body, colour and octant; entries are 0 or the
    colour's place in `COLOURS` + 1."""
    shapes = [np.zeros((BLOCK,) * 3, dtype=np.uint8)]
    for body in BODIES:
        octants = (
            solid(body).reshape(2, BLOCK, 2, BLOCK, 2, BLOCK).transpose(0, 2, 4, 1, 3, 5).reshape(8, *(BLOCK,) * 3)
        )
        shapes += [(octant * (colour + 1)).astype(np.uint8) for colour in range(len(COLOURS)) for octant in octants]
    return np.stack(shapes)


def codes(body: str, colour: str) -> list[int]:
    """The eight codes of a body."""
    first = 1 + (BODIES.index(body) * len(COLOURS) + COLOURS.index(colour)) * 8
    return list(range(first, first + 8))


def text(rng: np.random.Generator, split: Split) -> Question:
    """What is to be made."""
    while True:
        body, colour = BODIES[rng.integers(len(BODIES))], COLOURS[rng.integers(len(COLOURS))]
        if held_out(Group(1, colour, body)) == (split == "eval"):
            return Question((f"a {colour} {body}",), f"a {colour} {body}", 1)
