"""What a process of several runs: importable by the children."""

from __future__ import annotations

from pathlib import Path

from genrl.config import VLMConfig, load
from genrl.vlm.train import train


def run(file: str) -> None:
    """Train as a file says."""
    config = load(Path(file))
    assert isinstance(config, VLMConfig)
    train(config)
