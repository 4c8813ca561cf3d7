"""Low-rank adapters in the layers of a policy: of its language model and its action expert, wherever the weights would
be trained without them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from genrl.mdp.noise import seeded
from genrl.vla.config.sections import PolicyLoRA
from genrl.vla.policies.lerobot import HEADS

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "to_q", "to_k", "to_v", "to_out")


def with_lora(policy: nn.Module, lora: PolicyLoRA, seed: int) -> None:
    """Put adapters, in float32, into a policy. From here on they and its heads are trained, and nothing else.

    seed: of their initial values. Raises ValueError where no layer has the names that are asked for.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from genrl.runtime.weights.low_rank import in_input_precision
    from genrl.vla.policies.groot import Block
    from genrl.vla.policies.transformer import Layer

    linear = [
        f"{name}.{inner}"
        for name, layer in policy.named_modules()
        if isinstance(layer, Layer | Block)
        for inner, module in layer.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    ]
    targets = lora.targets or ATTENTION
    chosen = [name for name in linear if name.rsplit(".", 1)[-1] in targets]
    if not chosen:
        held = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ValueError(
            f"policy.lora.targets: no layer that would be trained is named {list(targets)}; there are {held}"
        )
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen)  # type: ignore[arg-type]  # any number
    with seeded(seed, "adapters"):
        inject_adapter_in_model(config, policy)
    in_input_precision(policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name.startswith(HEADS))


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's."""
    return ".lora_" in name


def merged_state(policy: nn.Module) -> dict[str, Tensor]:
    """The state of a policy as it is without adapters, with what they do added to the weights that they are on."""
    state = policy.state_dict()
    if not any(map(is_adapter, state)):
        return state
    for name, layer in _adapted(policy).items():
        state[f"{name}.weight"] = state.pop(f"{name}.base_layer.weight") + layer.get_delta_weight("default").detach()
        if f"{name}.base_layer.bias" in state:
            state[f"{name}.bias"] = state.pop(f"{name}.base_layer.bias")
    return {name: value for name, value in state.items() if not is_adapter(name)}


def merge(policy: nn.Module) -> None:
    """Add what the adapters of a policy do to the weights that they are on, and take them out."""
    for name, layer in _adapted(policy).items():
        layer.merge()
        policy.set_submodule(name, layer.get_base_layer())


def _adapted(policy: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in policy.named_modules() if isinstance(module, LoraLayer)}
