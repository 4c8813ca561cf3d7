"""What methods share: how far a phase is, as the progress bar shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genrl.diffusion.methods.diffusion_nft import train as diffusion_nft
from genrl.diffusion.methods.flow_grpo import train as flow_grpo
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

TRAINERS: dict[str, dict[str, Any]] = {
    "steps": {"algorithm": "flow_grpo"},
    "updates and epochs": {"algorithm": "flow_grpo", "updates_per_iteration": 2, "inner_epochs": 3},
    "window": {"algorithm": "flow_grpo", "window": {"size": 1}},
    "diffusion_nft": {**runs.NFT, "inner_epochs": 2, "timesteps_per_sample": 1},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_bar_of_training_fills_up(folder: Path, model: Path, name: str) -> None:
    """Step by step, and exactly to the total: 5 samples, the last micro-batch smaller than the others."""
    config = runs.config(
        folder,
        model,
        trainer=TRAINERS[name],
        sampling={"prompts_per_iteration": 1, "group_size": 5},
        evaluation={"every": 0},
        iterations=1,
    )
    counts: list[float] = []
    with runs.opened(config) as run:
        advance, progress = run.process.progress.advance, run.process.progress

        def watched(images: float) -> None:
            advance(images)
            if progress.name == "training":
                counts.append(progress.count)

        progress.advance = watched  # type: ignore[method-assign]
        if config.trainer.algorithm == "diffusion_nft":
            diffusion_nft.train(run, config.trainer)
        else:
            flow_grpo.train(run, config.trainer)
    assert progress.total == 5 and counts[-1] == pytest.approx(5)
    assert all(0 < b - a <= 2 for a, b in zip([0.0, *counts], counts, strict=False)) and len(counts) >= 3
