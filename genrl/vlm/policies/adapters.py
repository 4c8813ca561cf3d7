"""The adapters of a policy over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel

from genrl.runtime.weights.low_rank import adapted
from genrl.vlm.config.schema import VLMConfig

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # DeepSeek's attention, which Kimi has
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", *LATENT)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters on linear layers of the language model, found by the last part of their names."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ATTENTION


def lora_of(config: VLMConfig) -> Lora | None:
    """The adapters that a run trains."""
    settings = config.vlm.lora
    return None if settings is None else Lora(settings.rank, settings.alpha, settings.targets or ATTENTION)


def with_lora(model: Any, lora: Lora, seed: int) -> PeftModel:
    """Adapters inside `model`, on the layers of its language model alone, in float32."""
    language = model.get_decoder()
    linear = {n for n, m in language.named_modules() if isinstance(m, torch.nn.Linear)}
    chosen = {name for name in linear if name.rsplit(".", 1)[-1] in lora.targets}
    if not chosen:
        held = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ValueError(f"no linear layer of the language model is named {list(lora.targets)}. There are {held}")
    prefix = next(name for name, module in model.named_modules() if module is language)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=sorted(f"{prefix}.{name}" for name in chosen),
    )
    return adapted(model, config, seed)


class Adapted:
    """A policy whose model may hold adapters. model: it; peft: the PEFT model round it, None without LoRA."""

    model: Any
    peft: PeftModel | None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block the model is the one that training began from. ValueError without LoRA."""
        if self.peft is None:
            raise ValueError("a policy whose own weights are trained has no reference inside it: load a second Policy")
        with self.peft.disable_adapter():
            yield
