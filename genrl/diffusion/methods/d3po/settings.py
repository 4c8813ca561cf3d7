"""Preferences between images, on the steps of their sampling (arXiv 2311.13231)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from genrl.config.method import MetricDoc
from genrl.config.section import Margin, Positive
from genrl.diffusion.forward.settings import Preference
from genrl.diffusion.steps.settings import EveryStep


class D3PO(EveryStep, Preference):
    """Preferences between images, on the steps of their sampling (arXiv 2311.13231)."""

    title: ClassVar[str] = "D3PO"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "preference/clip_frac": MetricDoc(
            "share of ratios to the reference outside 1 +- clip_range: no gradient (D3PO)",
            "Rises with the distance from the model before training. Near 1: nothing is learnt any more.",
            "share 0..1",
        )
    }

    algorithm: Literal["d3po"] = "d3po"
    """Which trainer."""
    beta: Positive = 0.1
    """Sharpness of the preference (D3PO: 0.1)."""
    clip_range: Margin = 0.1
    """Ratio to the model before training kept in 1 - c .. 1 + c; outside there is no gradient (D3PO: 0.1)."""
