"""What methods share: how far a phase is, as the progress bar shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genrl.config.method import code_of
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers


@pytest.mark.parametrize(
    "trainer",
    [
        {"algorithm": "flow_grpo", "updates_per_iteration": 2, "inner_epochs": 3},
        {"algorithm": "flow_grpo", "window": {"size": 1}},
        {**runs.NFT, "inner_epochs": 2, "timesteps_per_sample": 1},
    ],
    ids=["updates and epochs", "window", "diffusion_nft"],
)
def test_the_bar_of_training_fills_up(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    """Step by step, and exactly to the total: 5 samples, the last micro-batch smaller than the others."""
    sampling = {"prompts_per_iteration": 1, "group_size": 5}
    config = runs.config(folder, model, trainer=trainer, sampling=sampling, evaluation={"every": 0}, iterations=1)
    counts: list[float] = []
    with runs.opened(config) as run:
        progress, advance = run.process.progress, run.process.progress.advance

        def watched(images: float) -> None:
            advance(images)
            if progress.name == "training":
                counts.append(progress.count)

        progress.advance = watched  # type: ignore[method-assign]
        code_of(config.trainer).train(run, config.trainer)
    assert progress.total == 5 and counts[-1] == pytest.approx(5)
    assert all(0 < b - a <= 2 for a, b in zip([0.0, *counts], counts, strict=False)) and len(counts) >= 3
