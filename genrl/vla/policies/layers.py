"""The layers of a policy, where it is made of some (pi0, pi0.5, SmolVLA, GR00T, OpenVLA), and what a run does to them:
computes them again in the backward pass, puts low-rank adapters into them, holds them in shards (FSDP2).

In the passes of an update each process holds a share of the weights, and a layer's are whole while it computes. Of
gradients and optimiser state it holds a share at all times; adapters, and the heads beside them, are whole. While
processes act and evaluate, each makes as many passes as its episodes need, so each holds all weights beside its share
(`sharding.unsharded`): the most memory that these phases take is not reduced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from genrl.mdp.noise import seeded
from genrl.runtime.weights.sharding import Sharding, reshard_layers, shard
from genrl.vla.config.sections import PolicyLoRA
from genrl.vla.policies.lerobot import HEADS


def layers_of(policy: nn.Module) -> list[list[Any]]:
    """Stacks of layers of a policy, each in the order of computation: eyes, language model, action expert."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks = [list(module) for module in policy.modules() if isinstance(module, nn.ModuleList)]
    return [
        stack for stack in stacks if stack and all(isinstance(layer, GradientCheckpointingLayer) for layer in stack)
    ]


def require_layers(policy: nn.Module, key: str) -> None:
    """Raise ValueError, naming the key that asks for them, where a policy has none."""
    if not layers_of(policy):
        text = "is for policies with layers of transformers (pi0, pi0.5, SmolVLA, GR00T, OpenVLA)"
        raise ValueError(f"{key}: {text}, and a {type(policy).__name__} has none; leave it out")


def compute_again(policy: nn.Module) -> None:
    """Make backward passes compute the activations of every layer again from here on."""
    for stack in layers_of(policy):
        for layer in stack:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = _again
            layer.training = True  # by which transformers decides; what is inside it, dropout too, stays as it is


def _again(forward: Callable[..., Any], *inputs: Any) -> Any:
    """A layer's output, whose graph, where there is one, keeps its inputs alone."""
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn: no dropout


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "to_q", "to_k", "to_v", "to_out")


def with_lora(policy: nn.Module, lora: PolicyLoRA, seed: int) -> None:
    """Put adapters, in float32, into a policy. From here on they and its heads are trained, and nothing else.

    seed: of their initial values. Raises ValueError where no layer has the names that are asked for.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from genrl.runtime.weights.low_rank import in_input_precision
    from genrl.vla.policies.groot import Block
    from genrl.vla.policies.transformer import Layer

    # By name from the policy's own layers: names alone (q_proj) would also match the eyes, which stay frozen.
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


PASSES = ("encode", "velocity", "velocity_and_noise", "value")
"""Methods that a policy is called by, as far as it has them; none of them calls another."""


def hold(policy: Any, sharding: Sharding, *, adapters: bool) -> None:
    """Hold a policy in shards from here on: its layers are gathered one by one, the rest once from a pass to its
    backward pass. adapters: what is trained stays whole in every process."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nobody writes into it here
    stacks = layers_of(policy)
    unsharded = [parameter for parameter in policy.parameters() if parameter.requires_grad and adapters]
    shard(policy, [layer for stack in stacks for layer in stack], sharding, whole=unsharded)
    reshard_layers(policy, after_forward=True)
    for name in (name for name in PASSES if hasattr(policy, name)):
        register_fsdp_forward_method(policy, name)
    # by default the backward pass goes by the last passes, which may have been some process's own
    for stack in stacks:
        for layer, before in zip(stack, [policy, *stack], strict=False):
            layer.set_modules_to_backward_prefetch([before])
