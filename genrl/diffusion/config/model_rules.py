"""What of the sections `model`, `kernels` and `distributed` cannot go together, and how weights are held. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from genrl.config.errors import Finding
from genrl.config.folders import is_gguf, is_single_file
from genrl.config.sections import NO_INT4, OF_THE_FILE, missing_quantizer

if TYPE_CHECKING:
    from genrl.config.sections import LoRA
    from genrl.diffusion.config.schema import Config, DiffusionMethod
    from genrl.diffusion.config.sections import Model

DENOISERS = ("transformer", "unet", "transformer_2")
"""Components that may be trained, the first one first."""
CONTEXT: Final = "distributed.context"
DIVIDED = ("FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel")
"""Classes of denoisers whose plan in diffusers was tested here. LTX's fails on its masks; Qwen-Image divides prompts
too, which have as many tokens as words; others have none."""


def is_text_encoder(component: str) -> bool:
    """Whether the component of this name is one."""
    return component.startswith("text_encoder")


def quantized(model: Model, components: Iterable[str]) -> dict[str, str]:
    """Which of a pipeline's components are quantised -> kind: those that `model.quantize` names, or the denoisers and
    text encoders among `components`."""
    kinds = model.quantize
    if isinstance(kinds, str):
        return {name: kinds for name in components if name in DENOISERS or is_text_encoder(name)}
    return dict(kinds or {})


def model_rules(config: Config) -> Iterator[Finding]:
    """Settings of the model, its kernels and its processes that contradict each other, or the way of training."""
    yield from _single_file(config.model)
    yield from _quantized(config)
    yield from _sharded(config)
    yield from _kernels(config)
    yield from _context(config)
    if config.model.lora is not None:
        yield from _adapters(config.model, config.model.lora)
        if config.model.lora.text_encoders:
            yield from _text_encoders(config, config.model.lora)


def _single_file(model: Model) -> Iterator[Finding]:
    if not is_single_file(model.path):
        if model.config is not None:  # it would be loaded in place of the pipeline that is named
            text = "is for a checkpoint in one .safetensors or .gguf file, and this is a whole pipeline; remove it"
            yield ("model.config", "model.path"), text
        return
    if model.pipeline is not None:
        yield (
            ("model.pipeline", "model.path"),
            "is for a folder or hub id; the file of a denoiser has no class; remove it",
        )
    if model.config is None:
        text = "one file has weights alone; give the folder or hub id of the pipeline that it was made from"
        yield ("model.config", "model.path"), f"{text}, for example stabilityai/stable-diffusion-xl-base-1.0"
    if model.offload.text_encoders == "encode_then_free":
        text = "the loader of single files reads all at once, so that nothing is left out of it; write between"
        yield ("model.offload.text_encoders", "model.path"), text
    if model.without and model.config is not None:
        yield ("model.without", "model.config"), "a file is completed by its base; leave it out of the base's folder"
    if is_gguf(model.path) and model.lora is None:
        yield ("model.lora", "model.path"), "a .gguf file is quantised, and only adapters on it are trained; give lora"
    if model.quantize is not None:
        text = "the loader of single files quantises nothing; save the pipeline as a folder (`pipe.save_pretrained`)"
        yield ("model.quantize", "model.path"), text


def _quantized(config: Config) -> Iterator[Finding]:
    model, named = config.model, list(_kinds(config.model))
    for key, name, kind in named:
        if kind == "int4":
            yield (key,), NO_INT4
        if name and name not in DENOISERS and not is_text_encoder(name):
            yield (key,), f"denoisers ({', '.join(DENOISERS)}) and text encoders (text_encoder, ...) can be quantised"
        elif config.shards and (not name or name in DENOISERS):
            text = "a quantised denoiser cannot be held in shards; name the text encoders alone, for example"
            yield (key, config.sharded_by), f"{text} {{text_encoder: int8}}"
    if model.lora is None and any(not name or name in DENOISERS for _, name, _ in named):
        text = "quantised weights cannot be trained, only adapters on them; write quantize: null, or give lora"
        yield ("model.quantize", "model.lora"), text


def _sharded(config: Config) -> Iterator[Finding]:
    model, by = config.model, config.sharded_by
    if config.shards and is_gguf(model.path):
        yield ("model.path", by), "quantised weights cannot be divided; take a checkpoint that is not quantised"
    if config.shards and model.lora is not None and model.lora.type == "dora":
        text = "dora measures whole weights when it is loaded, and these are in shards; write lora or rslora"
        yield (by, "model.lora.type"), text
    if config.trains_shards and config.distributed.fsdp and model.offload.denoiser:
        text = "gradients of all weights that wait on the CPU are not summed over processes; leave one of them out"
        yield ("distributed.fsdp", "model.offload.denoiser"), text


def _kernels(config: Config) -> Iterator[Finding]:
    kernels, trainer = config.kernels, config.trainer
    if kernels.compile and config.shards:
        text = "weights come to the device by hooks, which break the graph at every block; write false"
        yield ("kernels.compile", config.sharded_by), text
    if kernels.compile == "cuda_graphs" and detaches_unconditional(trainer):
        text = "an unconditional call without gradients would write over the graph of the one before; write true"
        yield ("kernels.compile", "trainer.guidance_in_training"), text
    if kernels.compile == "cuda_graphs" and "recorded_calls" not in trainer.takes:
        text = f"{trainer.algorithm} makes further model calls before a backward pass, and a recorded call's memory is "
        yield ("kernels.compile", "trainer.algorithm"), f"{text}that of the one before; write true"


def detaches_unconditional(trainer: DiffusionMethod) -> bool:
    """Whether training has no gradient through guidance's unconditional prediction, by a method that has the key."""
    return getattr(trainer, "guidance_in_training", None) == "detached"


def _context(config: Config) -> Iterator[Finding]:
    """Settings that `distributed.context` cannot stand beside."""
    if config.distributed.context == 1:
        return
    trainer, kernels = config.trainer, config.kernels
    why = trainer.refuses.get(CONTEXT)
    if trainer.rewards_are == "differentiated":
        why = "has gradients through several model calls, which was not tried"
    alone = config.model.offload.denoiser is not None and not config.distributed.fsdp
    for wrong, keys, text in (
        (why, (CONTEXT, "trainer.algorithm"), f"{trainer.algorithm} {why}"),
        (kernels.fused, ("kernels.fused", CONTEXT), "a sample is divided for diffusers' own attention alone"),
        (kernels.attention, ("kernels.attention", CONTEXT), "a sample is divided for diffusers' own attention alone"),
        (kernels.compile, ("kernels.compile", CONTEXT), "a sample is divided for diffusers' own attention alone"),
        (
            config.sampling.fit_batch,
            ("sampling.fit_batch", CONTEXT),
            "a process out of memory leaves the others waiting",
        ),
        (alone, (CONTEXT, "model.offload.denoiser"), "blocks are fetched by each process alone unless fsdp is true"),
    ):
        if wrong:
            yield keys, f"{text}; leave one of them out"


def _adapters(model: Model, lora: LoRA) -> Iterator[Finding]:
    """Refuse keys that the adapter's file decides, and weights that an adapter cannot be on."""
    for key in OF_THE_FILE if lora.begin is not None else ():
        if key in lora.model_fields_set:
            yield (f"model.lora.{key}", "model.lora.from"), "the adapter that is loaded has its own; leave it out"
    if len(set(lora.frozen)) < len(lora.frozen):  # it would act twice
        yield ("model.lora.frozen",), "an adapter is named twice; keep one"
    if lora.type in ("dora", "lokr") and (model.quantize is not None or is_gguf(model.path)):
        key = "model.path" if model.quantize is None else "model.quantize"
        text = f"{lora.type} needs the weights that it changes unquantised; write lora or rslora"
        yield ("model.lora.type", key), text


def _text_encoders(config: Config, lora: LoRA) -> Iterator[Finding]:
    """What needs text encoders that stay as they are."""
    model, kinds = config.model, config.model.quantize
    encoders_too = isinstance(kinds, str) or any(map(is_text_encoder, kinds or {}))
    change, quantised = (
        "encodings change with the adapters",
        "text encoders are trained unquantised: {transformer: int8}",
    )
    for other, wrong, text in (
        ("model.lora.type", lora.type not in ("lora", "rslora"), "was not tried with it"),
        ("model.lora.from", lora.begin is not None, "goes on with adapters of the denoiser alone"),
        ("model.lora.frozen", bool(lora.frozen), "was not tried beside it"),
        ("model.offload.text_encoders", model.offload.text_encoders, change),
        ("model.encodings", model.encodings, change),
        ("model.quantize", encoders_too, quantised),
        ("distributed.fsdp", config.distributed.fsdp, "text encoders are not held in shards"),
        ("distributed.context", config.distributed.context > 1, "was not tried with it"),
        ("model.offload.denoiser", model.offload.denoiser, "text encoders are not held in shards"),
        ("kernels.compile", config.kernels.compile == "cuda_graphs", "was not tried with recorded graphs"),
    ):
        if wrong:
            yield ("model.lora.text_encoders", other), f"{text}; leave one of them out"


def experts_problem(config: Config, denoisers: int) -> str | None:
    """Why a pipeline of so many denoisers, each for its part of the noise levels, cannot be sharded; None if it can."""
    if denoisers < 2 or not config.in_step or config.trainer.trains_on == "steps":
        return None
    return (
        f"the processes call a denoiser together, and {config.trainer.algorithm} draws noise levels of its own, which "
        "belong to one denoiser in one process and to the other in another; write fsdp: false, or take flow_grpo"
    )


def missing_packages(model: Model) -> Iterator[tuple[str, str]]:
    """(key, what to install) for each package that is not there and by which weights are held in fewer bits."""
    if is_gguf(model.path) and importlib.util.find_spec("gguf") is None:
        yield "model.path", "a .gguf file is read by gguf, which is not installed: pip install gguf"
    for key, _, kind in _kinds(model):
        if lacking := missing_quantizer(kind):
            yield key, lacking


def missing_components(model: Model, index: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) for each component that is to be quantised and is none of the pipeline of this
    model_index.json."""
    held = [name for name, entry in index.items() if isinstance(entry, (list, tuple)) and entry[0]]
    for key, name, _ in _kinds(model):
        if name and name not in held:
            near = get_close_matches(name, held, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield key, f"{index.get('_class_name')} has no such component{meant}"


def _kinds(model: Model) -> Iterator[tuple[str, str, str]]:
    """(key, component, kind) of what `model.quantize` says; the component is empty where it says one for all."""
    kinds: Mapping[str, str] = {"": model.quantize} if isinstance(model.quantize, str) else model.quantize or {}
    for name, kind in kinds.items():
        yield f"model.quantize.{name}" if name else "model.quantize", name, kind
