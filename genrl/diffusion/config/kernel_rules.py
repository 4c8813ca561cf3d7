"""Combinations of kernels with other settings that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.diffusion.config.kernels import BUILT_IN

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

HALF_ONLY = ("cudnn", "flash2", "flash3", "sage")


def kernel_rules(config: Config) -> Iterator[Finding]:
    """Kernels that have nothing to do, or cannot do it in this precision."""
    kernels, trainer, model = config.kernels, config.trainer, config.model
    fused = kernels.fused
    if len(set(fused)) < len(fused):
        yield ("kernels.fused",), "names a kernel twice; name each once"
    if "step" in fused:
        kernel = trainer.transition
        if kernel is None:
            text = f"{trainer.algorithm} takes no stochastic step with a log-probability; leave step out"
            yield ("kernels.fused", "trainer.algorithm"), text
        elif kernel == "ddim":
            text = "step is for flow models, whose mean is linear in state and velocity; leave it out with ddim"
            yield ("kernels.fused", "trainer.kernel"), text
        elif kernel not in BUILT_IN:
            text = "step is for transitions that are linear in state and velocity, as this package's are; leave it out"
            yield ("kernels.fused", "trainer.kernel"), text
    yield from _compiled(config)
    if model.dtype == "float32" and model.autocast is None:
        for key in ("attention", "evaluation_attention"):
            name = getattr(kernels, key)
            if name in HALF_ONLY:
                text = f"{name} attends in bfloat16 or float16; set model.dtype or model.autocast, or use auto"
                yield (f"kernels.{key}", "model.dtype"), text


def _compiled(config: Config) -> Iterator[Finding]:
    """What the graphs of a compiled denoiser cannot hold, or not for as long."""
    mode, trainer = config.kernels.compile, config.trainer
    if mode is False:
        return
    if config.shards:
        key = config.sharded_by
        text = "weights come to the device by hooks, which break the graph at every block; write false"
        yield ("kernels.compile", key), text
    if mode != "cuda_graphs":
        return
    if not trainer.one_call_at_a_time:
        text = f"{trainer.algorithm} makes further model calls before a backward pass, and a recorded call's memory is "
        yield ("kernels.compile", "trainer.algorithm"), f"{text}that of the one before; write true"
