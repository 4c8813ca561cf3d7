"""Adapters of denoisers: new ones of each type, one to go on with, frozen ones beside it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from diffusers.utils import logging as diffusers_logging
from peft import LoKrConfig, PeftConfig, get_peft_model_state_dict
from peft import LoraConfig as PeftLoraConfig
from safetensors import safe_open
from torch import nn

from genrl.config import LoRA
from genrl.config.folders import hub_file
from genrl.diffusion.config.estimate import fits, matches
from genrl.diffusion.config.model_rules import DENOISERS, is_text_encoder
from genrl.diffusion.config.sections import ATTENTION_LAYERS, ENCODER_LAYERS
from genrl.diffusion.policy.interfaces import Adapted, AdaptedDenoiser, LoRALoader, Pipeline

ADAPTER = "default"
FROZEN = "frozen_"
SECOND = "_2"
"""How the component of a second denoiser ends: `transformer_2`."""


def add_adapters(denoisers: Mapping[str, nn.Module], lora: LoRA, seed: int) -> None:
    """A new adapter in each of these networks, in place. Raises ValueError where no layer matches."""
    unused = lora.ranks.keys() - denoisers.keys()
    for name, denoiser in denoisers.items():
        config, layers = _config(name, denoiser, lora, denoisers.keys())
        unused -= {pattern for pattern in unused if any(fits(pattern, layer) for layer in layers)}
        # The adapter's initial values depend on the run's seed alone. peft draws them on the CPU, wherever the
        # model is; the generators of other devices are left alone.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            denoiser.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    if unused:
        raise ValueError(
            f"model.lora.ranks: no adapted layer's name ends in {', '.join(sorted(unused))}, and no component is "
            f"called so; components: {', '.join(denoisers)}; a layer: {layers[0]}"
        )


def encoders_of(pipe: Pipeline) -> dict[str, nn.Module]:
    """The text encoders whose adapters the pipeline itself reads and writes. Raises ValueError where it has none."""
    takes = inspect.signature(type(pipe).save_lora_weights).parameters.keys() if isinstance(pipe, LoRALoader) else ()
    found = {
        name: part
        for name, part in pipe.components.items()
        if is_text_encoder(name) and isinstance(part, nn.Module) and f"{name}_lora_layers" in takes
    }
    if not found:
        raise ValueError(
            f"model.lora.text_encoders: diffusers loads no adapters of a {type(pipe).__name__}'s text encoders; write "
            "false"
        )
    return found


def begin_with(pipe: Pipeline, denoisers: Mapping[str, nn.Module], source: str) -> None:
    """Load the LoRA that training goes on with. Raises ValueError where it is not one of every denoiser alone."""
    load_lora(pipe, source, ADAPTER)
    for name in _adapted(pipe):
        if name not in denoisers:
            raise ValueError(
                f"model.lora.from: {source} adapts the {name}, too, which is not trained: prompts are encoded once. "
                "Give a LoRA of the denoiser alone, or the whole as model.lora.frozen"
            )
    for name, denoiser in denoisers.items():
        if ADAPTER not in getattr(denoiser, "peft_config", {}):
            raise ValueError(f"model.lora.from: {source} holds nothing for the {name}")


def add_frozen(pipe: Pipeline, sources: Collection[str]) -> None:
    """Load adapters that stay as they are."""
    for number, source in enumerate(sources):
        load_lora(pipe, source, f"{FROZEN}{number}")


def activate(denoiser: AdaptedDenoiser, adapter: str = ADAPTER) -> None:
    """Run with this adapter and the frozen ones; its parameters alone have gradients."""
    frozen = [name for name in denoiser.peft_config if name.startswith(FROZEN)]
    denoiser.set_adapter([adapter, *frozen] if frozen else adapter)
    for name, parameter in denoiser.named_parameters():
        parameter.requires_grad_(adapter in name.split("."))


def activate_all(pipe: Pipeline) -> None:
    """In a pipeline that is not trained: run with every adapter that is loaded."""
    for part in _adapted(pipe).values():
        part.set_adapter(list(part.peft_config))


def is_lokr(denoiser: AdaptedDenoiser, adapter: str = ADAPTER) -> bool:
    """Whether diffusers reads and writes the adapter by the denoiser's own functions alone."""
    return isinstance(denoiser.peft_config[adapter], LoKrConfig)


def _config(name: str, denoiser: nn.Module, lora: LoRA, components: Collection[str]) -> tuple[PeftConfig, list[str]]:
    """peft's settings, and the layers that they adapt."""
    targets, layers = _targets(name, denoiser, lora)
    rank = lora.ranks.get(name, lora.rank)
    patterns = {pattern: r for pattern, r in lora.ranks.items() if pattern not in components}

    def alpha(r: int) -> float:
        return lora.alpha if lora.type == "rslora" else lora.alpha * r / lora.rank

    common: dict[str, Any] = {
        "r": rank,
        "target_modules": targets,
        "rank_pattern": patterns,
        "alpha_pattern": {pattern: alpha(r) for pattern, r in patterns.items()},
    }
    if lora.type == "lokr":
        return LoKrConfig(alpha=alpha(rank), **common), layers  # type: ignore[arg-type]  # peft takes any number
    config = PeftLoraConfig(
        lora_alpha=alpha(rank),  # type: ignore[arg-type]
        init_lora_weights="gaussian",
        use_dora=lora.type == "dora",
        use_rslora=lora.type == "rslora",
        **common,
    )
    return config, layers


def _targets(name: str, denoiser: nn.Module, lora: LoRA) -> tuple[list[str], list[str]]:
    """The targets for peft, and the layers that they are. Raises ValueError where there are none."""
    linears = {key for key, module in denoiser.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    others = {key for key, _ in denoiser.named_modules()} - linears
    own = ENCODER_LAYERS if is_text_encoder(name) else lora.targets
    candidates = own or ATTENTION_LAYERS
    found = [t for t in candidates if _ending(t, linears)]
    missing = [t for t in candidates if t not in found] if own else []
    if not found or missing:
        last = sorted({key.rsplit(".", 1)[-1] for key in linears if not key.endswith(".0")})
        raise ValueError(
            f"model.lora.targets: no layer of the {name} ({type(denoiser).__name__}) is called "
            f"{', '.join(missing or candidates)}; its linear layers end in {', '.join(last)}"
        )
    # In some models a name is that of a linear layer here and of a list of layers there: spelt out.
    targets = [key for t in found for key in (_ending(t, linears) if _ending(t, others) else [t])]
    return targets, [key for t in found for key in _ending(t, linears)]


def _ending(target: str, keys: set[str]) -> list[str]:
    """The modules that peft takes for this target."""
    return sorted(key for key in keys if matches(key, (target,)))


def _adapted(pipe: Pipeline) -> dict[str, Any]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, Adapted) and part.peft_config}


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without diffusers' warnings of text encoders that have no adapter."""
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(level)


def loads_lora(pipe: object, denoisers: Iterable[str]) -> TypeGuard[LoRALoader]:
    """Whether the pipeline itself reads and writes adapters of these components; else each does by itself."""
    if not isinstance(pipe, LoRALoader):
        return False
    takes = inspect.signature(type(pipe).save_lora_weights).parameters.keys()
    return all(f"{name.removesuffix(SECOND)}_lora_layers" in takes for name in denoisers)


def load_lora(pipe: Pipeline, lora: str, adapter: str | None = None) -> None:
    """Put an adapter into a plain pipeline: a folder that `save_lora` wrote, with the second expert's where there are
    two, any other that diffusers reads, or a hub id. Raises ValueError where there is none to load. adapter: its name;
    None = diffusers finds one."""
    folder = Path(lora)
    if not loads_lora(pipe, denoisers_of(pipe)) and not folder.is_dir():
        raise ValueError(f"{type(pipe).__name__} has no LoRA loader: give a folder that genrl or its denoiser wrote")
    if not folder.exists() and not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w./-]+\.safetensors)?", lora):
        text = "no such folder (a hub id is written org/name, or org/name:file.safetensors)"
        raise ValueError(f"the LoRA {lora!r} is not there: {text}")
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise ValueError(f"the folder {lora} holds no LoRA: there is no .safetensors file in it")
    before = _names(pipe)
    try:
        with quiet_loading():  # it warns of every text encoder without an adapter, and only warns of no adapter at all
            read_adapter(pipe, lora, adapter)
    except Exception as error:  # noqa: BLE001  whatever a file, the hub or peft may say; told with the adapter's name
        raise ValueError(f"the LoRA {lora!r} could not be loaded into {type(pipe).__name__}: {error}") from error
    loaded = _names(pipe) - before
    if not loaded:
        raise ValueError(f"the LoRA {lora!r} holds nothing for {type(pipe).__name__}: it is of another model")
    for name, own in loaded:
        if folder.is_dir():
            _require_all(name, pipe.components[name], own, folder / name if name.endswith(SECOND) else folder)


def _require_all(name: str, part: Any, adapter: str, folder: Path) -> None:
    """Raise ValueError unless the layers of a file are those that were adapted: of others diffusers only warns."""
    prefix = name.removesuffix(SECOND)
    wanted = {
        key.removeprefix(f"{prefix}.")
        for file in folder.glob("*.safetensors")
        for key in _keys(file)
        if ".lokr_" in key or (key.startswith(f"{prefix}.") and ".lora_" in key)
    }
    found = set(get_peft_model_state_dict(part, adapter_name=adapter))
    if odd := sorted(wanted ^ found if wanted else ()):  # a file in another form has other names
        raise ValueError(
            f"the LoRA {str(folder)!r} is of another model: its layers are not those of this {name} "
            f"({type(part).__name__}), e.g. {odd[0]} is in one of them only"
        )


def read_adapter(pipe: Pipeline, lora: str, adapter: str | None) -> None:
    """Have diffusers load an adapter, and a second expert's in the folder of its name; by the denoisers themselves
    where the pipeline cannot. Raises what diffusers, peft or the hub may."""
    folder, second = Path(lora), Path(lora) / f"transformer{SECOND}"
    if not loads_lora(pipe, denoisers_of(pipe)) or (folder.is_dir() and _holds_lokr(folder)):
        _read_by_denoisers(pipe, folder, adapter)
        return
    named = {} if adapter is None else {"adapter_name": adapter}
    source, file = (lora, None) if folder.exists() else hub_file(lora)
    pipe.load_lora_weights(source, **named, **({} if file is None else {"weight_name": file}))
    if second.is_dir():
        pipe.load_lora_weights(str(second), load_into_transformer_2=True, **named)


def _read_by_denoisers(pipe: Pipeline, folder: Path, adapter: str | None) -> None:
    """What `save_lora_adapter` of the denoisers wrote: in the folder, a second one's in a folder of its name."""
    for name in denoisers_of(pipe):
        part: Any = pipe.components[name]
        place = folder / name if name.endswith(SECOND) else folder
        if place.is_dir():
            part.load_lora_adapter(str(place), prefix=None, adapter_name=adapter, use_safetensors=True)


def denoisers_of(pipe: Pipeline) -> list[str]:
    """Components that may have adapters, the first one first."""
    return [name for name in DENOISERS if pipe.components.get(name) is not None]


def denoiser_that_loads(folder: Path) -> str | None:
    """Component that `load_lora_adapter` is called of to load what `save_lora_adapter` wrote into this folder; None
    where the pipeline's own loader reads it."""
    keys = [key for file in folder.glob("*.safetensors") for key in _keys(file)]
    if not keys or any(key.startswith(("transformer.", "unet.", "lora_unet_")) for key in keys):
        return None
    return "unet" if any("down_blocks." in key for key in keys) else "transformer"


def _holds_lokr(folder: Path) -> bool:
    return any(".lokr_" in key for file in folder.glob("*.safetensors") for key in _keys(file))


def _keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _names(pipe: Pipeline) -> set[tuple[str, str]]:
    return {(name, adapter) for name, part in _adapted(pipe).items() for adapter in part.peft_config}
