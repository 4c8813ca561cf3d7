"""Settings that the methods on the forward process share: finished samples, noised again. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Positive
from genrl.diffusion.config.schema import AdvantageScale, Calls, Guided, Updating

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

FORWARD_ERROR = {
    "forward/error": MetricDoc(
        "mean of (prediction - target)^2 at the trained noise levels; of a flow the target is noise - sample",
        "The error of training a model on these samples. It need not fall: bad samples are unlearnt.",
        "velocity squared",
    )
}
"""Of AWM, DGPO, CRD and DPO."""
OLD_DECAY = {
    "policy/old_decay": MetricDoc(
        "decay d of the sampling policy: old <- d * old + (1 - d) * current",
        "0: sampling always uses the current policy. It rises as `old_policy_decay` says.",
        "0..1",
    )
}
"""Of DiffusionNFT and CRD."""
EMA_DECAY = {
    "policy/ema_decay": MetricDoc(
        "decay d of the slow copy (AWM, DGPO): copy <- d * copy + (1 - d) * current", "min(0.001 n, 0.3).", "0..1"
    )
}
"""Of AWM and DGPO."""


class Matching(Updating):
    """A method that trains a flow model at noise levels of its own finished samples."""

    deterministic: ClassVar[bool] = True
    needs_flow: ClassVar[bool] = True

    advantage_scale: AdvantageScale = "global"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage (all peers: 5)."""


def matching_calls(config: Config, guided: Guided, *, trained: float, states: float, train: float) -> Calls:
    """Of samples drawn in all steps. trained: noise levels per sample; states: those trained in one pass over all
    samples, guidance included; train: forward calls of training."""
    sampling = config.sampling
    drawn = float(sampling.images_per_iteration * sampling.num_inference_steps)
    return Calls(drawn * guided(sampling.guidance_scale), train, states * config.trainer.epochs, trained)


def too_many_levels(chosen: int, available: int, key: str) -> Iterator[Finding]:
    """Refuse more noise levels than there are; key: where their number comes from."""
    if chosen > available:
        text = f"{chosen} noise levels cannot be drawn from a grid of {available}; use {available} or less"
        yield ("trainer.timesteps_per_sample", key), text


def grid_levels(config: Config, chosen: int | None) -> Iterator[Finding]:
    """Refuse a sampling grid with fewer levels than are trained; chosen: how many, None = all but one."""
    steps = config.sampling.num_inference_steps
    if chosen is not None:
        yield from too_many_levels(chosen, steps, "sampling.num_inference_steps")
    elif steps < 2:
        text = "all noise levels but one are trained, and there is only 1; use 2 or more steps (paper: 10)"
        yield ("sampling.num_inference_steps", "trainer.algorithm"), text
