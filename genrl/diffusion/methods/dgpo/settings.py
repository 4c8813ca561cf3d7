"""Direct group preference optimisation: one preference of a whole group (arXiv 2510.08425)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import AdvantageScale, Updating
from genrl.config.section import Count, Flag, Margin, NonNegative, Positive, Whole


class DGPO(Updating):
    """Direct group preference optimisation: one preference of a whole group (arXiv 2510.08425)."""

    algorithm: Literal["dgpo"] = "dgpo"
    """Which trainer."""
    beta: Positive = 100.0
    """Sharpness of the group's preference (DGPO: 100, PickScore 10, with reference: ema 2000)."""
    reference: Literal["model", "ema"] = "model"
    """What the group's preference is measured against: the model before training, or the slow average."""
    kl_weight: NonNegative = 0.02
    """Weight of the squared velocity difference from the starting model (DGPO: 0.02, PickScore 1e-3)."""
    reference_guidance: NonNegative | None = None
    """Guidance of the starting model there (DGPO without guidance: 4.5; not FLUX.1-dev); null = that of training."""
    guidance_in_training: Flag = False
    """Train under the guidance of sampling (DGPO: false, even if it samples with 4.5); an input of the model stays."""
    first_steps: Count = 7
    """Noise levels are those of the first steps of the sampling grid, so many (DGPO: 7 of 10, GenEval 5)."""
    timesteps_per_sample: Count = 4
    """Noise levels trained per sample, without repetition, the same for all of an iteration (DGPO: 4)."""
    clip_range: Margin = 1e-2
    """No gradient where the ratio to the slow average is beyond 1 +- c (DGPO: 1e-2, PickScore 5e-2, unguided 1e-3)."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread (DGPO on GenEval), the iteration's (DGPO), or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage (DGPO: 5)."""
    switch_after: Whole = 200
    """After so many optimiser steps the slow average draws the samples (DGPO: 200, GenEval 500)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (DGPO: 1); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (DGPO: 1)."""
