"""The pictures of a question changed on purpose: patches made black (VPPO), degraded (Q-Hawkeye), or all black."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from genrl.vlm.policies.processor import Parts, Prompt, open_image
from genrl.vlm.policies.videos import Clip

BLANK = 112
"""Width and height of a picture in place of one that cannot be read: few tokens, and enough for every processor."""

Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def with_pictures(prompt: Prompt, change: Change, rng: np.random.Generator) -> Prompt:
    """A question about changed pictures of the same size. All frames of a clip are changed alike."""

    def changed_clip(clip: Clip) -> Clip:
        seed = int(rng.integers(2**63))
        opened = [open_image(frame, prompt.where) for frame in clip.frames]
        return replace(clip, frames=tuple(change(frame, np.random.default_rng(seed)) for frame in opened))

    return _with(prompt, lambda picture: change(open_image(picture, prompt.where), rng), changed_clip)


def blank(prompt: Prompt) -> Prompt:
    """A question about black pictures of one size, whatever its own are: they need not be readable."""
    nothing = Image.new("RGB", (BLANK, BLANK))
    return _with(prompt, lambda _: nothing, lambda clip: replace(clip, frames=(nothing,) * len(clip.frames)))


def _with(prompt: Prompt, picture: Callable[[Image.Image | Path], Image.Image], clip: Callable[[Clip], Clip]) -> Prompt:
    """A prompt with what these make of its pictures and clips, in their order."""

    def changed(parts: Parts) -> Parts:
        return tuple(
            part if isinstance(part, str) else clip(part) if isinstance(part, Clip) else picture(part) for part in parts
        )

    before = tuple(turn._replace(parts=changed(turn.parts)) for turn in prompt.before)
    return replace(prompt, before=before, parts=changed(prompt.parts))


def masked(share: float, patch: int) -> Change:
    """Each patch black with this probability, independently (VPPO: .5 of patches of 14 pixels)."""

    def change(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        pixels = np.array(picture)
        rows, columns = (-(-side // patch) for side in pixels.shape[:2])
        gone = rng.random((rows, columns)) < share
        covered = gone.repeat(patch, 0).repeat(patch, 1)[: pixels.shape[0], : pixels.shape[1]]
        return Image.fromarray(np.where(covered[..., None], 0, pixels).astype(np.uint8))

    return change


def black(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Nothing to see."""
    return Image.new("RGB", picture.size)


def degraded(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Two of noise, blur, JPEG and darkness, one after the other (Q-Hawkeye; strengths are ours)."""
    for kind in rng.permutation(4)[:2]:
        if kind == 0:
            noisy = np.array(picture, dtype=np.float64) + rng.normal(0, 32, size=(*picture.size[::-1], 3))
            picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        elif kind == 1:
            picture = picture.filter(ImageFilter.GaussianBlur(max(picture.size) / 40))
        elif kind == 2:
            stream = io.BytesIO()
            picture.save(stream, "JPEG", quality=10)
            picture = Image.open(stream).convert("RGB")
        else:
            picture = picture.point([round(value * 0.4) for value in range(256)] * 3)
    return picture
