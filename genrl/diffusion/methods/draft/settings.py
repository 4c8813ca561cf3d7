"""Direct reward back-propagation: DRaFT, AlignProp and ReFL, for rewards with gradients (arXiv 2309.17400)."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import DiffusionMethod
from genrl.config.section import Count, Number


class Draft(DiffusionMethod):
    """Direct reward back-propagation: DRaFT, AlignProp and ReFL, for rewards with gradients (arXiv 2309.17400)."""

    algorithm: Literal["draft"] = "draft"
    """Which trainer."""
    truncation: Literal["draft", "alignprop", "refl"] = "draft"
    """Steps that gradients run through: the last K; the last k, k drawn from 1 to K (AlignProp); or one of the last K,
    whose prediction of the finished picture is rewarded (ReFL)."""
    steps: Count | None = None
    """K; null = 1 (DRaFT-1), all (AlignProp), or a quarter (ReFL: 10 of 40)."""
    margin: Number | None = None
    """Samples above this total reward are left alone, the loss is max(0, margin - r) (ReFL: 2); null = none are."""

    def last_steps(self, num_steps: int) -> int:
        """K, of a sampler of so many steps."""
        if self.steps is not None:
            return self.steps
        return {"draft": 1, "alignprop": num_steps, "refl": max(1, num_steps // 4)}[self.truncation]
