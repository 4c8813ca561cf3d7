"""One offline HTML page of a run: curves, pictures, prompts, timings, configuration. Also of a crashed or running one.

It is what `genrl watch` shows, from the same templates, as one file: no script, no reference to a network.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

from genrl.runtime.folder.run import Run, read_metrics, write_atomic
from genrl.runtime.show import sheet
from genrl.runtime.show.pages import render, views
from genrl.runtime.show.pages.state import Followed, over, warnings
from genrl.runtime.show.pictures import before_after

_PAGE_BYTES = 4_900_000
_WIDEST = 1640
_MOST_PROMPTS = 500


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder. Raises ValueError where it holds no run, or a row that is none."""
    run = Followed(folder)
    if not run.exists:
        raise ValueError(f"{folder} holds no run: there is neither config.yaml nor metrics.jsonl in it")
    run.read_config()
    run.read_info()
    run.add(read_metrics(run.run.metrics))
    values = _values(run)
    # Pictures take what the rest leaves: the page is to be sent by mail and opened at once.
    room = _PAGE_BYTES - len(render("report.html", values | {"pictures": Pictures()}).encode())
    write_atomic(run.run.report, render("report.html", values | {"pictures": _pictures(run.run, room)}))
    return run.run.report


def _values(run: Followed) -> dict[str, Any]:
    """What the template shows beside pictures."""
    state = "finished" if over(run) else "stopped or still running"
    done = f"{run.done} iterations" if run.planned is None else f"{run.done} of {run.planned} iterations, {state}"
    table, left_out = views.prompt_table(run.run, _MOST_PROMPTS)
    return {
        "name": run.name,
        "facts": [done, *views.facts(run)],
        "command": " ".join(run.info.get("command", [])),
        "has_rows": bool(run.rows),
        "sheet": sheet.read(run.run.samples / sheet.NAME),
        "warnings": list(warnings(run)),
        "title": "Success" if views.acts(run) else "Reward",
        "headlines": [views.headline_figure([run], headline) for headline in views.headlines([run])],
        "gains": views.gains([run]),
        "sections": [
            (s.title, [views.figure([run], key) for key in s.keys], s.constants) for s in views.sections([run])
        ],
        "timings": views.timings([run]),
        "prompts": table,
        "prompts_left_out": left_out,
        "config": run.config,
        "versions": [["package", "version"], *map(list, run.info.get("versions", {}).items())],
    }


class Pictures:
    """What fits into the page, as data URIs, and what is said of the rest."""

    def __init__(self) -> None:
        self.sheets: list[tuple[str, str, int]] = []
        """(name, source, width in pixels)"""
        self.films: list[tuple[str, str]] = []
        """(name, source)"""
        self.notes: list[str] = []


def _pictures(run: Run, room: int) -> Pictures:
    """Before and after, best and worst, then the grids from the newest back, while there is room (bytes)."""
    pictures = Pictures()
    pair = before_after(run.samples)
    captioned: list[tuple[str, Image.Image]] = [("Before and after", pair)] if pair is not None else []
    for name, path in views.pictures(run):
        try:
            with Image.open(path) as file:
                captioned.append((name, file.convert("RGB")))
        except OSError:
            pictures.notes.append(f"{path.name} cannot be read.")
    for i, (name, image) in enumerate(captioned):
        kind, data = _encode(image)
        room -= len(data) * 4 // 3 + 500  # base64
        if room < 0:
            pictures.notes.append(f"{len(captioned) - i} more pictures are in samples/.")
            break
        pictures.sheets.append((name, _source(kind, data), image.width))
    for path in views.films(run):
        data = path.read_bytes()
        room -= len(data) * 4 // 3 + 500
        if room < 0:
            pictures.notes.append(f"More films are in {path.parent.relative_to(run.folder)}/.")
            break
        pictures.films.append((path.stem, _source("gif", data)))
    return pictures


def _source(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _encode(image: Image.Image) -> tuple[str, bytes]:
    """(format, bytes): PNG where it is small, which it is for drawings, else JPEG."""
    if image.width > _WIDEST:
        image = image.resize((_WIDEST, round(image.height * _WIDEST / image.width)), Image.Resampling.LANCZOS)
    files = {}
    for kind, quality in (("png", {}), ("jpeg", {"quality": 85})):
        buffer = io.BytesIO()
        image.save(buffer, kind.upper(), **quality)
        files[kind] = buffer.getvalue()
    kind = "png" if len(files["png"]) < 2 * len(files["jpeg"]) else "jpeg"
    return kind, files[kind]
