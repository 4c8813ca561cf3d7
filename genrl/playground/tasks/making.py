"""What is to be made, for models that make pictures, bodies or sounds by tokens.

Captions: one or two large shapes of the embedded world. Held out is every fourth pair of things: an "eval" caption
names two that no "train" caption names together, though each of them by itself and with others.

Solid bodies, for Hi-GRPO: a ball, a cube or a pyramid of one colour, in 16 x 16 x 16 voxels. They are called by what is
seen of them, "a red circle", so that rewards of pictures judge their views. A code is a block of 8 x 8 x 8 voxels: an
octant of a body of one colour, or nothing. Held out are the world's own combinations.

Tunes, for MusicRL: nine notes that rise, fall or stay, in a low or a high register. A code is a note: a pitch of a
scale of twelve, played purely or with noise, or silence. Held out are the tunes that fall in the low register, and
those that rise in the high one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genrl.playground.shapes import Scene, Thing, caption, held_out
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES, Group

RADIUS = {"circle": 12.5, "square": 12.0, "triangle": 13.0, "star": 12.5}
"""Of 64 pixels: `genrl_rewards.scorers.objects.shapes` still tells the shapes apart where these are rendered in 32."""


def apart(picks: Sequence[int]) -> bool:
    """Whether these things (numbers of colour and shape, 0 to 19) are for evaluation only."""
    return len(picks) == 2 and sum(picks) % 4 == 0


def scene(rng: np.random.Generator, split: Split | None) -> Scene:
    """One thing, or (three in five times) two, in the middles of different quarters; split None: any."""
    while True:
        count = 1 + int(rng.random() < 0.6)
        picks = rng.choice(len(COLOURS) * len(SHAPES), size=count, replace=False).tolist()
        if split is None or apart(picks) == (split == "eval"):
            break
    groups = tuple(Group(1, COLOURS[p % len(COLOURS)], SHAPES[p // len(COLOURS)]) for p in picks)
    corners = rng.choice(4, size=count, replace=False)
    things = tuple(
        Thing(g.colour, g.shape, 16.0 + 32 * (c % 2), 16.0 + 32 * (c // 2), RADIUS[g.shape])
        for g, c in zip(groups, corners, strict=True)
    )
    return Scene("single" if count == 1 else "two", things, groups)


def picture(rng: np.random.Generator, split: Split) -> Question:
    """A caption; the answer that is expected is a picture of it, which `shapes` checks."""
    described = scene(rng, split)
    words = caption(described)
    return Question((words,), words, len(described.things))


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


def body(rng: np.random.Generator, split: Split) -> Question:
    """What is to be made."""
    while True:
        kind, colour = BODIES[rng.integers(len(BODIES))], COLOURS[rng.integers(len(COLOURS))]
        if held_out(Group(1, colour, kind)) == (split == "eval"):
            return Question((f"a {colour} {kind}",), f"a {colour} {kind}", 1)


RATE, SAMPLES = 8000, 800  # a note lasts a tenth of a second
PITCHES, NOTES = 12, 9
NOISE = 0.6
COURSES, REGISTERS = ("rising", "falling", "steady"), ("low", "high")


def frequency(pitch: int) -> float:
    """Hertz of a pitch; 0 to 5 are the low register."""
    return float(220 * 2 ** (pitch / 6))


def frames() -> np.ndarray:
    """The codes' sounds, float32 [25, 800] in [-1, 1]: silence, then by pitch the pure note and the noisy one."""
    time, rng = np.arange(SAMPLES) / RATE, np.random.default_rng(0)
    fade = np.minimum(1, np.minimum(np.arange(SAMPLES), np.arange(SAMPLES)[::-1]) / 40)
    frames_so_far = [np.zeros(SAMPLES)]
    for pitch in range(PITCHES):
        pure = 0.5 * np.sin(2 * np.pi * frequency(pitch) * time)
        frames_so_far += [pure * fade, (pure + NOISE * rng.uniform(-0.5, 0.5, SAMPLES)) * fade]
    return np.stack(frames_so_far).astype(np.float32)


def pitches(rng: np.random.Generator, course: str, register: str) -> list[int]:
    """A tune of this kind."""
    low = 0 if register == "low" else PITCHES // 2
    notes = sorted(int(p) for p in rng.integers(low, low + PITCHES // 2, size=NOTES))
    if course == "steady":
        return [notes[0]] * NOTES
    return notes if course == "rising" else notes[::-1]


def unheard(course: str, register: str) -> bool:
    """Whether it is for evaluation only."""
    return (course, register) in (("falling", "low"), ("rising", "high"))


def tune(rng: np.random.Generator, split: Split) -> Question:
    """What is to be played."""
    while True:
        course, register = COURSES[rng.integers(len(COURSES))], REGISTERS[rng.integers(len(REGISTERS))]
        if unheard(course, register) == (split == "eval"):
            return Question((f"a {register} {course} tune",), f"{register} {course}", 1)
