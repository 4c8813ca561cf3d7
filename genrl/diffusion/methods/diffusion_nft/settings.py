"""Forward-process training on finished samples, without log-probabilities (arXiv 2509.16117)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import AdvantageScale, Updating
from genrl.config.section import Count, NonNegative, Positive


class DiffusionNFT(Updating):
    """Forward-process training on finished samples, without log-probabilities (arXiv 2509.16117)."""

    algorithm: Literal["diffusion_nft"] = "diffusion_nft"
    """Which trainer."""
    beta: Positive = 1.0
    """Distance of the implicit positive and negative policies from the old one (paper: 1, or 0.1 for OCR)."""
    kl_weight: NonNegative = 1e-4
    """Weight of the squared velocity difference from the starting model (paper: 1e-4)."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage; it also scales the loss (paper: 5)."""
    timesteps_per_sample: Count | None = None
    """Noise levels trained per sample, drawn from the sampling grid; null = all of them but the last."""
    old_policy_decay: Literal["none", "ramp", "delayed_ramp"] = "ramp"
    """How slowly the sampling policy follows: at once, min(0.001 n, 0.5), or 0 until step 75, then up."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (paper: 1, OCR 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (paper: 1)."""
