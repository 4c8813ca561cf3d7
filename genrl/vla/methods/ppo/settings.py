"""PPO with a critic: its keys, what it refuses, what it logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Margin, Positive, Share, Whole
from genrl.vla.methods.settings import Update, from_a_loaded_policy

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class PPO(Update):
    """PPO with a critic and generalised advantage estimation over decisions."""

    title: ClassVar[str] = "PPO of policies in simulation"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "critic/explained_variance": MetricDoc(
            "1 - var(return - value) / var(return) over the decisions that are trained on",
            "0.6 to 0.9 from states, 0.1 to 0.3 from pictures. Below 0: lower or raise critic_lr, warm it up longer.",
        ),
        "loss/value": MetricDoc(
            "mean of the critic's loss (half a squared error, or its clipped or Huber form)",
            "Falls, and rises again where the policy gets into new situations.",
        ),
        "grad_norm/critic": MetricDoc(
            "L2 norm of the critic's gradient before clipping to max_grad_norm; mean over updates",
            "Large while returns are new to it.",
        ),
    }

    algorithm: Literal["ppo"] = "ppo"
    """Which trainer."""
    gamma: Share = 0.99
    """Discount, per decision or per action (`discount`)."""
    lam: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.95
    """Lambda of generalised advantage estimation."""
    values: Literal["chunk", "action"] = "chunk"
    """What has a value and an advantage: the chunk, or every action of it (pi_RL's action level)."""
    discount: Literal["chunk", "smdp"] = "chunk"
    """Gamma per decision (pi_RL, DPPO), or gamma^n for its n executed actions (exact)."""
    episodes: Literal["first", "all"] = "first"
    """Train on the first episode of every environment, or on all that fit into `decisions`."""
    decisions: Count | None = None
    """Decisions of a rollout; null = as many as the longest episode needs."""
    critic_warmup: Whole = 2
    """First iterations, in which only the critic is trained; `environment.staleness` adds as many."""
    value_clip: Positive | None = None
    """How far a value may move from that of the rollout before its gradient ends; null = free (pi_RL: 0.2)."""
    huber_delta: Positive | None = None
    """Value errors beyond this count linearly; null = squares (pi_RL: 10)."""
    value_weight: Positive = 1.0
    """Factor of the critic's loss (DPPO: 0.5)."""
    weighting: Literal["decisions", "episodes"] = "decisions"
    """Every decision counts the same, or every episode (pi_RL with a loss mask)."""
    denoising_gamma: Share = 1.0
    """Discount of the advantage per denoising step before the last trained one (DPPO: 0.99)."""
    clip_base: Margin | None = None
    """Clip range at the noisiest trained step, rising to `clip_range` at the last; null = the same at all steps
    (DPPO)."""

    @property
    def first_episodes(self) -> bool:
        """See `Update`."""
        return self.episodes == "first"

    @property
    def rollout_decisions(self) -> int | None:
        """See `Update`."""
        return self.decisions

    def critic_values(self, horizon: int) -> int:
        """One of the chunk, or one for every action of it."""
        return horizon if self.values == "action" else 1

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """Problems beside those of the surrogate: what values and DPPO's chain need."""
        yield from self._start(config)
        yield from super().problems(config)
        if self.episodes == "all" and (self.weighting == "episodes" or self.success_filter):
            key = "trainer.weighting" if self.weighting == "episodes" else "trainer.success_filter"
            yield (key, "trainer.episodes"), "is of one episode per environment; write episodes: first"
        if self.values == "action" and self.level == "chunk":
            text = "a chunk's ratio has one advantage; write level: action, or element"
            yield ("trainer.level", "trainer.values"), text
        if self.values == "action" and self.discount == "chunk":
            text = "where every action has a value, gamma is per action; write discount: smdp"
            yield ("trainer.discount", "trainer.values"), text
        if self.clip_base is not None and self.clip_base > self.clip_below:
            text = "the clip range rises to the action; base is the smaller"
            yield ("trainer.clip_base", "trainer.clip_range"), text
        if config.sampler.kind != "diffusion":
            written = {"clip_base": self.clip_base is not None, "denoising_gamma": self.denoising_gamma != 1}
            for key in (key for key, is_written in written.items() if is_written):
                yield (f"trainer.{key}", "sampler.kind"), "is of the trained steps of DPPO's chain; leave it out"

    def _start(self, config: VLAConfig) -> Iterator[Finding]:
        return from_a_loaded_policy(config, self.algorithm)
