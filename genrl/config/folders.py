"""Model folders on disk, as far as a configuration is checked against them. No weights, no torch."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Either has a transformers model that sees or hears."""


def looks_local(path: str) -> bool:
    """Whether `path` is written like a folder rather than a hub id (org/name)."""
    return path.startswith((".", "/", "~", "assets/")) or path.count("/") != 1


def is_hub_id(path: str) -> bool:
    """Whether `path` is org/name, and nothing lies here that could be meant: neither it, nor a folder like `org`."""
    return not looks_local(path) and not Path(path).exists() and not Path(path.partition("/")[0]).is_dir()


def hub_file(source: str) -> tuple[str, str | None]:
    """(hub id, file) of an adapter on the hub, which may be written org/name:file.safetensors."""
    name, _, file = source.partition(":")
    return name, file or None


def is_single_file(path: str) -> bool:
    """Whether `path` is written like a checkpoint in one file."""
    return path.endswith(".safetensors") or is_gguf(path)


def is_gguf(path: str) -> bool:
    """Whether `path` is written like a denoiser in llama.cpp's format, quantised."""
    return path.endswith(".gguf")


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object of a model folder; empty where there is no such file or it is broken."""
    if not path.is_file() or path.stat().st_size > 10_000_000:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def nearest_folder(path: Path) -> str:
    """What may have been meant by a folder that does not exist, as the end of a message."""
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {path.parent / close[0]}?" if close else "; a hub id is written org/name"


def no_transformers_model(key: str, given: str, notes: list[str]) -> str | None:
    """What is wrong with the value of a key that names a saved transformers model; None for a folder of one, and for a
    hub id, of which `notes` is told."""
    path = Path(given).expanduser()
    if not path.is_dir():
        if looks_local(given):
            return f"no such folder: {path}{nearest_folder(path)}"
        notes.append(f"{key}: {given} is loaded from the hub when training starts")
    elif "model_type" not in read_json(path / "config.json"):
        return f"{path} has no config.json with a model_type, so it is no saved transformers model"
    return None


def near(path: Path) -> str:
    """A hint at the end of an error: folders of a similar name, or else the runs beside it."""
    around = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, [name for name in around if name != path.name], n=3, cutoff=0.5)
    paths = [str(path.parent / name) for name in close]
    return f"; did you mean {' or '.join(paths)}?" if paths else runs_in(path.parent)


def runs_in(folder: Path) -> str:
    """The runs of a folder, as the end of a message."""
    runs = sorted(str(file.parent) for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.yaml"))
    return f"; runs in {folder}: {', '.join(runs[:5])}" if runs else ""
