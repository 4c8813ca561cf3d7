"""Tasks without shapes: plots of time series, of which kind is shown (TimeMaster), and sums of two numbers from 0 to 9
without any picture (the text-only stage of LMM-R1). A quarter is held out, of the pairs of cycles and phase as of
the sums."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from genrl.playground.tasks.shapes import PICTURE
from genrl.vlm.tasks import Question, Split

KINDS = ("sine", "pulse", "saw", "step", "spike", "trend")
PHASES = 8
SCALE = 4


def values(kind: str, cycles: int, phase: float, points: int) -> np.ndarray:
    """[points], about -1 to 1. phase: in [0, 1), of a cycle, or of the plot where the series has no cycles.

    Raises ValueError for an unknown kind.
    """
    time = np.linspace(0, 1, points)
    turn = (cycles * time + phase) % 1
    place = 0.2 + 0.6 * phase
    if kind == "sine":
        return np.sin(2 * np.pi * turn)
    if kind == "pulse":
        return np.where(turn < 0.5, 1.0, -1.0)
    if kind == "saw":
        return 2 * turn - 1
    if kind == "step":
        return np.where(time < place, -0.8, 0.8)
    if kind == "spike":
        return 1.8 * np.exp(-(((time - place) / 0.04) ** 2)) - 0.8
    if kind == "trend":
        return (2 * time - 1) * (0.5 + 0.5 * phase)
    raise ValueError(f"no series {kind!r}: {', '.join(KINDS)}")


def held_out_series(cycles: int, phase: int) -> bool:
    """Whether series of these are for evaluation only. phase: 0 to 7, in eighths."""
    return (cycles + phase) % 4 == 0


def which(rng: np.random.Generator, split: Split) -> Question:
    """A noisy series as a black line; the answer is its kind, which is one of `KINDS`."""
    while True:
        cycles, phase = int(rng.integers(2, 5)), int(rng.integers(PHASES))
        if held_out_series(cycles, phase) == (split == "eval"):
            break
    kind, noise = KINDS[rng.integers(len(KINDS))], rng.uniform(0.05, 0.25)
    side = SCALE * PICTURE
    heights = values(kind, cycles, (phase + rng.random()) / PHASES, PICTURE)
    heights = heights * rng.uniform(0.7, 1) * rng.choice((-1, 1)) + rng.normal(0, noise, PICTURE)
    canvas = Image.new("RGB", (side, side), "white")
    points = [(SCALE * (k + 0.5), side * (0.5 - 0.34 * height)) for k, height in enumerate(heights)]
    ImageDraw.Draw(canvas).line(points, fill="black", width=2 * SCALE, joint="curve")
    question = f"which kind of series is this , {' '.join(KINDS)} ?"
    return Question((canvas.reduce(SCALE), question), kind, round(float(noise), 3))


def held_out_sum(first: int, second: int) -> bool:
    """Whether this sum is for evaluation only."""
    return (first + 2 * second) % 4 == 0


def plus(rng: np.random.Generator, split: Split) -> Question:
    """What two numbers make together."""
    while True:
        first, second = (int(k) for k in rng.integers(10, size=2))
        if held_out_sum(first, second) == (split == "eval"):
            return Question((f"what is {first} plus {second} ?",), str(first + second), first + second)
