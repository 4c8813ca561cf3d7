"""Pictures cut into 2 x 2 pieces and shuffled, and one object found by its box or a point in it (Jigsaw-R1).

A picture shows a shape before a sky and a ground, so each piece says where it belongs. The combinations of colour and
shape that the embedded world holds out are for evaluation only; boxes are held out by the arrangement of the shapes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from genrl.playground.shapes import SIZE, draw, held_out
from genrl.playground.tasks import shapes
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, PALETTE, SHAPES, Group, outline

SIDE = 2  # pieces a side
PIXELS = shapes.PICTURE
UNITS = 12  # of a picture's side, in which boxes are written
PLACES = {
    (0, -1): "left",
    (0, 1): "right",
    (-1, 0): "above",
    (1, 0): "below",
    (-1, -1): "above left",
    (-1, 1): "above right",
    (1, -1): "below left",
    (1, 1): "below right",
}
"""Where a piece lies, by rows and columns from the other one; its letter is its place in this list, A to H."""


def view(rng: np.random.Generator, split: Split) -> np.ndarray:
    """A picture, uint8 [48, 48, 3], with one big shape across all four quarters."""
    while True:
        colour, shape = (kinds[rng.integers(len(kinds))] for kinds in (COLOURS, SHAPES))
        if held_out(Group(1, colour, shape)) == (split == "eval"):
            break
    big = 4 * PIXELS
    canvas = Image.new("RGB", (big, big), tuple(int(c) for c in rng.integers((170, 200, 235), (200, 230, 255))))
    pen = ImageDraw.Draw(canvas)
    ground = tuple(int(c) for c in rng.integers((70, 110, 60), (120, 140, 90)))
    pen.rectangle((0, big * rng.uniform(0.52, 0.62), big, big), fill=ground)
    centre, radius = big * rng.uniform(0.44, 0.56, 2), big * rng.uniform(0.24, 0.32)
    pen.polygon([(float(x), float(y)) for x, y in centre + radius * outline(shape)], fill=PALETTE[colour])
    return np.array(canvas.reduce(4))


def pieces(picture: np.ndarray) -> list[np.ndarray]:
    """The quarters by rows."""
    half = PIXELS // SIDE
    return [picture[y : y + half, x : x + half] for y in (0, half) for x in (0, half)]


def full(rng: np.random.Generator, split: Split) -> Question:
    """The shuffled picture. The answer names for each place, by rows, the shown piece that belongs there, from 1."""
    parts = pieces(view(rng, split))
    while (order := rng.permutation(SIDE**2)).tolist() == [0, 1, 2, 3]:
        pass
    shuffled = [parts[k] for k in order]  # piece k of the picture is shown at the place where `order` has k
    picture = np.vstack([np.hstack(shuffled[:2]), np.hstack(shuffled[2:])])
    answer = np.argsort(order)
    moved = int((answer != np.arange(SIDE**2)).sum())
    return Question(
        (Image.fromarray(picture), "which piece belongs in every place ?"), " ".join(str(k + 1) for k in answer), moved
    )


def pair(rng: np.random.Generator, split: Split) -> Question:
    """Two pieces as two pictures. The answer is the letter of where the second lies, seen from the first."""
    parts = pieces(view(rng, split))
    first, second = rng.choice(SIDE**2, 2, replace=False)
    offset = (second // SIDE - first // SIDE, second % SIDE - first % SIDE)
    letters = dict(zip(PLACES, "ABCDEFGH", strict=True))
    options = " ".join(f"{letters[place]} {words}" for place, words in PLACES.items())
    pictures = [Image.fromarray(parts[k]).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC) for k in (first, second)]
    question = f"where is the second piece , seen from the first ? {options}"
    return Question((*pictures, question), letters[offset], abs(offset[0]) + abs(offset[1]))


def located(rng: np.random.Generator, split: Split, ask: Literal["box", "point"]) -> Question:
    """Three shapes of three colours; the answer is the box of one, `left top right bottom` in twelfths of the picture,
    or a point in it, `x y`."""
    colours = [COLOURS[k] for k in rng.permutation(len(COLOURS))[:3]]
    scene = shapes.scene(rng, split, [(colour, SHAPES[rng.integers(len(SHAPES))]) for colour in colours])
    thing = scene.things[rng.integers(3)]
    corners = (outline(thing.shape) * thing.radius + (thing.x, thing.y)) * (UNITS / SIZE)
    box = [round(float(edge)) for edge in (*corners.min(0), *corners.max(0))]
    middle = [(box[k] + box[k + 2]) // 2 for k in (0, 1)]
    name = f"{thing.colour} {thing.shape}"
    request = "give its box ." if ask == "box" else "give a point in it ."
    answer = " ".join(map(str, box if ask == "box" else middle))
    picture = Image.fromarray(draw(scene, PIXELS))
    return Question((picture, f"where is the {name} ? {request}"), answer, 1, {"box": box})


def box(rng: np.random.Generator, split: Split) -> Question:
    """Ask where a shape is, as a box."""
    return located(rng, split, "box")


def point(rng: np.random.Generator, split: Split) -> Question:
    """Ask where a shape is, as a point."""
    return located(rng, split, "point")
