"""Flow-GRPO for an editing model (arXiv 2601.02356): the steps before an exit step are trained, then a shortcut."""

from __future__ import annotations

from typing import Literal

from genrl.config.section import Count, NonNegative, Positive, Section, Ways
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO


class StepEvaluation(Section):
    """How Talk2Move's exit step is found: of edits that leave the chain at every step, where rewards differ most."""

    prompts: Count = 4
    """Instructions that are tried."""
    samples: Ways = 4
    """Edits of each instruction at each step, from one noise (Talk2Move: 2 to 4)."""
    every: Count | None = None
    """Find it anew every so many iterations; null = once, before the first."""


class Talk2Move(FlowGRPO):
    """Flow-GRPO for an editing model (arXiv 2601.02356): the steps before an exit step are trained, then a shortcut."""

    algorithm: Literal["talk2move"] = "talk2move"  # type: ignore[assignment]
    """Which trainer."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (Talk2Move: flow_sde at 1); wan_sde: null."""
    exit_step: Count | None = None
    """Steps that are drawn and trained, from the first; null = found by step_evaluation (Talk2Move: 4 of 10)."""
    shortcut: Count = 2
    """Deterministic steps from there to the picture (Talk2Move: 2)."""
    step_evaluation: StepEvaluation = StepEvaluation()
    """How the exit step is found."""
    advantage_scale: Literal["group", "global", "none", "prompt_history"] = "global"
    """As flow_grpo's (Talk2Move: global)."""
    clip_range: Positive | tuple[Positive, Positive] = 2e-4
    """Ratio kept in 1 - low .. 1 + high: one distance or [low, high], both positive (Talk2Move: 2e-4)."""
