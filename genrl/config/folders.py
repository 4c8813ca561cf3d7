"""Model folders on disk, as far as a configuration is checked against them. No weights, no torch."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def looks_local(path: str) -> bool:
    """Whether `path` is written like a folder rather than a hub id (org/name)."""
    return path.startswith((".", "/", "~", "assets/")) or path.count("/") != 1


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
