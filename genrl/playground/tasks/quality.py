"""How good a picture is, from 5.0 (as rendered) to 1.0 (Q-Hawkeye), and which of two is better (R1-Reward).

Pictures are scenes of the embedded world, arranged as `shapes` holds them out, degraded by noise, blur, JPEG or
darkness in nine strengths.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageFilter

from genrl.playground.shapes import draw
from genrl.playground.tasks import shapes
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES

STRENGTHS = 8  # steps from unharmed to worst
KINDS = ("noise", "blur", "jpeg", "dark")


def degraded(picture: Image.Image, kind: str, strength: float, rng: np.random.Generator) -> Image.Image:
    """RGB of the same size. strength: 0 (unharmed) to 1. Raises ValueError for an unknown kind."""
    if not strength:
        return picture
    if kind == "noise":
        noisy = np.array(picture, dtype=np.float64) + rng.normal(0, 110 * strength, size=(*picture.size[::-1], 3))
        return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    if kind == "blur":
        return picture.filter(ImageFilter.GaussianBlur(strength * max(picture.size) / 12))
    if kind == "jpeg":
        stream = io.BytesIO()
        small = picture.resize([max(4, round(side * (1 - 0.75 * strength))) for side in picture.size])
        small.save(stream, "JPEG", quality=round(40 - 36 * strength))
        return Image.open(stream).convert("RGB").resize(picture.size, Image.Resampling.NEAREST)
    if kind == "dark":
        return picture.point([round(value * (1 - 0.85 * strength)) for value in range(256)] * 3)
    raise ValueError(f"no degradation {kind!r}: {', '.join(KINDS)}")


def _scene(rng: np.random.Generator, split: Split) -> Image.Image:
    kinds = [
        (COLOURS[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))])
        for _ in range(int(rng.integers(3, shapes.MOST + 1)))
    ]
    return Image.fromarray(draw(shapes.scene(rng, split, kinds), shapes.PICTURE))


def rated(rng: np.random.Generator, split: Split) -> Question:
    """A picture and its score, 5 - 4 strength, in steps of a half."""
    picture, step = _scene(rng, split), int(rng.integers(STRENGTHS + 1))
    kind = KINDS[rng.integers(len(KINDS))]
    picture_shown = degraded(picture, kind, step / STRENGTHS, rng)
    # strong degradations are plain to see, weak ones are not
    columns = {"harm": kind if step else "none"}
    return Question(
        (picture_shown, "how good is this picture , from 1 to 5 ?"), f"{5 - step / 2:.1f}", STRENGTHS - step, columns
    )


def better(rng: np.random.Generator, split: Split) -> Question:
    """One scene degraded twice in the same way, three strengths or more apart; the answer is the better one, A or B."""
    picture, kind = _scene(rng, split), KINDS[rng.integers(len(KINDS))]
    apart = int(rng.integers(3, STRENGTHS + 1))
    least = int(rng.integers(STRENGTHS + 1 - apart))
    pictures = [degraded(picture, kind, step / STRENGTHS, rng) for step in (least, least + apart)]
    answer = "AB"[rng.integers(2)]
    pair = pictures if answer == "A" else pictures[::-1]
    return Question((*pair, "which picture is better , A or B ?"), answer, STRENGTHS - apart)
