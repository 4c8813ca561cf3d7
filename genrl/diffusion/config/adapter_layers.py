"""Which layers of a pipeline on this machine an adapter is for, by the names of its weights. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from genrl.config.sections import LoRA
from genrl.diffusion.config.estimate import Component, fits, matches
from genrl.diffusion.config.memory_rules import DENOISERS, is_text_encoder
from genrl.diffusion.config.sections import ATTENTION_LAYERS


def layer_problems(lora: LoRA, components: Collection[Component]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) for each target that is no layer of a denoiser, and each rank that is of no adapted layer;
    nothing where the weights' names are not known."""
    denoisers = [component for component in components if component.name in DENOISERS and component.shapes]
    adapted: list[str] = []
    for denoiser in denoisers:
        layers = [name.removesuffix(".weight") for name, shape in denoiser.shapes.items() if len(shape) in (2, 4)]
        for target in lora.targets or ():
            if not any(matches(layer, (target,)) for layer in layers):
                ends = sorted({layer.rsplit(".", 1)[-1] for layer in layers if not layer.endswith(".0")})
                text = f"no layer of the {denoiser.name} ({denoiser.kind}) is called {target}; its layers end in "
                yield "model.lora.targets", text + ", ".join(ends)
        adapted += [layer for layer in layers if matches(layer, lora.targets or ATTENTION_LAYERS)]
    encoders = {c.name for c in components if lora.text_encoders and is_text_encoder(c.name)}
    for pattern in lora.ranks if adapted else ():
        if pattern not in {d.name for d in denoisers} | encoders and not any(fits(pattern, layer) for layer in adapted):
            names = ", ".join(denoiser.name for denoiser in denoisers)
            text = f"no adapted layer's name ends in {pattern}, and no component is called so; components: {names}; "
            yield f"model.lora.ranks.{pattern}", text + f"a layer: {adapted[0]}"
