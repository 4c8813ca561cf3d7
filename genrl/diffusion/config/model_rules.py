"""What cannot go together in the section `model`: adapters, single files, sharding. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.config.folders import is_gguf, is_single_file
from genrl.config.sections import OF_THE_FILE
from genrl.diffusion.config.memory_rules import is_text_encoder

if TYPE_CHECKING:
    from genrl.config.sections import LoRA
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.config.sections import Model


SPACINGS = ("linspace", "leading", "trailing")


def model_rules(config: Config) -> Iterator[Finding]:
    """Settings of the model that contradict each other."""
    model = config.model
    yield from _single_file(model)
    spacing = model.scheduler.get("timestep_spacing", SPACINGS[0])
    if spacing not in SPACINGS:
        yield ("model.scheduler.timestep_spacing",), f"found {spacing!r}; it can be {', '.join(SPACINGS)}"
    if model.without and model.config is not None:
        yield ("model.without", "model.config"), "a file is completed by its base; leave it out of the base's folder"
    if model.lora is not None:
        yield from _adapters(model.lora)
        yield from _text_encoders(config, model.lora)
        if model.lora.type in ("dora", "lokr") and (model.quantize is not None or is_gguf(model.path)):
            key = "model.path" if model.quantize is None else "model.quantize"
            text = f"{model.lora.type} needs the weights that it changes unquantised; write lora or rslora"
            yield ("model.lora.type", key), text


def _adapters(lora: LoRA) -> Iterator[Finding]:
    """Where a file says what the adapter is, and what cannot stand beside each other."""
    if len(set(lora.frozen)) < len(lora.frozen):  # it would act twice
        yield ("model.lora.frozen",), "an adapter is named twice; keep one"
    if lora.begin is not None:
        for key in OF_THE_FILE:
            if key in lora.model_fields_set:
                yield (f"model.lora.{key}", "model.lora.from"), "the adapter that is loaded has its own; leave it out"
    if lora.frozen and lora.type == "lokr":
        yield ("model.lora.frozen", "model.lora.type"), "peft puts no lokr beside LoRAs; write another type"


def _text_encoders(config: Config, lora: LoRA) -> Iterator[Finding]:
    """What needs text encoders that stay as they are."""
    key, model = "model.lora.text_encoders", config.model
    if not lora.text_encoders:
        return
    quantized = model.quantize if isinstance(model.quantize, dict) else {}
    still = "encodings change with the adapters"
    for other, value, text in (
        ("model.lora.type", lora.type not in ("lora", "rslora"), "was not tried; write lora or rslora"),
        ("model.lora.from", lora.begin is not None, "goes on with adapters of the denoiser alone; write false"),
        ("model.lora.frozen", bool(lora.frozen), "was not tried beside it; write false"),
        (
            "model.offload.text_encoders",
            model.offload.text_encoders,
            f"{still}: they stay on the device; write null",
        ),
        ("model.encodings", model.encodings, f"{still}, so none are kept; write null"),
        (
            "model.quantize",
            isinstance(model.quantize, str) or any(map(is_text_encoder, quantized)),
            "text encoders are trained unquantised; name the denoiser alone: {transformer: int8}",
        ),
        ("distributed.fsdp", config.distributed.fsdp, "text encoders are not held in shards; write false"),
        ("distributed.context", config.distributed.context > 1, "was not tried; write 1"),
        ("model.offload.denoiser", model.offload.denoiser, "text encoders are not held in shards; write null"),
        ("trainer.keep_graph", config.trainer.keeps_graphs, "kept graphs begin behind the text encoders; write false"),
        ("kernels.compile", config.kernels.compile == "cuda_graphs", "was not tried with recorded graphs; write true"),
    ):
        if value:
            yield (key, other), text


def _single_file(model: Model) -> Iterator[Finding]:
    if not is_single_file(model.path):
        if model.config is not None:  # it would be loaded in place of the pipeline that is named
            text = "is for a checkpoint in one .safetensors or .gguf file, and this is a whole pipeline; remove it"
            yield ("model.config", "model.path"), text
        return
    if model.config is None:
        text = "one file has weights alone; give the folder or hub id of the pipeline that it was made from"
        yield ("model.config", "model.path"), f"{text}, for example stabilityai/stable-diffusion-xl-base-1.0"
    if model.offload.text_encoders == "encode_then_free":
        text = "the loader of single files reads all at once, so that nothing is left out of it; write between"
        yield ("model.offload.text_encoders", "model.path"), text
    if is_gguf(model.path) and model.lora is None:
        yield ("model.lora", "model.path"), "a .gguf file is quantised, and only adapters on it are trained; give lora"
    if model.quantize is not None:
        text = "the loader of single files quantises nothing; save the pipeline as a folder (`pipe.save_pretrained`)"
        yield ("model.quantize", "model.path"), text
