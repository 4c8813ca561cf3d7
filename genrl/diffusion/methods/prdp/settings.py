"""Regression of reward differences on log-ratios, over pairs of samples of one prompt (arXiv 2402.08714)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from genrl.config.method import MetricDoc
from genrl.config.section import Count, Positive
from genrl.diffusion.config.schema import Refusable
from genrl.diffusion.steps.settings import EveryStep

METRICS = {
    "prdp/pairs": MetricDoc(
        "pairs of samples of one prompt in the regression", "As configured, less samples without a score.", "pairs"
    ),
    "prdp/unexplained": MetricDoc(
        "sum over pairs of (predicted - target)^2 / sum of target^2, target = difference of rewards / beta, predicted "
        "= difference of log-ratios to the reference; before each update",
        "1: the policy is still the reference. It falls as the policy comes to predict its rewards. Above 1: it "
        "overshoots, lower the learning rate or raise beta.",
    ),
    "prdp/correct": MetricDoc(
        "share of the pairs of different rewards whose better sample the policy raised more against the reference",
        "0 in the first update of a run, when both are equal; 0.5 is chance.",
        "share 0..1",
    ),
    "prdp/clip_frac": MetricDoc(
        "share of pairs whose error is larger with log-ratios kept within clip_range of the old policy's",
        "0 in the first update of an iteration. Steps that are clipped have no gradient in these pairs.",
        "share 0..1",
    ),
}


class PRDP(EveryStep):
    """Regression of reward differences on log-ratios, over pairs of samples of one prompt (arXiv 2402.08714)."""

    title: ClassVar[str] = "PRDP"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS
    refuses: ClassVar[Mapping[Refusable, str]] = {"float16": "the gradient grows with 1 / beta"}

    algorithm: Literal["prdp"] = "prdp"
    """Which trainer."""
    beta: Positive = 3e-5
    """Weight of the divergence from the starting model: log-ratios go to reward / beta (PRDP: 3e-5 or 3e-6)."""
    clip_range: Positive = 1e-4
    """Log-ratios of a step count within this of those that sampled (PRDP: 1e-6 with 10 inner epochs, 1e-4 with 1)."""
    inner_epochs: Count = 1
    """Optimiser steps of one iteration, each over all its pairs (PRDP: 10 on few prompts, 1 on many)."""

    def optimizer_steps(self, iterations: int) -> int:
        return iterations * self.inner_epochs
