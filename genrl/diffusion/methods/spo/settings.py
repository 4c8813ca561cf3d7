"""Preferences between candidates for one next state (arXiv 2406.04314), judged by the configured rewards."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import Kernel, Updating
from genrl.config.section import Count, Fraction, Margin, NonNegative, Positive, Ways, Whole


class SPO(Updating):
    """Preferences between candidates for one next state (arXiv 2406.04314), judged by the configured rewards."""

    algorithm: Literal["spo"] = "spo"
    """Which trainer."""
    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""
    candidates: Ways = 4
    """Next states drawn at each compared step, of which one goes on (SPO: 4 on SD 1.5, 2 on SDXL)."""
    first: Whole = 4
    """First step at which candidates are compared (SPO: 4 of 20)."""
    threshold: Fraction = 0.3
    """A comparison counts if tanh(half the difference of best and worst total reward) is above this (SPO: 0.3)."""
    beta: Positive = 10.0
    """Sharpness of the preference loss (SPO: 10)."""
    clip_range: Margin = 0.1
    """Ratio to the model before training kept in 1 - c .. 1 + c; outside there is no gradient (SPO: 0.1)."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""
