"""Settings that the methods which differentiate a reward share. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from genrl.config.errors import Finding
from genrl.diffusion.config.schema import DiffusionMethod

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


class Differentiating(DiffusionMethod):
    """A method whose gradients come through the rewards and the decoder."""

    deterministic: ClassVar[bool] = True
    differentiates_rewards: ClassVar[bool] = True
    not_fitted: ClassVar[str] = "goes backward through the decoder too"

    @property
    def stands_alone(self) -> bool:
        """A gradient needs no comparison."""
        return True

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        for index, reward in enumerate(config.rewards):
            if reward.weight != 0:
                yield from self._gradients_end(config, index)
        if config.model.offload.vae is not None:
            text = f"{self.algorithm} goes backward through the VAE, which has to stay; write null"
            yield ("model.offload.vae", "trainer.algorithm"), text

    def _gradients_end(self, config: Config, index: int) -> Iterator[Finding]:
        """Settings of a reward behind which it has no gradients."""
        reward, at, algorithm = config.rewards[index], f"rewards.{index}", self.algorithm
        for key, wanted in (("remote", "null"), ("isolate", "false")):
            if getattr(reward, key):
                text = f"{algorithm} needs the reward's gradient, which stays in the process that computes it"
                yield (f"{at}.{key}", "trainer.algorithm"), f"{text}; write {wanted}, or give it weight 0"
        if reward.gate is not None:
            text = f"{algorithm} differentiates the reward itself, not what a gate makes of it; write null"
            yield (f"{at}.gate", "trainer.algorithm"), text
        if reward.normalize != "none":
            text = f"{algorithm} differentiates the reward itself, with its weight as it is; write none"
            yield (f"{at}.normalize", "trainer.algorithm"), text
