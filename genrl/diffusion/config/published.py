"""Networks of published pipelines that are not on this machine yet: their shapes travel with the package."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from genrl.config.weight_files import unpacked
from genrl.diffusion.config.estimate import Component


@cache
def _table() -> Mapping[str, Any]:
    """`networks` by a name, and `pipelines`: hub id -> component -> name. benchmarks/published_shapes.py makes it."""
    table: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return table


def published(source: str) -> tuple[Component, ...]:
    """The networks of a hub id; none where the table does not know it. Their bytes on disk are not known (0)."""
    names = _table()["pipelines"].get(source, {})
    return tuple(_component(part, _table()["networks"][name]) for part, name in names.items())


def _component(part: str, network: Mapping[str, Any]) -> Component:
    shapes = dict(unpacked(network["shapes"]))
    return Component(part, network["class"], sum(map(math.prod, shapes.values())), 0, shapes, network["settings"])
