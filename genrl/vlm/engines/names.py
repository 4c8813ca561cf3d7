"""Names of weights for an engine whose modules are nested deeper than the checkpoint says.

transformers takes a level of modules away now and then (`vision_tower.vision_model.encoder` became
`vision_tower.encoder`). A checkpoint keeps the names that it was saved with, and so does a policy loaded from it; an
engine that was written before the change refuses those saved after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def nested(names: Iterable[str], engine: Iterable[str], mapped: Callable[[str], str | None]) -> dict[str, str]:
    """Each name of a checkpoint, with the levels added that the engine has besides.

    engine: names of its parameters; mapped: its own rule from a checkpoint's names to those, None for weights that it
    ignores. A level is added where a module of the engine has no child of the next name, and just one of its children
    has; what else the checkpoint has in that module goes there too, for the engine to leave out. All else is left to
    the engine, which splits and joins weights in its own ways (`q_proj` is in `qkv_proj`).
    """
    tree: dict[str, Any] = {}
    for name in engine:
        node = tree
        for part in name.split("."):
            node = node.setdefault(part, {})
    paths = {name: (mapped(name) or "").split(".") for name in names}
    levels: dict[tuple[str, ...], str] = {}
    for path in paths.values():
        _places(path, tree, levels)
    return {name: _with_levels(name, path, _places(path, tree, levels)) for name, path in paths.items()}


def _places(path: list[str], node: dict[str, Any], levels: dict[tuple[str, ...], str]) -> list[tuple[int, str]]:
    """Places in `path` before which a level is missing, with its name. Those found are kept in `levels` by module."""
    found, at = [], tuple[str, ...]()
    for place, part in enumerate(path):
        if part not in node:
            inside = [level for level, children in node.items() if part in children]
            if at and len(inside) == 1:
                levels.setdefault(at, inside[0])
            if at not in levels:
                break
            found.append((place, levels[at]))
            node, at = node[levels[at]], (*at, levels[at])
        if part not in node:
            break
        node, at = node[part], (*at, part)
    return found


def _with_levels(name: str, path: list[str], places: list[tuple[int, str]]) -> str:
    """`name`, whose end is that of `path`: the engine's own rule changes beginnings."""
    parts = name.split(".")
    for place, level in reversed(places):
        at = len(parts) - (len(path) - place)
        if at < 1 or parts[at] != path[place]:
            return name
        parts.insert(at, level)
        path = [*path[:place], level, *path[place:]]
    return ".".join(parts)
