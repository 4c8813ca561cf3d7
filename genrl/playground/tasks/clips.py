"""Clips of four frames: in which of them a colour is seen (K-frames), and what is seen in one frame.

Held out are every fourth sequence of the frames' colours, and every fourth of the places at which a lone frame shows
its shape: never what an answer could be told from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from PIL import Image

from genrl.playground.shapes import SIZE, Scene, Thing, draw
from genrl.playground.tasks.shapes import PICTURE
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES

FRAMES = 4
KEYS = (*combinations(range(FRAMES), 1), *combinations(range(FRAMES), 2))
"""The sets of frames that can show the colour, from 0."""


def held_out(colours: Sequence[str]) -> bool:
    """Whether clips whose frames have these colours, one after the other, are for evaluation only."""
    return sum(map(COLOURS.index, colours)) % 4 == 0


def _frame(rng: np.random.Generator, colour: str, shape: str) -> tuple[Image.Image, Thing]:
    x, y = rng.uniform(0.35, 0.65, 2) * SIZE
    thing = Thing(colour, shape, float(x), float(y), float(rng.uniform(14, 19)))
    return Image.fromarray(draw(Scene("single", (thing,)), PICTURE)), thing


def _of_colour(colour: str) -> str:
    return f"which shape is {colour} ?"


def keys(rng: np.random.Generator, split: Split) -> Question:
    """A clip, one shape in each frame. The answer is the numbers of the frames with the colour, from 1.

    Columns for an answerer who is shown the chosen frames only: `frames` (pictures), `about` (the question that it is
    asked) and `truth` (its right answer). The frames without the colour show other shapes.
    """
    shown, colour = KEYS[rng.integers(len(KEYS))], COLOURS[rng.integers(len(COLOURS))]
    shape = SHAPES[rng.integers(len(SHAPES))]
    other_colours, other_shapes = ([x for x in xs if x not in (colour, shape)] for xs in (COLOURS, SHAPES))
    while True:
        colours = [colour if k in shown else other_colours[rng.integers(len(other_colours))] for k in range(FRAMES)]
        if held_out(colours) == (split == "eval"):
            break
    frames = [
        _frame(rng, seen, shape if k in shown else other_shapes[rng.integers(len(other_shapes))])[0]
        for k, seen in enumerate(colours)
    ]
    columns = {"frames": frames, "about": _of_colour(colour), "truth": shape}
    answer = " ".join(str(k + 1) for k in shown)
    return Question((*frames, f"in which frames is a {colour} shape ?"), answer, len(shown), columns)


def what(rng: np.random.Generator, split: Split) -> Question:
    """One frame, and which shape has its colour."""
    colour, shape = COLOURS[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))]
    while True:
        frame, thing = _frame(rng, colour, shape)
        if ((int(thing.x) + int(thing.y)) % 4 == 0) == (split == "eval"):
            return Question((frame, _of_colour(colour)), shape, 1)
