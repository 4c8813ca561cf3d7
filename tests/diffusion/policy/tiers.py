"""Which families the fast tier runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

ARCHITECTURES = (
    *("sd15", "sd3", "flux", "qwen_image", "sana", "flux_kontext", "sd15_inpaint"),
    *("wan22", "cogvideox", "mochi", "ace_step"),
)
"""A family of each: UNet, joint and linear transformers, with pictures to edit or to fill, two experts, v-prediction of
videos, time that runs the other way, sound."""


def tiered(names: Iterable[str], fast: Collection[str] = ARCHITECTURES) -> list[Any]:
    """Parameters of a test: those that are not in `fast` are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
