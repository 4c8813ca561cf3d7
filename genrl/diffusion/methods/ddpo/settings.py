"""DDPO: a policy gradient without groups, each reward against the last ones of its prompt (arXiv 2305.13301)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.section import Count, NonNegative, Section
from genrl.diffusion.config.kernels import Kernel
from genrl.diffusion.steps.settings import PolicyGradient

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


class PromptHistory(Section):
    """What an advantage is measured against (DDPO's statistics per prompt)."""

    size: Count = 16
    """Last rewards of a prompt that are remembered, this iteration's included (DDPO: 16)."""
    min_count: Count = 8
    """With fewer, a prompt is measured against the whole iteration (DDPO: 8)."""


class DDPO(PolicyGradient):
    """Denoising diffusion policy optimisation: rewards against a prompt's last ones (arXiv 2305.13301)."""

    title: ClassVar[str] = "DDPO"
    takes = frozenset({"recorded_calls", "older_samples"})

    algorithm: Literal["ddpo"] = "ddpo"
    """Which trainer."""
    kernel: Kernel = "ddim"
    """Transition density of a stochastic step; ddim is for epsilon- and v-prediction models, the others for flows. An
    installed one, or path/file.py:name, too."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (DDPO: ddim eta 1; flow_sde 0.7, dance_sde 0.3, flow_cps 0.8); wan_sde: null."""
    history: PromptHistory = PromptHistory()
    """The rewards of a prompt that an advantage is measured against, in groups of any size."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Log-probability over the latent's numbers: mean (DDPO's code; clip_range assumes it) or sum."""

    @property
    def compares(self) -> None:
        """A sample is measured against earlier ones."""

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        return self.log_prob_reduction

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        size, least = self.history.size, self.history.min_count
        if least > size:
            text = f"{least} rewards are never reached, {size} are kept; use {size} or less"
            yield ("trainer.history.min_count", "trainer.history.size"), text
