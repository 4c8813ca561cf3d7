"""The layers of a policy, where it is made of some (pi0, pi0.5, SmolVLA, GR00T, OpenVLA): what a run asks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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
