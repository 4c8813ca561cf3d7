"""Tasks that need no download: drawn pictures, a question about each, and the answer that a rule can check.

A row is a pure function of its task, its split and its number; what is held out, each task says by what it draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from genrl.mdp.noise import derive_seed
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.tasks import bodies, captions, clips, jigsaw, quality, scenes, series, shapes, sums, tunes
from genrl.vlm.tasks.rows import Drawn, Row, Split

DRAW: dict[str, Callable[[np.random.Generator, Split], Drawn]] = {
    "count": partial(shapes.drawn, "count"),
    "colour": partial(shapes.drawn, "colour"),
    "shapes": partial(shapes.drawn, "shapes"),
    "jigsaw": jigsaw.full,
    "jigsaw_pair": jigsaw.pair,
    "box": jigsaw.box,
    "point": jigsaw.point,
    "quality": quality.rated,
    "better": quality.better,
    "series": series.which,
    "key_frames": clips.keys,
    "what": clips.what,
    "scenes": scenes.number,
    "sums": sums.plus,
    "captions": captions.text,
    "bodies": bodies.text,
    "tunes": tunes.text,
}
"""By the name that `task.name` has."""


def row(task: str, split: Split, number: int) -> Row:
    """The question of this number."""
    name = f"{task}/{split}/{number}"
    drawn = DRAW[task](np.random.default_rng(derive_seed(name)), split)
    question = " ".join(part for part in drawn.parts if isinstance(part, str))
    columns = {"answer": drawn.answer, "question": question, "level": float(drawn.level), **drawn.columns}
    return Row(name, Prompt(drawn.parts, where=name), columns)
