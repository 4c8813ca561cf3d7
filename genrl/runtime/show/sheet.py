"""A few samples as rewards and policy see them, for a person to look at: what was asked, scores, expected answers as
read, pictures, normalised numbers. `genrl doctor FILE` draws it before a run; the report of a run opens with it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrl.runtime.folder.run import write_atomic
from genrl.runtime.show.pages import render
from genrl.runtime.show.pictures import Picture, save_png, to_pil

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 4
"""Samples of a sheet."""
NAME = "sheet"
"""Folder among the samples of a run, and its file."""
_LARGEST, _LONGEST = 512, 4000


@dataclass(frozen=True)
class Look:
    """One sample: its prompt, question or instruction, what is known of it, and its pictures, each by name."""

    text: str
    facts: Mapping[str, str]
    pictures: Sequence[tuple[str, Picture]] = ()


@dataclass(frozen=True)
class ContactSheet:
    """Samples, and a table of numbers (its first row is the header), empty where there are none."""

    looks: Sequence[Look]
    numbers: Sequence[Sequence[str]] = ()


def score_text(value: float) -> str:
    """A score for a person: none is no 0."""
    return "no score" if math.isnan(value) else f"{value:.3f}"


def dimensions(raw: Mapping[str, Tensor], normalised: Mapping[str, Tensor]) -> list[list[str]]:
    """The table of numbers [F, D] by name: each dimension's range as it comes and as the policy reads it."""
    table = [["dimension", "least", "most", "normalised, least", "most", "mean"]]
    for name, values in normalised.items():
        for place in range(values.shape[-1]):
            column = raw[name][:, place] if name in raw and place < raw[name].shape[-1] else None
            ends = ["padded", ""] if column is None else [f"{float(column.min()):.4g}", f"{float(column.max()):.4g}"]
            read = values[:, place].float()
            table.append(
                [f"{name}[{place}]", *ends, *(f"{float(n):.3f}" for n in (read.min(), read.max(), read.mean()))]
            )
    return table


def save(sheet: ContactSheet, folder: Path) -> None:
    """`folder/sheet.json` (last) and the pictures beside it, of 512 pixels at most."""
    looks = []
    for number, look in enumerate(sheet.looks):
        names = []
        for place, (name, picture) in enumerate(look.pictures):
            image = to_pil(picture)
            size = f"{image.width} x {image.height}"
            image.thumbnail((4 * _LARGEST, _LARGEST))
            save_png(image, folder / f"{number}-{place}.png")
            names.append([f"{name}, {size}", f"{number}-{place}.png"])
        facts = {name: value[:_LONGEST] for name, value in look.facts.items()}
        looks.append({"text": look.text[:_LONGEST], "facts": facts, "pictures": names})
    record = {"looks": looks, "numbers": [list(row) for row in sheet.numbers]}
    write_atomic(folder / f"{NAME}.json", json.dumps(record, indent=1))


def read(folder: Path) -> dict[str, Any]:
    """What the template `sheet_part.html` shows: the saved sheet with its pictures inside; one without looks where none
    was saved."""
    file = folder / f"{NAME}.json"
    if not file.is_file():
        return {"looks": [], "numbers": []}
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for look in record["looks"]:
        look["pictures"] = [(name, _source(folder / Path(png).name)) for name, png in look["pictures"]]
    return record


def write_page(folder: Path, title: str) -> Path:
    """`folder/sheet.html` of the sheet that is saved there."""
    page = folder / f"{NAME}.html"
    write_atomic(page, render("sheet.html", {"name": title, "sheet": read(folder)}))
    return page


def _source(png: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode('ascii')}"
