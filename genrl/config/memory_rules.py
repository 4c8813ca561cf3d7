"""How the weights of a pipeline are held, and which ways of saving memory cannot go together. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from genrl.config.method import Finding

if TYPE_CHECKING:
    from genrl.config.schema import Config, Model

DENOISERS = ("transformer", "transformer_2", "unet")
PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
"""Kind of quantisation -> the package that computes with it."""
NO_INT4 = (
    "torchao has no backward pass through its packed four-bit weights, and the layout that has one holds a weight in a "
    "byte, as int8 does; write nf4 (bitsandbytes, needs a GPU) or int8"
)


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
    yield from _quantized(config)


def _quantized(config: Config) -> Iterator[Finding]:
    model = config.model
    if model.quantize is None:
        return
    kinds = {"": model.quantize} if isinstance(model.quantize, str) else model.quantize
    for name, kind in kinds.items():
        key = f"model.quantize.{name}" if name else "model.quantize"
        if kind == "int4":
            yield (key,), NO_INT4
        if name and name not in DENOISERS and not is_text_encoder(name):
            yield (key,), f"denoisers ({', '.join(DENOISERS)}) and text encoders (text_encoder, ...) can be quantised"
    if model.lora is None and any(not name or name in DENOISERS for name in kinds):
        text = "quantised weights cannot be trained, only adapters on them; write quantize: null, or give lora"
        yield ("model.quantize", "model.lora"), text


def missing_packages(model: Model) -> Iterator[tuple[str, str]]:
    """(key, what to install) for each kind of quantisation whose package is not there."""
    kinds: Mapping[str, str] = {"": model.quantize} if isinstance(model.quantize, str) else model.quantize or {}
    for name, kind in kinds.items():
        package = PACKAGES[kind]
        if importlib.util.find_spec(package) is None:
            key = f"model.quantize.{name}" if name else "model.quantize"
            yield key, f"{kind} is computed by {package}, which is not installed: pip install {package}"
