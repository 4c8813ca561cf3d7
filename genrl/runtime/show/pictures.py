"""Labelled pictures: grids, before/after, best and worst of a group, video as a strip of frames.

Everything is deterministic: equal images and texts give equal bytes. Text stands beside images, never on them.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from PIL import Image, ImageDraw, ImageFont

from genrl.runtime.folder.run import write_atomic

if TYPE_CHECKING:  # `genrl watch` shows pictures without torch
    from torch import Tensor

Picture: TypeAlias = "Image.Image | Tensor"

_LOW, _HIGH = 160, 256  # heights between which an image is shown
_WIDEST = 1240  # of a sheet; a single tile may be wider
_FONT_SIZE, _LINE, _GAP = 13, 17, 10
_PAPER, _INK, _GREY, _FRAME = (255, 255, 255), (30, 30, 34), (105, 105, 112), (214, 214, 220)
_NO_BREAK = "\u00a0"
_CAPTION_LINES, _LABEL_LINES = 4, 3


@dataclass(frozen=True)
class Samples:
    """The pictures of one evaluation as `save_samples` wrote them; a reward is None where there was no score."""

    step: int
    files: list[Path]
    prompts: list[str]
    rewards: dict[str, list[float | None]]


def to_pil(picture: Picture) -> Image.Image:
    """float [3,H,W] in [0,1] (clamped), or a video [F,3,H,W] as a strip of four frames, or a PIL image."""
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    if picture.ndim == 4:
        return filmstrip(picture)
    array = picture.detach().float().nan_to_num().clamp(0, 1).mul(255).round().byte()
    return Image.fromarray(array.permute(1, 2, 0).cpu().contiguous().numpy())


def filmstrip(frames: Tensor, count: int = 4) -> Image.Image:
    """frames [F,3,H,W] in [0,1]: `count` of them, evenly spaced from the first to the last, side by side."""
    count = min(count, len(frames))
    chosen = [to_pil(frames[round(i * (len(frames) - 1) / max(count - 1, 1))]) for i in range(count)]
    width, height = chosen[0].size
    strip = Image.new("RGB", (count * width + (count - 1) * 2, height), _PAPER)
    for i, frame in enumerate(chosen):
        strip.paste(frame, (i * (width + 2), 0))
    return strip


def grid(
    pictures: Sequence[Picture],
    captions: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    *,
    columns: int | None = None,
    title: str = "",
) -> Image.Image:
    """Tiles in rows: the picture, its label (the reward) and its caption (the prompt, wrapped) below it.

    columns: default about as many as rows, at most 8. Raises ValueError where the lengths differ.
    """
    cells = [[picture] for picture in pictures]
    rows = [[label] for label in labels] if labels is not None else None
    return _sheet(cells, rows, captions, columns or min(8, math.ceil(math.sqrt(len(cells)))), title)


def side_by_side(
    left: Sequence[Picture],
    right: Sequence[Picture],
    captions: Sequence[str],
    left_labels: Sequence[str],
    right_labels: Sequence[str],
    *,
    columns: int = 2,
    title: str = "",
) -> Image.Image:
    """Pairs of pictures with one caption below each pair: before and after, or best and worst."""
    cells = [list(pair) for pair in zip(left, right, strict=True)]
    labels = [list(pair) for pair in zip(left_labels, right_labels, strict=True)]
    return _sheet(cells, labels, captions, min(columns, len(cells)), title)


def best_and_worst(
    pictures: Sequence[Picture],
    rewards: Sequence[float | None],
    group: Sequence[int],
    prompts: Sequence[str],
    *,
    groups: int = 8,
) -> Image.Image | None:
    """The best and the worst picture of each of the first `groups` groups with two scores; None if there is none."""
    members: dict[int, list[int]] = {}
    for i, key in enumerate(group):
        if _is_score(rewards[i]):
            members.setdefault(key, []).append(i)
    ordered = [sorted(numbers, key=lambda i: (rewards[i], -i)) for numbers in members.values() if len(numbers) > 1]
    if not ordered:
        return None
    worst, best = [numbers[0] for numbers in ordered[:groups]], [numbers[-1] for numbers in ordered[:groups]]
    return side_by_side(
        [pictures[i] for i in best],
        [pictures[i] for i in worst],
        [prompts[i] for i in best],
        [f"best {_number(rewards[i])}" for i in best],
        [f"worst {_number(rewards[i])}" for i in worst],
        title="Best and worst of each group",
    )


def save_png(picture: Image.Image, path: Path) -> Path:
    """The file appears complete or not at all."""
    data = io.BytesIO()
    picture.save(data, "PNG")
    write_atomic(path, data.getvalue())
    return path


def save_samples(
    folder: Path,
    step: int,
    pictures: Sequence[Picture],
    prompts: Sequence[str],
    rewards: Mapping[str, Sequence[float | None]],
) -> Image.Image:
    """`folder/step-<step>/00.png...` and `samples.json` (last), and the grid `folder/step-<step>.png`, returned.

    folder: the run's samples folder. Pictures above 512 pixels are stored at 512; small ones as they are.
    """
    inner = folder / f"step-{step:06d}"
    images = [to_pil(picture) for picture in pictures]
    for i, image in enumerate(images):
        stored = image.copy()
        # The height is what is limited: a video is a strip of four frames, much wider than high.
        stored.thumbnail((max(512, 4 * stored.height), 512), Image.Resampling.LANCZOS)
        save_png(stored, inner / f"{i:02d}.png")
    scores = {name: [v if _is_score(v) else None for v in values] for name, values in rewards.items()}
    sheet = grid(images, prompts, reward_labels(scores, len(images)), title=f"Step {step}")
    save_png(sheet, folder / f"step-{step:06d}.png")
    record = {"step": step, "prompts": list(prompts), "rewards": scores}
    write_atomic(inner / "samples.json", json.dumps(record, indent=1))
    return sheet


def first_and_last(folder: Path) -> list[Samples]:
    """The first and the last complete set in a run's samples folder; only one, or none, where there are no more."""
    # By length first, else step-1000000 would come before step-999999.
    paths = sorted(folder.glob("step-*/samples.json"), key=lambda path: (len(path.parent.name), path))
    return [read_samples(path) for path in dict.fromkeys([*paths[:1], *paths[-1:]])]


def read_samples(path: Path) -> Samples:
    """The set of samples of a `samples.json`."""
    record = json.loads(path.read_text(encoding="utf-8"))
    files = [path.parent / f"{i:02d}.png" for i in range(len(record["prompts"]))]
    return Samples(record["step"], files, record["prompts"], record["rewards"])


def before_after(folder: Path, *, limit: int = 12) -> Image.Image | None:
    """The first and the last samples of a run beside each other; None where there are not two. Same prompts only, at
    most `limit`, spread evenly over those there are."""
    files = first_and_last(folder)
    if len(files) < 2:
        return None
    first, last = files[0], files[-1]
    shared = [i for i, prompt in enumerate(first.prompts) if last.prompts[i : i + 1] == [prompt]]
    if not shared:
        return None
    if len(shared) > limit:
        shared = [shared[k * len(shared) // limit] for k in range(limit)]
    labels = [
        [f"{word}: {text}" if text else word for text in reward_labels(samples.rewards, len(samples.prompts))]
        for word, samples in (("before", first), ("after", last))
    ]
    return side_by_side(
        [_open(first.files[i]) for i in shared],
        [_open(last.files[i]) for i in shared],
        [first.prompts[i] for i in shared],
        [labels[0][i] for i in shared],
        [labels[1][i] for i in shared],
        columns=3,
        title=f"Before (step {first.step}) and after (step {last.step}): same prompts, same noise",
    )


def reward_labels(rewards: Mapping[str, Sequence[float | None]], count: int) -> list[str]:
    """`shapes 0.83, ocr no score` for each of `count` pictures."""
    return [
        ", ".join(f"{name} {_number(values[i])}".replace(" ", _NO_BREAK) for name, values in rewards.items())
        for i in range(count)
    ]


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _is_score(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "no score"
    return f"{value:.2f}" if value == 0 or 0.01 <= abs(value) < 100 else f"{value:.2g}"


# -- layout -------------------------------------------------------------------------------------------------------


def _sheet(
    cells: Sequence[Sequence[Picture]],
    labels: Sequence[Sequence[str]] | None,
    captions: Sequence[str] | None,
    columns: int,
    title: str,
) -> Image.Image:
    """cells: the pictures of each tile, side by side; labels: one below each of them; captions: one per tile."""
    for name, texts in (("labels", labels), ("captions", captions)):
        if texts is not None and len(texts) != len(cells):
            raise ValueError(f"{len(cells)} tiles but {len(texts)} {name}: give one for each")
    if not cells:
        raise ValueError("no pictures to lay out")
    images = [[_fit(to_pil(picture)) for picture in cell] for cell in cells]
    slot = max(128, max(image.width for cell in images for image in cell))
    width = slot * len(images[0]) + _GAP // 2 * (len(images[0]) - 1)
    columns = max(1, min(columns, _WIDEST // (width + 2 * _GAP)))
    under = [[_wrap(text, slot, _LABEL_LINES) for text in row] for row in labels or [[""] * len(c) for c in cells]]
    below = [_wrap(text, width, _CAPTION_LINES) for text in captions or [""] * len(cells)]
    tiles = [_Tile(*parts, slot) for parts in zip(images, under, below, strict=True)]
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]

    top = _GAP + (_LINE + _GAP if title else 0)
    height = top + sum(sum(_row_heights(row)) + 2 * _GAP for row in rows) - _GAP
    sheet = Image.new("RGB", (columns * (width + 2 * _GAP), height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((_GAP, _GAP), "".join(_wrap(title, sheet.width - 3 * _GAP, 1)), fill=_INK, font=_font(_FONT_SIZE + 2))
    for row in rows:
        heights = _row_heights(row)
        for place, tile in enumerate(row):
            tile.paint(sheet, draw, _GAP + place * (width + 2 * _GAP), top, heights)
        top += sum(heights) + 2 * _GAP
    return sheet


@dataclass(frozen=True)
class _Tile:
    images: list[Image.Image]
    labels: list[list[str]]  # lines below each image
    caption: list[str]  # lines below them all
    slot: int  # width given to each image

    def paint(
        self, sheet: Image.Image, draw: ImageDraw.ImageDraw, x: int, y: int, heights: tuple[int, int, int]
    ) -> None:
        for j, (image, lines) in enumerate(zip(self.images, self.labels, strict=True)):
            left = x + j * (self.slot + _GAP // 2)
            sheet.paste(image, (left, y))
            draw.rectangle((left - 1, y - 1, left + image.width, y + image.height), outline=_FRAME)
            _write(draw, (left, y + heights[0]), lines, _INK)
        _write(draw, (x, y + heights[0] + heights[1]), self.caption, _GREY)


def _row_heights(row: Sequence[_Tile]) -> tuple[int, int, int]:
    """Heights of the images, the labels and the captions: a row is as high as its own texts need."""
    return (
        max(image.height for tile in row for image in tile.images) + 4,
        _LINE * max(len(lines) for tile in row for lines in tile.labels),
        _LINE * max(len(tile.caption) for tile in row),
    )


def _fit(image: Image.Image) -> Image.Image:
    """Tiny images grow by a whole factor without smoothing, large ones shrink smoothly."""
    if image.height < _LOW:
        factor = math.ceil(_LOW / image.height)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if image.height > _HIGH:
        return image.resize((max(1, round(image.width * _HIGH / image.height)), _HIGH), Image.Resampling.LANCZOS)
    return image


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)  # Pillow's own, so that pictures are equal on all machines


def _write(draw: ImageDraw.ImageDraw, at: tuple[int, int], lines: Sequence[str], colour: tuple[int, int, int]) -> None:
    for i, line in enumerate(lines):
        draw.text((at[0], at[1] + i * _LINE), line.replace(_NO_BREAK, " "), fill=colour, font=_font(_FONT_SIZE))


def _wrap(text: str, width: int, most: int) -> list[str]:
    """Lines no wider than `width` pixels, at most `most` of them; what does not fit ends in an ellipsis."""
    words = [word for word in re.split(r"[\x00-\x20\x7f]+", text[:2000]) if word]  # not at no-break spaces
    if not words:
        return []
    lines = [""]
    for word in words:
        joined = f"{lines[-1]} {word}".strip()
        if _wide(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for character in word:  # a word wider than the line is broken anywhere
            if _wide(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
        if len(lines) > most:
            break
    if len(lines) > most or len(text) > 2000:
        lines = lines[:most]
        while lines[-1] and _wide(lines[-1] + "...") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] = lines[-1].rstrip() + "..."
    return lines


def _wide(text: str) -> float:
    return _font(_FONT_SIZE).getlength(text.replace(_NO_BREAK, " "))
