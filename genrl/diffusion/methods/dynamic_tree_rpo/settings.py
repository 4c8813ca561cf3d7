"""Dynamic-TreeRPO: trees whose noise grows with the depth, and LayerTuning-RL (arXiv 2509.23352)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import NonNegative, Section
from genrl.diffusion.steps.layout import Branching, Layout, Round, Tree
from genrl.diffusion.steps.settings import Windowed, mean_of

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


NOISE_GROWTH = 0.5
"""Share by which the noise level grows from the first to the last branching step (Dynamic-TreeRPO: 0.5)."""


class LayerTuning(Section):
    """LayerTuning-RL: clip bounds that follow the advantage, and a pull towards the best sample."""

    weight: NonNegative = 0.1
    """Weight of the squared distance to the target velocity."""
    target: Literal["best_path", "best_image"] = "best_path"
    """Velocity on the best leaf's path at the same step, or the one that leads to the best leaf's image."""


class DynamicTreeRPO(Windowed):
    """Dynamic-TreeRPO (arXiv 2509.23352): trees whose noise grows with the depth, supervised by their best leaf."""

    title: ClassVar[str] = "Dynamic-TreeRPO"
    takes = frozenset({"recorded_calls"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "layer_tuning/distance": MetricDoc(
            "mean squared distance of the velocity from that of the group's best sample, weighted by how far the "
            "sample falls short, before its weight",
            "Falls slowly. Large against the policy loss: lower `trainer.layer_tuning.weight`.",
        ),
    }

    algorithm: Literal["dynamic_tree_rpo"] = "dynamic_tree_rpo"
    """Which trainer."""
    tree: Branching
    """Where the samples of a group branch."""
    layer_tuning: LayerTuning = LayerTuning()
    """Supervised distance to the best sample of a tree, and dynamic clip bounds."""

    @property
    def layout(self) -> Layout:
        tree = Tree(ways=self.tree.ways, at=self.tree.at)
        return Layout(self.noise_level, self.window, tree, noise_growth=NOISE_GROWTH)

    def problems(self, config: Config) -> Iterator[Finding]:
        problems = [*super().problems(config)]
        yield from problems
        if self.layer_tuning.target == "best_image" and self.kernel == "ddim":
            text = "a velocity towards a picture is of flow models, ddim is for others; use best_path"
            yield ("trainer.layer_tuning.target", "trainer.kernel"), text
        roots = max(each.plan.roots for each in self.rounds(config)) if not problems else 1
        if roots > 1:
            text = f"a sample and the best one, whose target it learns, must be of one tree, and {roots} make a group"
            text = f"{text}; use {config.sampling.group_size // roots}, with as many leaves in every iteration"
            yield ("sampling.group_size", "trainer.layer_tuning"), text

    def further_replays(self, config: Config, rounds: Sequence[Round], replayed: float) -> float:
        """The best path once more, one state per trained step."""
        if self.layer_tuning.target != "best_path":
            return 0.0
        return mean_of(config, rounds, lambda one: len(one.trained))

    def rollout(self, config: Config, guidance: int) -> Iterator[str]:
        yield from super().rollout(config, guidance)
        if self.layer_tuning.target == "best_path":
            yield "layer_tuning evaluates the best path once more, one state per trained step, before the updates"
