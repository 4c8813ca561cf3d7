"""Making denoisers trainable: adapters added in place, or every parameter; sharded if asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from genrl.config import LoRA
from genrl.diffusion.policy.adapters import activate, add_adapters, add_frozen, begin_with, encoders_of
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.runtime.weights.low_rank import in_input_precision
from genrl.runtime.weights.sharding import Sharding, in_step, shard
from genrl.runtime.weights.weights import Weights


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
