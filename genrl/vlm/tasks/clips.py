"""Clips of four frames: in which of them a colour is seen (K-frames), and what is seen in one frame.

Held out are pairs of key frames and colour, every fourth.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from PIL import Image

from genrl.vlm.tasks.rows import Drawn, Split
from genrl.vlm.tasks.shapes import PICTURE
from genrl.world import SIZE, Scene, Thing, draw
from rewards.shapes import COLOURS, SHAPES

FRAMES = 4
KEYS = (*combinations(range(FRAMES), 1), *combinations(range(FRAMES), 2))
"""The sets of frames that can show the colour, from 0."""


def held_out(keys: tuple[int, ...], colour: str) -> bool:
    """Whether clips that show this colour in these frames are for evaluation only."""
    return (KEYS.index(keys) + COLOURS.index(colour)) % 4 == 0


def _frame(rng: np.random.Generator, colour: str, shape: str) -> Image.Image:
    x, y = rng.uniform(0.35, 0.65, 2) * SIZE
    thing = Thing(colour, shape, float(x), float(y), float(rng.uniform(14, 19)))
    return Image.fromarray(draw(Scene("single", (thing,)), PICTURE))


def _of_colour(colour: str) -> str:
    return f"which shape is {colour} ?"


def keys(rng: np.random.Generator, split: Split) -> Drawn:
    """A clip, one shape in each frame. The answer is the numbers of the frames with the colour, from 1.

    Columns for an answerer who is shown the chosen frames only: `frames` (pictures), `about` (the question that it is
    asked) and `truth` (its right answer). The frames without the colour show other shapes.
    """
    while True:
        shown, colour = KEYS[rng.integers(len(KEYS))], COLOURS[rng.integers(len(COLOURS))]
        if held_out(shown, colour) == (split == "eval"):
            break
    shape = SHAPES[rng.integers(len(SHAPES))]
    others = [[kind for kind in kinds if kind != own] for kinds, own in ((COLOURS, colour), (SHAPES, shape))]
    frames = []
    for k in range(FRAMES):
        kinds = (colour, shape) if k in shown else tuple(kind[rng.integers(len(kind))] for kind in others)
        frames.append(_frame(rng, *kinds))
    columns = {"frames": frames, "about": _of_colour(colour), "truth": shape}
    answer = " ".join(str(k + 1) for k in shown)
    return Drawn((*frames, f"in which frames is a {colour} shape ?"), answer, len(shown), columns)


def what(rng: np.random.Generator, split: Split) -> Drawn:
    """One frame, and which shape has its colour. Every fourth combination of colour and shape is held out."""
    while True:
        colour, shape = COLOURS[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))]
        if ((COLOURS.index(colour) + SHAPES.index(shape)) % 4 == 0) == (split == "eval"):
            break
    return Drawn((_frame(rng, colour, shape), _of_colour(colour)), shape, 1)
