"""A vision-language model in shards (FSDP2), over several processes; and its weights as a checkpoint has them: names,
shapes, adapters merged.

In the passes of an update each process holds a share of the weights, and a block's are whole while it computes. Of
gradients and optimiser state it holds a share at all times, where all weights are trained; adapters are whole. While
processes answer, estimate log-probabilities and evaluate, each makes as many passes as it needs, so each holds all
weights beside its share (`gathered`): the most memory that these phases take is not reduced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from genrl.runtime.weights.sharding import Sharding, reshard_layers, shard, unsharded, whole
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.policy import Body, Policy
from genrl.vlm.policies.processor import Prompt


def hold(config: VLMConfig, *policies: Policy) -> None:
    """Hold policies in shards from here on, where the run asks for it.

    The decoder's layers are gathered one by one; all else, the output layer and the vision tower too, once for a pass:
    some have no pictures. Weights that are trained in half precision are float32 as shares, and rounded when gathered.
    Raises ValueError where this torch cannot.
    """
    if not config.distributed.fsdp:
        return
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"distributed.fsdp: torch {torch.__version__} cannot hold vision-language models in shards; take 2.13, or "
            "write false"
        )
    sharding = Sharding.over(config.distributed.fsdp, policies[0].device)
    for policy in policies:
        model, compute = policy.model.to("cpu"), None  # modules come to the device again one at a time
        if all(p.requires_grad for p in model.parameters()) and policy.dtype != torch.float32:
            compute = policy.dtype
            for parameter in model.parameters():
                parameter.data = parameter.data.float()
        layers: list[Any] = [
            layer for m in model.get_decoder().children() if isinstance(m, nn.ModuleList) for layer in m
        ]
        policy.sharded = body = cast(Any, Body(model))
        shard(body, layers, sharding, compute=compute)
        reshard_layers(body, after_forward=True)
        # A process whose passes have no pictures has no gradients of the vision tower, and must take part in their sum.
        body.set_reduce_scatter_unused_params(True)
        # by default the backward pass goes by the last passes, which may have been some process's own
        for layer, before in zip(layers, [body, *layers], strict=False):
            layer.set_modules_to_backward_prefetch([before])


def gathered(policy: Any) -> AbstractContextManager[None]:
    """Within the block this process has all weights, where the policy is in shards (`runtime.sharding.unsharded`)."""
    body: nn.Module | None = getattr(policy, "sharded", None)
    return nullcontext() if body is None else unsharded(body)


def idle_pass(policy: Policy, further: int = 0) -> Tensor:
    """The loss of a pass that teaches nothing, 0: for a process without answers while others make a pass with theirs.
    further: passes without gradient after it."""
    question = policy.encode(Prompt(("-",)))
    tokens = torch.tensor([policy.stop_ids[:1]])
    answer = [question], tokens, torch.ones_like(tokens)
    loss = 0.0 * policy.log_probs(*answer, group=torch.tensor([0])).log_prob.sum()
    with torch.no_grad():
        for _ in range(further):
            policy.log_probs(*answer, group=torch.tensor([0]))
    return loss


class Stream(NamedTuple):
    """Weights that are there one layer at a time. names: of all of them; tensors: once, in any order."""

    names: list[str]
    tensors: Iterable[tuple[str, Tensor]]


def stream_of(policy: Policy) -> Stream:
    """Every weight, and every buffer that is saved, by its name in a checkpoint. The policy stays as it is: merged are
    copies, and nothing is rounded twice; the others are the policy's own tensors. Weights that are tied stand under one
    of their names. Of a policy in shards each layer is gathered when its turn comes, so all processes go through it."""
    layers = _layers(policy)

    def names() -> Iterator[str]:
        for layer in layers:
            blank = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in layer}
            yield from revert_weight_conversion(policy.model, blank)

    return Stream(list(names()), _tensors(policy, layers))


def checkpoint_weights(policy: Policy) -> dict[str, Tensor]:
    """All of `stream_of`."""
    return dict(stream_of(policy).tensors)


Layer = list[tuple[str, Tensor]]


def _layers(policy: Policy) -> list[Layer]:
    """The policy's own tensors, base weights in place of adapted ones, those of a layer together: names and shapes in
    a checkpoint may be made of several of them. What is in no layer comes first."""
    saved = policy.model.state_dict().keys()
    layer: Layer = [(name, value) for name, value in policy.model.named_parameters() if ".lora_" not in name]
    layer += [(name, value) for name, value in policy.model.named_buffers() if name in saved]
    layers: dict[str, Layer] = {"": []}
    for name, value in layer:
        inside = re.match(r".*?\.\d+\.", name)
        layers.setdefault(inside[0] if inside else "", []).append((name.replace(".base_layer.", "."), value))
    return list(layers.values())


@torch.no_grad()
def _tensors(policy: Policy, layers: Iterable[Layer]) -> Iterator[tuple[str, Tensor]]:
    adapted = {f"{name}.weight": m for name, m in policy.model.named_modules() if isinstance(m, lora.Linear)}
    for layer in layers:
        tensors = {}
        for name, value in layer:
            dtype = policy.dtype if isinstance(value, DTensor) else value.dtype  # shares may be finer than the model
            tensor = whole(value.detach())
            if name in adapted:
                tensor = tensor + adapted[name].get_delta_weight("default")
            tensors[name] = tensor.to(dtype)
        yield from revert_weight_conversion(policy.model, tensors).items()
