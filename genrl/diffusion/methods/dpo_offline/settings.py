"""Diffusion-DPO from a preference data set in prompts.train, with the columns image_win and image_lose."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import Updating
from genrl.config.section import Count, Flag, Positive


class OfflineDPO(Updating):
    """Diffusion-DPO from a preference data set in prompts.train, with the columns image_win and image_lose."""

    algorithm: Literal["dpo_offline"] = "dpo_offline"
    """Which trainer."""
    beta: Positive = 5000.0
    """Sharpness of the preference (Diffusion-DPO: 5000 for SDXL, 2000 for SD 1.5)."""
    reference_every: Count | None = None
    """The trained model becomes the reference every so many optimiser steps; null = never (Diffusion-DPO)."""
    timesteps_per_pair: Count = 1
    """Noise levels trained per pair, each drawn anew (Diffusion-DPO: 1)."""
    guidance_in_training: Flag = False
    """Train under the guidance of sampling (Diffusion-DPO: false); where it is an input of the model it stays."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""
