"""DPPO (arXiv 2409.00588): the quantile clip of its advantages."""

from __future__ import annotations

from torch import Tensor


def quantile_clip(advantages: Tensor, low: float, high: float) -> Tensor:
    """Advantages clamped to their own quantiles: DPPO's guard against outliers (0 and 1 change nothing)."""
    return advantages.clamp(advantages.quantile(low), advantages.quantile(high))
