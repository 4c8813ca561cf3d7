"""Online Diffusion-DPO: the best sample of each group against its worst (arXiv 2311.12908)."""

from __future__ import annotations

from typing import ClassVar, Literal

from genrl.config.section import Positive
from genrl.diffusion.forward.settings import DiffusionDPO


class DPO(DiffusionDPO):
    """Online Diffusion-DPO: the best sample of each group against its worst (arXiv 2311.12908)."""

    title: ClassVar[str] = "DPO"

    algorithm: Literal["dpo"] = "dpo"
    """Which trainer."""
    beta: Positive = 100.0
    """Sharpness of the preference (Flow-GRPO's online DPO: 100; Diffusion-DPO offline: 5000)."""
