"""The weights of a policy as a checkpoint of its model has them: names, shapes, adapters merged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from peft.tuners import lora
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from genrl.runtime.weights.sharding import whole
from genrl.vlm.policies.policy import Policy


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
    own: Layer = [(name, value) for name, value in policy.model.named_parameters() if ".lora_" not in name]
    own += [(name, value) for name, value in policy.model.named_buffers() if name in saved]
    found: dict[str, Layer] = {"": []}
    for name, value in own:
        inside = re.match(r".*?\.\d+\.", name)
        found.setdefault(inside[0] if inside else "", []).append((name.replace(".base_layer.", "."), value))
    return list(found.values())


@torch.no_grad()
def _tensors(policy: Policy, layers: Iterable[Layer]) -> Iterator[tuple[str, Tensor]]:
    adapted = {f"{name}.weight": m for name, m in policy.model.named_modules() if isinstance(m, lora.Linear)}
    for layer in layers:
        given = {}
        for name, value in layer:
            dtype = policy.dtype if isinstance(value, DTensor) else value.dtype  # shares may be finer than the model
            tensor = whole(value.detach())
            if name in adapted:
                tensor = tensor + adapted[name].get_delta_weight("default")
            given[name] = tensor.to(dtype)
        yield from revert_weight_conversion(policy.model, given).items()
