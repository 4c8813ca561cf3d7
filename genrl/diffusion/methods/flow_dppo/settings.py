"""Flow-DPPO: the plain ratio, cut where the distribution of a step has moved too far (arXiv 2606.11025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.method import MetricDoc
from genrl.config.section import Positive
from genrl.diffusion.steps.layout import Round
from genrl.diffusion.steps.settings import METRICS, Windowed

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


class FlowDPPO(Windowed):
    """Flow-DPPO (arXiv 2606.11025): no clip; a sample's step is left out where its distribution has moved by more than
    a KL, and the update would move it further."""

    title: ClassVar[str] = "Flow-DPPO"
    takes = frozenset({"recorded_calls", "older_samples", "part_of_groups"})
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS | {
        "old_kl": MetricDoc(
            "KL of a step from the policy before the iteration's first update; mean over the numbers of a latent, "
            "samples and trained steps",
            "0 in the first update. Far below `trainer.threshold`: nothing is cut; far above: lower the learning rate.",
            "nats",
        ),
    }

    algorithm: Literal["flow_dppo"] = "flow_dppo"
    """Which trainer."""
    clip_range: Positive | tuple[Positive, Positive] = 1e-4
    """Nothing is clipped; a tenth of it is how far rounding may move a ratio before the first update."""
    threshold: Positive = 1e-5
    """KL of a step from the policy that sampled, mean over the numbers of a latent, from which it may not move further
    (paper: 1e-5)."""

    def further_replays(self, config: Config, rounds: Sequence[Round], replayed: float) -> float:
        """The means before the first update, of the samples that it does not train on."""
        return replayed * (1 - 1 / self.updates)
