"""Direct reward back-propagation: DRaFT, AlignProp and ReFL, for rewards with gradients (arXiv 2309.17400)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Number
from genrl.diffusion.config.schema import Calls, Guided, Refusable
from genrl.diffusion.forward.settings import Differentiating

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

METRICS = {
    "draft/steps": MetricDoc(
        "denoising steps that the gradient runs through", "As configured, or as sampled.", "steps"
    ),
    "draft/pull": MetricDoc(
        "mean over samples of the norm of d loss / d x_0, through the decoder and the rewards",
        "0: the reward is flat there, or margin is reached. It rises where pictures leave what the reward model knows.",
    ),
}


class Draft(Differentiating):
    """Direct reward back-propagation: DRaFT, AlignProp and ReFL, for rewards with gradients (arXiv 2309.17400)."""

    title: ClassVar[str] = "DRaFT, AlignProp and ReFL"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS
    refuses: ClassVar[Mapping[Refusable, str]] = {
        "float16": "the loss is a sum over the numbers of a sample, by the reward's gradient"
    }

    algorithm: Literal["draft"] = "draft"
    """Which trainer."""
    truncation: Literal["draft", "alignprop", "refl"] = "draft"
    """Steps that gradients run through: the last K; the last k, with k sampled from 1 to K (AlignProp); or one of the
    last K, whose prediction of the finished picture is rewarded (ReFL)."""
    steps: Count | None = None
    """K; null = 1 (DRaFT-1), all (AlignProp), or a quarter (ReFL: 10 of 40)."""
    margin: Number | None = None
    """Samples above this total reward are left alone, the loss is max(0, margin - r) (ReFL: 2); null = none are."""

    def last_steps(self, num_steps: int) -> int:
        """K, of a sampler of so many steps."""
        if self.steps is not None:
            return self.steps
        return {"draft": 1, "alignprop": num_steps, "refl": max(1, num_steps // 4)}[self.truncation]

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        steps = config.sampling.num_inference_steps
        if self.steps is not None and self.steps > steps:
            text = f"the sampler has {steps} steps; use {steps} or less"
            yield ("trainer.steps", "sampling.num_inference_steps"), text

    def calls(self, config: Config, guided: Guided) -> Calls:
        """Expected. Where several steps are trained, each is computed again in the backward pass."""
        steps, images = config.sampling.num_inference_steps, config.sampling.images_per_iteration
        guidance, most = guided(config.sampling.guidance_scale), self.last_steps(steps)
        sampled, trained, forwards = steps - (most - 1) / 2, 1.0, 1.0
        if self.truncation != "refl":
            lengths = range(1, most + 1) if self.truncation == "alignprop" else (most,)
            recomputed = [length if length == 1 else 2 * length for length in lengths]
            sampled, trained = float(steps), math.fsum(lengths) / len(lengths)
            forwards = math.fsum(recomputed) / len(lengths)
        return Calls(images * sampled * guidance, images * forwards * guidance, images * trained * guidance, trained)
