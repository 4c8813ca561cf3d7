"""Online Diffusion-DPO: the best sample of each group against its worst (arXiv 2311.12908)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import Updating
from genrl.config.section import Count, Flag, Positive


class DPO(Updating):
    """Online Diffusion-DPO: the best sample of each group against its worst (arXiv 2311.12908)."""

    algorithm: Literal["dpo"] = "dpo"
    """Which trainer."""
    beta: Positive = 100.0
    """Sharpness of the preference (Flow-GRPO's online DPO: 100; Diffusion-DPO offline: 5000)."""
    reference_every: Count | None = None
    """The trained model becomes the reference every so many optimiser steps (Flow-GRPO's: 40); null = never."""
    timesteps_per_pair: Count = 1
    """Noise levels trained per pair, each drawn anew (1)."""
    guidance_in_training: Flag = False
    """Train under the guidance of sampling (peers: false); where it is an input of the model (FLUX.1-dev) it stays."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""
