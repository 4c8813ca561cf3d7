"""Advantage weighted matching: a policy gradient on the forward process (arXiv 2509.25050)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import AdvantageScale, Updating
from genrl.config.section import Count, NonNegative, Positive


class AWM(Updating):
    """Advantage weighted matching: a policy gradient on the forward process (arXiv 2509.25050)."""

    algorithm: Literal["awm"] = "awm"
    """Which trainer."""
    weighting: Literal["uniform", "sigma", "sigma_squared", "huber", "ghuber"] = "ghuber"
    """How the matching error becomes a log-likelihood: times 1, sigma, sigma^2, or a root of it times sigma."""
    levels: Literal["grid", "logit_normal", "uniform"] = "grid"
    """Noise levels: of the sampling grid, without the first and the last tenth; SD3's; or uniform in 0.2 .. 1."""
    timesteps_per_sample: Count = 6
    """Noise levels trained per sample, stratified, the same for all of an iteration (AWM: 6)."""
    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Advantages are cut at this and divided by it (AWM: 5)."""
    clip_range: Positive = 1.0
    """Ratio kept in 1 - c .. 1 + c (AWM: 1, which with one update per iteration never clips)."""
    kl_weight: NonNegative = 1e-3
    """Weight of the squared velocity difference from the starting model (AWM: 1e-3, OCR 3e-3, PickScore 1e-4)."""
    ema_kl_weight: NonNegative = 1.0
    """Weight of that from a slow copy of the policy, which keeps min(0.001 n, 0.3) of itself (AWM: 1)."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (AWM: 1); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (AWM: 1)."""
