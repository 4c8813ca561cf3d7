"""Captions, for models that make pictures by tokens: one or two large shapes of the embedded world.

Held out is every fourth pair of things: an "eval" caption names two that no "train" caption names together, though each
of them by itself and with others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genrl.playground.shapes import Scene, Thing, caption
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES, Group

RADIUS = {"circle": 12.5, "square": 12.0, "triangle": 13.0, "star": 12.5}
"""Of 64 pixels: `genrl_rewards.scorers.objects.shapes` still tells the shapes apart where these are rendered in 32."""


def held_out(picks: Sequence[int]) -> bool:
    """Whether these things (numbers of colour and shape, 0 to 19) are for evaluation only."""
    return len(picks) == 2 and sum(picks) % 4 == 0


def scene(rng: np.random.Generator, split: Split | None) -> Scene:
    """One thing, or (three in five times) two, in the middles of different quarters; split None: any."""
    while True:
        count = 1 + int(rng.random() < 0.6)
        picks = rng.choice(len(COLOURS) * len(SHAPES), size=count, replace=False).tolist()
        if split is None or held_out(picks) == (split == "eval"):
            break
    groups = tuple(Group(1, COLOURS[p % len(COLOURS)], SHAPES[p // len(COLOURS)]) for p in picks)
    corners = rng.choice(4, size=count, replace=False)
    things = tuple(
        Thing(g.colour, g.shape, 16.0 + 32 * (c % 2), 16.0 + 32 * (c // 2), RADIUS[g.shape])
        for g, c in zip(groups, corners, strict=True)
    )
    return Scene("single" if count == 1 else "two", things, groups)


def text(rng: np.random.Generator, split: Split) -> Question:
    """A caption; the answer that is expected is a picture of it, which `shapes` checks."""
    described = scene(rng, split)
    words = caption(described)
    return Question((words,), words, len(described.things))
