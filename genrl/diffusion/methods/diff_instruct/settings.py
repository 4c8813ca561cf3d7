"""Diff-Instruct*: a one-step generator from a multi-step teacher, by scores and rewards (arXiv 2410.20898)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import DiffusionMethod
from genrl.config.section import Count, NonNegative, Positive


class DiffInstruct(DiffusionMethod):
    """Diff-Instruct*: a one-step generator from a multi-step teacher, by scores and rewards (arXiv 2410.20898)."""

    algorithm: Literal["diff_instruct"] = "diff_instruct"
    """Which trainer."""
    divergence: Literal["score", "kl"] = "score"
    """From the teacher: score-based, pseudo-Huber (Diff-Instruct*), or Kullback-Leibler (Diff-Instruct, DI++)."""
    guidance: Literal["none", "inner", "outer"] = "inner"
    """Guidance of the teacher: in its score, or as a reward beside it (the paper finds inner better)."""
    guidance_scale: NonNegative = 4.5
    """Its strength g: s_0 + g (s_c - s_0), or the weight of that reward (paper: 4.5 to 7.5)."""
    assistant_steps: Count = 1
    """Optimiser steps of the assistant network per step of the generator."""
    assistant_lr: Positive | None = None
    """Learning rate of the assistant network; null = optimizer.lr."""
