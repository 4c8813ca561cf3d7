"""How the weights of a pipeline are held, and which ways of saving memory cannot go together. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from genrl.config.errors import Finding
from genrl.config.folders import is_gguf
from genrl.config.sections import NO_INT4, missing_quantizer

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.config.sections import Model

DENOISERS = ("transformer", "unet", "transformer_2")
"""Components that may be trained, the first one first."""


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


def memory_rules(config: Config) -> Iterator[Finding]:
    """Ways of saving memory that contradict each other, or the way of training."""
    model, named = config.model, list(_kinds(config.model))
    for key, name, kind in named:
        if kind == "int4":
            yield (key,), NO_INT4
        if name and name not in DENOISERS and not is_text_encoder(name):
            yield (key,), f"denoisers ({', '.join(DENOISERS)}) and text encoders (text_encoder, ...) can be quantised"
        elif config.shards and (not name or name in DENOISERS):
            by = config.sharded_by
            text = "a quantised denoiser cannot be held in shards; name the text encoders alone, for example"
            yield (key, by), f"{text} {{text_encoder: int8}}"
    if config.shards and is_gguf(model.path):
        by = config.sharded_by
        yield ("model.path", by), "quantised weights cannot be divided; take a checkpoint that is not quantised"
    if config.shards and model.lora is not None and model.lora.type == "dora":
        by = config.sharded_by
        text = "dora measures whole weights when it is loaded, and these are in shards; write lora or rslora"
        yield (by, "model.lora.type"), text
    if config.trains_shards and config.distributed.fsdp and model.offload.denoiser:
        text = "gradients of all weights that wait on the CPU are not summed over processes; leave one of them out"
        yield ("distributed.fsdp", "model.offload.denoiser"), text
    if model.lora is None and any(not name or name in DENOISERS for _, name, _ in named):
        text = "quantised weights cannot be trained, only adapters on them; write quantize: null, or give lora"
        yield ("model.quantize", "model.lora"), text


def experts_problem(config: Config, denoisers: int) -> str | None:
    """Why a pipeline of so many denoisers, each for its part of the noise levels, cannot be sharded; None if it can."""
    if denoisers < 2 or not config.in_step or config.trainer.transition is not None:
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
