"""What an OpenVLA's folder says of the data sets that it was trained on. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from genrl.config.folders import read_json

STATISTICS = "dataset_statistics.json"
"""Of a fine-tuned model; a pretrained one has them in config.json, as `norm_stats`."""


def is_openvla(config: dict[str, Any]) -> bool:
    """Whether a folder's config.json is that of an OpenVLA."""
    return config.get("model_type") == "openvla"


def data_sets(folder: Path) -> dict[str, dict[str, Any]]:
    """Statistics by name of the data set."""
    return (read_json(folder / "config.json").get("norm_stats") or {}) | read_json(folder / STATISTICS)


def data_set(names: Iterable[str], key: str | None, folder: Path) -> str:
    """The name that `unnorm_key` means: itself, itself with _no_noops, as RLinf and SimpleVLA-RL read it, or the only
    one. Raises ValueError naming the nearest ones."""
    available = sorted(names)
    if key is None and len(available) == 1:
        return available[0]
    for name in (key, f"{key}_no_noops"):
        if name in available:
            return str(name)
    listed = get_close_matches(key or "", available, n=3, cutoff=0.0) if key else available[:3]
    problem = f"found {key!r}" if key else "nothing is written"
    text = f"must name one of the {len(available)} data sets that {folder} has statistics of, {problem}"
    raise ValueError(f"policy.oft.unnorm_key: {text}; the nearest: {', '.join(listed) or 'none'}")
