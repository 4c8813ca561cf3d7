"""Preferences between images, on the steps of their sampling (arXiv 2311.13231)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import Kernel, Updating
from genrl.config.section import Count, Margin, NonNegative, Positive


class D3PO(Updating):
    """Preferences between images, on the steps of their sampling (arXiv 2311.13231)."""

    algorithm: Literal["d3po"] = "d3po"
    """Which trainer."""
    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""
    beta: Positive = 0.1
    """Sharpness of the preference (D3PO: 0.1)."""
    clip_range: Margin = 0.1
    """Ratio to the model before training kept in 1 - c .. 1 + c; outside there is no gradient (D3PO: 0.1)."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""
