"""Regression of reward differences on log-ratios, over pairs of samples of one prompt (arXiv 2402.08714)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import DiffusionMethod, Kernel
from genrl.config.section import Count, NonNegative, Positive


class PRDP(DiffusionMethod):
    """Regression of reward differences on log-ratios, over pairs of samples of one prompt (arXiv 2402.08714)."""

    algorithm: Literal["prdp"] = "prdp"
    """Which trainer."""
    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""
    beta: Positive = 3e-5
    """Weight of the divergence from the starting model: log-ratios go to reward / beta (PRDP: 3e-5 or 3e-6)."""
    clip_range: Positive = 1e-4
    """Log-ratios of a step count within this of those that sampled (PRDP: 1e-6 with 10 inner epochs, 1e-4 with 1)."""
    step_reduction: Literal["mean", "sum"] = "mean"
    """Log-ratios over the steps: mean (the paper's listing, to which its beta belongs) or sum (its equations)."""
    pairs: Literal["all", "positive"] = "all"
    """Pairs of a prompt: all (the paper's equations), or those with different rewards (its listing)."""
    inner_epochs: Count = 1
    """Optimiser steps of one iteration, each over all its pairs (PRDP: 10 on few prompts, 1 on many)."""

    @property
    def epochs(self) -> int:
        """Passes over the samples of an iteration."""
        return self.inner_epochs
