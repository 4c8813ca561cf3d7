"""Making denoisers trainable: every parameter, sharded if asked, or adapters added in place: new ones of each type, one
to go on with, frozen ones beside it."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from peft import LoKrConfig, PeftConfig, get_peft_model_state_dict
from peft import LoraConfig as PeftLoraConfig
from safetensors import safe_open
from torch import Tensor, nn

from genrl.config import LoRA
from genrl.diffusion.config.estimate import fits, matches
from genrl.diffusion.config.model_rules import DENOISERS, is_text_encoder
from genrl.diffusion.config.sections import ATTENTION_LAYERS, ENCODER_LAYERS
from genrl.diffusion.files import lora_files
from genrl.diffusion.files.lora_files import LoRAFile, first
from genrl.diffusion.policy.interfaces import Adapted, AdaptedDenoiser, LoRALoader, Pipeline
from genrl.runtime.weights.low_rank import in_input_precision
from genrl.runtime.weights.sharding import Sharding, in_step, shard
from genrl.runtime.weights.weights import Weights
from genrl_rewards.models.accounts import accounted


def trainable(
    denoisers: Mapping[str, nn.Module],
    lora: LoRA | None,
    *,
    seed: int = 0,
    sharding: Sharding | None = None,
    pipe: Pipeline | None = None,
    refers_to_base: bool = False,
) -> Weights:
    """The trained parameters of one or more denoisers, and of text encoders where `lora` says so, by
    `component.parameter`.

    denoisers: by component name; lora: the adapter to add in place, or None to train every parameter; sharding: how the
    denoisers are held, None = whole, where they are; pipe: theirs, which loads the adapters that `lora` names, and has
    the text encoders; refers_to_base: the reference is without adapters, also where training goes on with one.
    Trained parameters are float32 whatever the dtype of the frozen ones. Raises ValueError where no layer matches.
    """
    trained: dict[str, Any] = dict(denoisers)
    if lora is not None:
        for denoiser in denoisers.values():
            _require_adaptable(denoiser)
        if lora.text_encoders:
            assert pipe is not None
            trained |= encoders_of(pipe)
        _adapt(pipe, trained, lora, seed)
    for network in trained.values():
        if lora is None:
            network.requires_grad_(True)
        else:
            activate(network)
            in_input_precision(network)
        for parameter in network.parameters():
            if parameter.requires_grad:
                # Steps of 1e-4 of a weight are below what half precision can hold.
                parameter.data = parameter.data.float()
        if sharding is not None:
            shard(network, _blocks(network), sharding)
    # After sharding, which puts other tensors in the place of the parameters.
    named = {
        f"{name}.{key}": parameter
        for name, network in trained.items()
        for key, parameter in network.named_parameters()
        if parameter.requires_grad
    }

    @contextmanager
    def without_adapters() -> Iterator[None]:
        with ExitStack() as stack:
            for network in trained.values():
                network.disable_adapters()
                stack.callback(network.enable_adapters)
            yield

    is_base = lora is not None and (refers_to_base or (lora.begin is None and not lora.frozen))
    reference = without_adapters if is_base else None
    together = any(in_step(denoiser) for denoiser in denoisers.values())
    return Weights(named, is_lora=lora is not None, in_step=together, reference=reference)


def snapshot_base(weights: Weights, name: str, *, goes_on: bool) -> None:
    """Keep a copy under `name` that begins as the model before training. goes_on: the adapter was trained before
    (`model.lora.from`); its second factors are then left out, which are 0 in a new one. Raises ValueError where it is a
    LoKr or a DoRA, which that does not undo."""
    if goes_on and (other := [key for key in weights.named if not re.search(r"\.lora_[AB]\.", key)]):
        raise ValueError(
            f"model.lora.from: the method needs a copy that begins without the adapter, which is made of a LoRA alone, "
            f"and this one also has {other[0]}: a LoKr or a DoRA; give a LoRA, or begin with a new adapter"
        )
    weights.snapshot(name)
    for key, value in weights.snapshots[name].items() if goes_on else ():
        # B A x = 0: the copy is then the base model, and the first factors may stay.
        if ".lora_B." in key:
            value.zero_()


def _blocks(denoiser: nn.Module) -> list[nn.Module]:
    """What is in shards by itself: the blocks of a transformer; of a UNet the parts of its levels."""
    parts: list[nn.Module] = [m for m in denoiser.modules() if isinstance(m, (BasicTransformerBlock, ResnetBlock2D))]
    if hasattr(denoiser, "down_blocks") and parts:
        return parts
    return [block for m in denoiser.children() if isinstance(m, nn.ModuleList) for block in m]


def _require_adaptable(denoiser: nn.Module) -> None:
    if not isinstance(denoiser, PeftAdapterMixin):
        raise ValueError(
            f"model.lora: diffusers has no adapters for a {type(denoiser).__name__}; set model.lora=null to train all"
        )


def _adapt(pipe: Pipeline | None, denoisers: Mapping[str, nn.Module], lora: LoRA, seed: int) -> None:
    """The adapters of a configuration, in place: the trained one, and the frozen ones."""
    if lora.begin is not None:
        assert pipe is not None
        begin_with(pipe, denoisers, lora.begin)
    else:
        add_adapters(denoisers, lora, seed)
    if lora.frozen:
        assert pipe is not None
        add_frozen(pipe, lora.frozen)


logger = logging.getLogger(__name__)

ADAPTER = "default"
FROZEN = "frozen_"
SECOND = "_2"
"""How the component of a second denoiser ends: `transformer_2`."""
COMPARED = (
    "(unexpected|missing) keys .*in the model|LOAD REPORT|Already found a `peft_config`|Already unmerged|newly init"
)
"""Warnings of what is compared tensor by tensor after loading; libraries mistake other adapters' layers for missing."""


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
    encoders = {
        name: part
        for name, part in pipe.components.items()
        if is_text_encoder(name) and isinstance(part, nn.Module) and f"{name}_lora_layers" in takes
    }
    if not encoders:
        raise ValueError(
            f"model.lora.text_encoders: diffusers loads no adapters of a {type(pipe).__name__}'s text encoders; write "
            "false"
        )
    return encoders


def begin_with(pipe: Pipeline, denoisers: Mapping[str, nn.Module], source: str) -> None:
    """Load the LoRA that training goes on with. Raises ValueError where it is not one of every denoiser alone."""
    load_lora(pipe, source, ADAPTER)
    for name in adapted_parts(pipe):
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
    # peft gives gradients to every adapter that it switches on, so the frozen ones lose theirs here.
    frozen = [name for name in denoiser.peft_config if name.startswith(FROZEN)]
    denoiser.set_adapter([adapter, *frozen] if frozen else adapter)
    for name, parameter in denoiser.named_parameters():
        parameter.requires_grad_(adapter in name.split("."))


def activate_all(pipe: Pipeline) -> None:
    """Let a pipeline that is not trained run with every adapter that is loaded."""
    for part in adapted_parts(pipe).values():
        part.set_adapter(list(part.peft_config))


def is_lokr(denoiser: AdaptedDenoiser, adapter: str = ADAPTER) -> bool:
    """Whether diffusers reads and writes the adapter by the denoiser's own functions alone."""
    return isinstance(denoiser.peft_config[adapter], LoKrConfig)


def _config(name: str, denoiser: nn.Module, lora: LoRA, components: Collection[str]) -> tuple[PeftConfig, list[str]]:
    """peft's settings, and the layers that they adapt."""
    targets, layers = _targets(name, denoiser, lora)
    rank = lora.ranks.get(name, lora.rank)
    patterns = {pattern: r for pattern, r in lora.ranks.items() if pattern not in components}

    # The strength alpha / r stays that of `lora.rank` in layers of another rank; rslora divides by sqrt(r) for the very
    # purpose that ranks of any size learn alike, so its alpha is one number.
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
        # As diffusers' own training scripts and Flow-GRPO begin; the second factor is 0 either way, so the model is the
        # base.
        init_lora_weights="gaussian",
        use_dora=lora.type == "dora",
        use_rslora=lora.type == "rslora",
        **common,
    )
    return config, layers


def _targets(name: str, denoiser: nn.Module, lora: LoRA) -> tuple[list[str], list[str]]:
    """The targets for peft, and the layers that they are. Raises ValueError where there are none."""
    linears = {key for key, module in denoiser.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    # peft matches a target against the names of all modules, and raises at one that it cannot adapt.
    others = {key for key, _ in denoiser.named_modules()} - linears
    wanted_layers = ENCODER_LAYERS if is_text_encoder(name) else lora.targets
    candidates = wanted_layers or ATTENTION_LAYERS
    matching = [t for t in candidates if _ending(t, linears)]
    missing = [t for t in candidates if t not in matching] if wanted_layers else []
    if not matching or missing:
        last = sorted({key.rsplit(".", 1)[-1] for key in linears if not key.endswith(".0")})
        raise ValueError(
            f"model.lora.targets: no layer of the {name} ({type(denoiser).__name__}) is called "
            f"{', '.join(missing or candidates)}; its linear layers end in {', '.join(last)}"
        )
    # In some models a name is that of a linear layer here and of a list of layers there: spelt out.
    targets = [key for t in matching for key in (_ending(t, linears) if _ending(t, others) else [t])]
    return targets, [key for t in matching for key in _ending(t, linears)]


def _ending(target: str, keys: set[str]) -> list[str]:
    """The modules that peft takes for this target."""
    return sorted(key for key in keys if matches(key, (target,)))


def adapted_parts(pipe: Pipeline) -> dict[str, Any]:
    """Components that have adapters."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, Adapted) and part.peft_config}


def loads_lora(pipe: object, denoisers: Iterable[str]) -> TypeGuard[LoRALoader]:
    """Whether the pipeline itself reads and writes adapters of these components; else each does by itself."""
    if not isinstance(pipe, LoRALoader):
        return False
    takes = inspect.signature(type(pipe).save_lora_weights).parameters.keys()
    return all(f"{name.removesuffix(SECOND)}_lora_layers" in takes for name in denoisers)


def load_lora(pipe: Pipeline, lora: str, adapter: str | None = None) -> None:
    """Put an adapter into a plain pipeline: a file, a folder of one (with the second expert's where there are two), or
    a hub id, in any form that `lora_files` knows. Raises ValueError where there is none to load, and where a key of it
    is of no layer, or a layer of it not whole. adapter: its name; None = one that is free."""
    denoisers = denoisers_of(pipe)
    second = Path(lora).expanduser() / f"transformer{SECOND}"
    sources = [(lora, denoisers[0])] + ([(str(second), second.name)] if second.is_dir() else [])
    taken = {name for _, name in _names(pipe)}
    name = adapter or next(name for k in range(len(taken) + 1) if (name := f"default_{k}") not in taken)
    what = f"the LoRA {lora!r} could not be loaded into {type(pipe).__name__}"
    with accounted(what, quiet=COMPARED):
        for source, denoiser in sources:
            if denoiser not in denoisers:
                raise ValueError(f"it has a folder {denoiser}, and the pipeline no such component")
            _load(pipe, lora_files.read(lora_files.locate(source)), name, denoiser)


def _load(pipe: Pipeline, file: LoRAFile, name: str, denoiser: str) -> None:
    """Put one file into the networks that it is of."""
    networks = dict(lora_files.networks_of(pipe, [denoiser] if denoiser.endswith(SECOND) else denoisers_of(pipe)))
    if any(lora_files.LOKR in key for key in file.tensors):
        _load_lokr(networks[denoiser], file, name)
        return
    layers, unknown = lora_files.resolve(file, networks, denoiser)
    # Keys that begin with a component's name are in diffusers' own form already: a converter would only hide that such
    # a layer does not exist.
    if unknown and isinstance(pipe, LoRALoader) and not any(key.startswith(tuple(networks)) for key in unknown):
        try:
            layers, unknown = lora_files.resolve(lora_files.converted(file, pipe), networks, denoiser)
        except Exception as error:  # noqa: BLE001  converters raise what comes
            raise ValueError(f"{_of_another_model(file, unknown)}; {error}") from error
    if unknown or not layers:
        raise ValueError(_of_another_model(file, unknown))
    for component, adapted in layers.items():
        part: Any = networks[component]
        settings, strength = lora_files.peft_settings(adapted, part, component)
        if "peft_type" in adapted.settings and adapted.settings is not file.settings:  # as diffusers itself wrote them
            settings = dict(adapted.settings)
        else:
            logger.warning(
                "the LoRA %s adapts %d layers of the %s: %s", file.path, len(adapted.names), component, strength
            )
        tensors = dict(sorted(adapted.tensors.items()))  # diffusers tells the form by the first
        if component in denoisers_of(pipe):
            part.load_lora_adapter(tensors, prefix=None, adapter_name=name, metadata=settings)
        else:
            part.load_adapter(adapter_name=name, adapter_state_dict=tensors, peft_config=PeftLoraConfig(**settings))
        _require_equal(component, part, name, adapted.tensors)


def _of_another_model(file: LoRAFile, unknown: list[str]) -> str:
    if not unknown:
        return "it holds nothing for it: there is no layer of an adapter in the file"
    count = f"{len(unknown)} of the {len(file.tensors)} tensors of {file.path.name}"
    return f"it is of another model, or in a form that is not known: {count} are of no layer here ({first(unknown)})"


def _load_lokr(part: Any, file: LoRAFile, name: str) -> None:
    """What `save_lora_adapter` of a denoiser wrote, which has a LoKr's own functions for it."""
    part.load_lora_adapter(str(file.path.parent), prefix=None, adapter_name=name, weight_name=file.path.name)
    _require_equal("denoiser", part, name, file.tensors)


def _require_equal(component: str, part: Any, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the adapter in memory is the file's, layer by layer: libraries only warn of the rest."""
    loaded = get_peft_model_state_dict(part, adapter_name=name) if name in getattr(part, "peft_config", {}) else {}
    if odd := sorted(set(tensors) ^ set(loaded)):
        raise ValueError(
            f"it is of another model: its layers are not those of this {component} ({type(part).__name__}), e.g. "
            f"{odd[0]} is in one of them only"
        )
    for key, value in loaded.items():
        if value.shape != tensors[key].shape or not torch.equal(value.cpu(), tensors[key].to(value.dtype).cpu()):
            raise ValueError(f"{key} of the {component} is another in memory than in the file")


def denoisers_of(pipe: Pipeline) -> list[str]:
    """Components that may have adapters, the first one first."""
    return [name for name in DENOISERS if pipe.components.get(name) is not None]


def denoiser_that_loads(folder: Path) -> str | None:
    """Component that `load_lora_adapter` is called of to load what `save_lora_adapter` wrote into this folder; None
    where the pipeline's own loader reads it."""
    keys = [key for file in folder.glob("*.safetensors") for key in keys_of(file)]
    # The pipeline's loader sorts keys by these prefixes; a denoiser's own `save_lora_adapter` writes none.
    if not keys or any(key.startswith(("transformer.", "unet.", "lora_unet_")) for key in keys):
        return None
    return "unet" if any("down_blocks." in key for key in keys) else "transformer"


def keys_of(file: Path) -> list[str]:
    """Names of the tensors of a file."""
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _names(pipe: Pipeline) -> set[tuple[str, str]]:
    return {(name, adapter) for name, part in adapted_parts(pipe).items() for adapter in part.peft_config}
