"""Policy gradient on the denoising steps (arXiv 2505.05470), and the windows and trees of its successors.

MixGRPO, Flow-GRPO-Fast, DanceGRPO, BranchGRPO, TreeGRPO and B2-DiffuRL are settings of it (docs/trees.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.section import Flag, Share
from genrl.diffusion.steps.layout import Layout, Tree
from genrl.diffusion.steps.settings import Windowed, plain_scores

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


class FlowGRPO(Windowed):
    """Policy gradient on the denoising steps (arXiv 2505.05470), with the windows and trees of its successors."""

    title: ClassVar[str] = "Flow-GRPO"
    takes = frozenset({"recorded_calls", "older_samples", "part_of_groups"})

    algorithm: Literal["flow_grpo"] = "flow_grpo"
    """Which trainer."""
    noise_outside_window: Flag = False
    """Add noise to the steps outside the window too, without training them (B2-DiffuRL); false = they are
    deterministic."""
    tree: Tree | None = None
    """Share the beginnings of a group's samples (docs/trees.md); null = independent samples."""
    tail_ratio: Share | None = None
    """Take the steps after the window by DPM-Solver++ in this share of them (MixGRPO-Flash: 0.4); null = all."""
    aggregate: Literal["sum", "gdpo"] = "sum"
    """Several rewards to one advantage: of their weighted sum; of each by itself, then summed and whitened (GDPO)."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Log-probability over the latent's numbers: mean (all peers; clip_range assumes it) or sum."""

    @property
    def layout(self) -> Layout:
        return Layout(
            self.noise_level,
            self.window,
            self.tree,
            noise_outside_window=self.noise_outside_window,
            tail_ratio=self.tail_ratio,
        )

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        return self.log_prob_reduction

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        if self.aggregate == "gdpo":
            # Its reason is that rewards of different spread weigh the same; another scale would silently be ignored.
            if self.advantage_scale != "group":
                text = "gdpo divides each reward by its group's spread; use group"
                yield ("trainer.advantage_scale", "trainer.aggregate"), text
            if self.tree is not None and (self.tree.normalise == "depth" or self.tree.contrast):
                text = "normalise: depth and contrast have advantages of their own; leave them out"
                yield ("trainer.tree", "trainer.aggregate"), text
            yield from plain_scores(config, "gdpo")
