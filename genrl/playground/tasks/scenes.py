"""Scenes of the embedded world, which its tiny generators draw too: how many shapes there are (Syn-GRPO).

Held out are the world's own combinations of number, colour and shape.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from genrl.playground.shapes import Kind, Scene, caption, draw, sample_scene
from genrl.vlm.tasks import Question, Split

KINDS: tuple[Kind, ...] = ("single", "count", "two", "mixed")


def scene(rng: np.random.Generator, split: Split) -> Scene:
    """One to four shapes, in one or two groups."""
    return sample_scene(rng, KINDS[rng.integers(len(KINDS))], split)


def number(rng: np.random.Generator, split: Split) -> Question:
    """The answer is the number of shapes; the column `caption` says what is shown."""
    counted = scene(rng, split)
    things = len(counted.things)
    picture = Image.fromarray(draw(counted))
    return Question((picture, "how many shapes are there ?"), str(things), things, {"caption": caption(counted)})
