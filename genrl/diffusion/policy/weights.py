"""Making denoisers trainable: adapters added in place, or every parameter, sharded if asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from diffusers.loaders.peft import PeftAdapterMixin
from peft import LoraConfig as PeftLoraConfig
from torch import nn

from genrl.config import LoRA
from genrl.config.schema import ATTENTION_LAYERS
from genrl.runtime.sharding import shard
from genrl.runtime.weights import Weights

ADAPTER = "default"


def trainable(
    denoisers: Mapping[str, nn.Module], lora: LoRA | None, *, seed: int = 0, sharded: bool = False
) -> Weights:
    """The trained parameters of one or more denoisers, by `component.parameter`.

    denoisers: by component name; lora: the adapter to add in place, or None to train every parameter.
    Trained parameters are float32 whatever the dtype of the frozen ones. Raises ValueError where no layer matches.
    """
    adapted: list[PeftAdapterMixin] = []
    for name, denoiser in denoisers.items():
        if lora is None:
            denoiser.requires_grad_(True)
        elif not isinstance(denoiser, PeftAdapterMixin):
            raise ValueError(
                f"model.lora: diffusers has no adapters for a {type(denoiser).__name__}; set model.lora=null to train "
                "all"
            )
        else:
            peft_config = _peft_config(name, denoiser, lora)
            adapted.append(denoiser)
            # The adapter's initial values depend on the run's seed alone. peft draws them on the CPU, wherever the
            # model is; the generators of other devices are left alone.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                denoiser.add_adapter(peft_config, adapter_name=ADAPTER)
        for parameter in denoiser.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if sharded:
            shard(denoiser)
    named = {
        f"{name}.{key}": parameter
        for name, denoiser in denoisers.items()
        for key, parameter in denoiser.named_parameters()
        if parameter.requires_grad
    }

    @contextmanager
    def without_adapters() -> Iterator[None]:
        with ExitStack() as stack:
            for denoiser in adapted:
                denoiser.disable_adapters()
                stack.callback(denoiser.enable_adapters)
            yield

    reference = None if lora is None else without_adapters
    return Weights(named, is_lora=lora is not None, is_sharded=sharded, reference=reference)


def _peft_config(name: str, denoiser: nn.Module, lora: LoRA) -> PeftLoraConfig:
    linears = {key for key, module in denoiser.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    others = {key for key, _ in denoiser.named_modules()} - linears
    candidates = lora.targets or ATTENTION_LAYERS
    found = [t for t in candidates if _ending(t, linears)]
    missing = [t for t in candidates if t not in found] if lora.targets else []
    if not found or missing:
        last = sorted({key.rsplit(".", 1)[-1] for key in linears if not key.endswith(".0")})
        raise ValueError(
            f"model.lora.targets: no layer of the {name} ({type(denoiser).__name__}) is called "
            f"{', '.join(missing or candidates)}; its linear layers end in {', '.join(last)}"
        )
    # In some models a name is that of a linear layer here and of a list of layers there: spelt out.
    targets = [key for t in found for key in (_ending(t, linears) if _ending(t, others) else [t])]
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=targets,
        init_lora_weights="gaussian",
    )


def _ending(target: str, keys: set[str]) -> list[str]:
    """The modules that peft takes for this target."""
    return sorted(key for key in keys if key == target or key.endswith(f".{target}"))
