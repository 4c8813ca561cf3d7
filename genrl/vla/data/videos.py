"""Episodes to look at: gifs under their instruction, and contact sheets. Green has succeeded, red has failed.

Deterministic: equal clips give equal bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from genrl.runtime.folder.run import write_atomic
from genrl.runtime.show.pictures import save_png

Pictures = NDArray[np.uint8]

_PAPER, _INK, _GREY = (255, 255, 255), (30, 30, 34), (105, 105, 112)
_GREEN, _RED = (22, 140, 62), (205, 38, 38)
_FONT_SIZE, _LINE, _GAP, _BORDER = 14, 19, 8, 4
_HOLD_S = 1.0  # the last frame of a gif stays, so that the outcome can be seen before it begins again
_GIF_FPS = 50
_LABEL_WIDTH = 170


class Clip(NamedTuple):
    """An episode as it was rendered: frames uint8 [T, H, W, 3], the instruction, and whether it succeeded."""

    frames: Pictures
    instruction: str
    success: bool


def write_clips(
    folder: Path, clips: Sequence[Clip], *, fps: int, each: int = 4, size: int = 240, moments: int = 8
) -> list[Path]:
    """The first `each` successes and failures as `success-00.gif`, `failure-00.gif`..., and all these in `sheet.png`.

    fps: frames per second of the clips. size: height of a picture in pixels.
    moments: pictures per row of the sheet. Returns the files. Raises ValueError for a clip without frames.
    """
    files: list[Path] = []
    chosen: list[Clip] = []
    for success in (True, False):
        for number, clip in enumerate([clip for clip in clips if clip.success == success][:each]):
            frames = captioned(clip, size)
            name = f"{_outcome(clip)}-{number:02d}"
            files.append(write_gif(folder / f"{name}.gif", frames, fps))
            chosen.append(clip)
    if chosen:
        files.append(save_png(contact_sheet(chosen, moments=moments), folder / "sheet.png"))
    return files


def captioned(clip: Clip, size: int = 240) -> Pictures:
    """The frames of a clip at height `size` in a border of the outcome's colour, below the instruction and the frame.

    uint8 [T, h, w, 3], h and w even. Small pictures grow by a whole factor without smoothing.
    """
    pictures = [_fitted(frame, size) for frame in _checked(clip).frames]
    width = max(pictures[0].width + 2 * _BORDER, 160)
    lines = _wrap(clip.instruction, width - 2 * _GAP)
    high = pictures[0].height + 2 * _BORDER
    top = _GAP + _LINE * (len(lines) + 1) + _GAP // 2
    top += (top + high) % 2
    height = top + high
    paper = Image.new("RGB", (width + width % 2, height), _PAPER)
    draw = ImageDraw.Draw(paper)
    for i, line in enumerate(lines):
        draw.text((_GAP, _GAP + i * _LINE), line, fill=_INK, font=_font())
    left = (paper.width - pictures[0].width) // 2
    draw.rectangle((left - _BORDER, top, left + pictures[0].width + _BORDER - 1, height - 1), fill=_colour(clip))
    frames = []
    for t, picture in enumerate(pictures):
        page = paper.copy()
        page.paste(picture, (left, top + _BORDER))
        ended = t == len(pictures) - 1
        text = f"frame {t} of {len(pictures) - 1}" + (f": {_outcome(clip)}" if ended else "")
        at = (_GAP, _GAP + len(lines) * _LINE)
        ImageDraw.Draw(page).text(at, text, fill=_colour(clip) if ended else _GREY, font=_font())
        frames.append(np.asarray(page))
    return np.stack(frames)


def contact_sheet(clips: Sequence[Clip], *, moments: int = 8, size: int = 120) -> Image.Image:
    """A row per clip: instruction and outcome, then `moments` frames from the first to the last, evenly spaced.

    The number of each stands below it. Shorter clips have fewer. Raises ValueError where there is no clip, or no frame.
    """
    if not clips or moments < 2:
        raise ValueError(f"a sheet needs a clip and two moments at least, got {len(clips)} and {moments}")
    rows = [_Row(clip, moments, size) for clip in clips]
    width = _LABEL_WIDTH + max(row.width for row in rows) + _GAP
    sheet = Image.new("RGB", (width, sum(row.height for row in rows) + _GAP), _PAPER)
    draw, top = ImageDraw.Draw(sheet), _GAP
    for row in rows:
        row.paint(sheet, draw, top)
        top += row.height
    return sheet


def write_gif(path: Path, frames: Pictures, fps: float) -> Path:
    """Frames uint8 [T, H, W, 3] as a gif that repeats; it appears complete or not at all.

    Above 50 frames a second some are left out: viewers show a gif of more in slow motion.
    """
    stride = math.ceil(fps / _GIF_FPS)
    frame_numbers = [*range(0, len(frames) - 1, stride), len(frames) - 1]
    pictures = [Image.fromarray(frames[number]) for number in frame_numbers]
    # One palette for all frames, of eight of them: colours that do not flicker.
    sample = np.concatenate(frames[np.unique(np.linspace(0, len(frames) - 1, 8).round().astype(int))])
    palette = Image.fromarray(sample).quantize(256)
    first, *others = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    durations = [round(1000 * stride / fps)] * (len(pictures) - 1) + [round(1000 * _HOLD_S)]
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    write_atomic(path, file.getvalue())
    return path


class _Row:
    """One clip of a contact sheet."""

    def __init__(self, clip: Clip, moments: int, size: int) -> None:
        last = len(_checked(clip).frames) - 1
        self.clip = clip
        self.numbers = sorted({round(i * last / (moments - 1)) for i in range(moments)})
        self.pictures = [_fitted(clip.frames[number], size) for number in self.numbers]
        self.lines = _wrap(clip.instruction, _LABEL_WIDTH - 2 * _GAP)
        self.tile = self.pictures[0].width + _BORDER
        self.width = self.tile * len(self.pictures) + _BORDER
        self.height = max(self.pictures[0].height + 2 * _BORDER + _LINE, (len(self.lines) + 1) * _LINE) + _GAP

    def paint(self, sheet: Image.Image, draw: ImageDraw.ImageDraw, top: int) -> None:
        for i, line in enumerate(self.lines):
            draw.text((_GAP, top + i * _LINE), line, fill=_INK, font=_font())
        at = (_GAP, top + len(self.lines) * _LINE)
        draw.text(at, _outcome(self.clip), fill=_colour(self.clip), font=_font())
        high = self.pictures[0].height
        box = (_LABEL_WIDTH, top, _LABEL_WIDTH + self.width - 1, top + high + 2 * _BORDER - 1)
        draw.rectangle(box, fill=_colour(self.clip))
        for place, (number, picture) in enumerate(zip(self.numbers, self.pictures, strict=True)):
            left = _LABEL_WIDTH + _BORDER + place * self.tile
            sheet.paste(picture, (left, top + _BORDER))
            draw.text((left, top + high + 2 * _BORDER), str(number), fill=_GREY, font=_font())


def _checked(clip: Clip) -> Clip:
    if clip.frames.ndim != 4 or not len(clip.frames) or clip.frames.shape[-1] != 3 or clip.frames.dtype != np.uint8:
        raise ValueError(
            f"the clip of {clip.instruction!r} must be uint8 [T, H, W, 3] with a frame at least, got "
            f"{clip.frames.dtype} {list(clip.frames.shape)}"
        )
    return clip


def _outcome(clip: Clip) -> str:
    return "success" if clip.success else "failure"


def _colour(clip: Clip) -> tuple[int, int, int]:
    return _GREEN if clip.success else _RED


def _fitted(frame: Pictures, size: int) -> Image.Image:
    """About `size` high: a picture of up to half of it grows by a whole factor, all others are scaled smoothly."""
    image = Image.fromarray(frame)
    if 2 * image.height <= size:
        factor = math.ceil(size / image.height)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return image.resize((max(1, round(image.width * size / image.height)), size), Image.Resampling.LANCZOS)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)  # Pillow's own, so that pictures are equal on all machines


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` pixels; a word that is wider has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and _font().getlength(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines
