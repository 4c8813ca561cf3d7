"""Centred reward distillation: differences of implicit rewards within a prompt (arXiv 2603.14128)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import AdvantageScale, Updating
from genrl.config.section import Count, NonNegative, Positive


class CRD(Updating):
    """Centred reward distillation: differences of implicit rewards within a prompt (arXiv 2603.14128)."""

    algorithm: Literal["crd"] = "crd"
    """Which trainer."""
    beta: Positive = 1.0
    """Scale of the implicit reward (CRD: 1)."""
    loss: Literal["mse", "bce"] = "mse"
    """Squared difference of the centred rewards, or a cross-entropy."""
    temperature: Positive | None = None
    """Centre at softmax means of the group's best and worst samples, at this temperature; null = at its mean."""
    kl_weight: NonNegative = 0.1
    """Weight of the squared velocity difference from the starting model, for the best samples (CRD: 0.1)."""
    reference_guidance: NonNegative | None = None
    """Guidance of the starting model there (CRD on SD3.5: 4.5; not FLUX.1-dev); null = that of sampling."""
    timesteps_per_sample: Count | None = None
    """Noise levels of the sampling grid trained per sample, the same for all; null = all of them but one."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage; it also scales the loss (CRD: 5)."""
    updates_per_iteration: Count = 2
    """Optimiser steps per inner epoch (CRD: 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (CRD: 1)."""
