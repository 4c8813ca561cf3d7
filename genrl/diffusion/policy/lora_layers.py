"""peft's LoRA layers with one operation less in each: the same bits, sooner."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


class AddedAtOnce(Linear):
    """peft's `base(x) + B(A(x)) * scaling`, [..., out], where product and sum are one operation, without a tensor
    between.

    The bits are the same where a product with `scaling` never rounds, so where it is a power of two (as alpha = 2 rank
    gives). With any other, and in all that is not plain LoRA, the layer is peft's own.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        downs, ups = self.lora_A, self.lora_B
        names = [name for name in self.active_adapters if name in downs]
        plain = not (args or kwargs or self.disable_adapters or self.merged or self.lora_variant)
        if not plain or not all(_exact(self.scaling[name]) for name in names):
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        dtype = result.dtype
        for name in names:
            x = self._cast_input_dtype(x, downs[name].weight.dtype)
            delta = ups[name](downs[name](self.lora_dropout[name](x)))
            result = torch.add(result, delta, alpha=self.scaling[name])
        return result.to(dtype)


def add_at_once(networks: Iterable[nn.Module]) -> None:
    """Make every plain LoRA layer of these networks one that adds at once, in place. Names and weights stay."""
    for network in networks:
        for layer in network.modules():
            if type(layer) is Linear:
                layer.__class__ = AddedAtOnce


def _exact(scaling: float) -> bool:
    """Whether a product with it never rounds."""
    return scaling >= 1.0 and math.frexp(scaling)[0] == 0.5
