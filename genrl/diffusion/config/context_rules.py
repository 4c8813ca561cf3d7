"""Whether several processes can compute a sample together (`distributed.context`). No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding

if TYPE_CHECKING:
    from genrl.diffusion.config.estimate import Component
    from genrl.diffusion.config.schema import Config

KEY = "distributed.context"
DIVIDED = ("FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel")
"""Classes of denoisers whose plan in diffusers was tested here. LTX's fails on its masks; Qwen-Image divides prompts
too, which have as many tokens as words; others have none."""


def context_rules(config: Config) -> Iterator[Finding]:
    """Settings that `distributed.context` cannot stand beside."""
    if config.distributed.context == 1:
        return
    trainer, kernels = config.trainer, config.kernels
    if trainer.not_divided:
        yield (KEY, "trainer.algorithm"), f"{trainer.algorithm} {trainer.not_divided}; write 1"
    if trainer.differentiates_rewards or trainer.keeps_graphs:
        text = f"gradients of {trainer.algorithm} run through several model calls, which was not tried; write 1"
        yield (KEY, "trainer.algorithm"), text
    for key in ("fused", "attention", "evaluation_attention", "compile"):
        if getattr(kernels, key):
            yield (f"kernels.{key}", KEY), "a sample is divided for diffusers' own attention alone; leave it out"
    if config.sampling.fit_batch:
        text = "a process that leaves a call for want of memory leaves the others waiting; find batch_size by hand"
        yield ("sampling.fit_batch", KEY), text
    if config.model.offload.denoiser is not None and not config.distributed.fsdp:
        text = "blocks that wait on the CPU are fetched by each process alone; write fsdp: true beside it"
        yield (KEY, "model.offload.denoiser"), text


def context_problems(config: Config, components: tuple[Component, ...]) -> Iterator[str]:
    """Why the tokens of this pipeline's samples cannot be divided as `distributed.context` says."""
    from genrl.diffusion.config.estimate import token_counts
    from genrl.diffusion.config.memory_estimate import text_tokens
    from genrl.diffusion.config.memory_rules import DENOISERS

    count = config.distributed.context
    vae = next((component.settings for component in components if component.name == "vae"), {})
    for denoiser in (component for component in components if component.name in DENOISERS) if count > 1 else ():
        if denoiser.kind not in DIVIDED:
            yield f"diffusers divides no tokens of a {denoiser.kind}, or none that was tested; write 1"
            continue
        heads = denoiser.settings.get("num_attention_heads")
        text = 0 if denoiser.kind.startswith("Wan") else text_tokens(config, components)
        numbers = [("heads of its attention", heads if isinstance(heads, int) else 0), ("tokens of its text", text)]
        own = config.evaluation
        judged = {name: side for name in ("height", "width") if (side := getattr(own, name)) is not None}
        evaluated = config.model_copy(update={"sampling": config.sampling.model_copy(update=judged)})
        for drawn in (config, evaluated):
            counts = token_counts(drawn, denoiser.settings, vae)
            numbers += [("tokens of a picture or video", number) for number in counts]
        for what, number in dict.fromkeys(numbers):
            if number % count:
                yield f"{denoiser.name} has {number} {what}, which {count} processes cannot share evenly"
