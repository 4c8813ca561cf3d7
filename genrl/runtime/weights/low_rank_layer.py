"""peft's layer of a LoRA, with its second product and its sum in one operation. A file of its own, since peft takes a
second to import."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor


class Summed(Linear):
    """W x + s B A x in float32: what B makes is added where it is made.

    peft makes B A x, s B A x and the sum one after the other, each as large as W x, and scales again in the backward
    pass: passes over memory that the product itself does along the way. Where s is a power of two, the numbers are the
    same bit for bit. In half precision peft rounds in between, as whoever loads the LoRA into diffusers does.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        rounds = torch.is_autocast_enabled(x.device.type)
        if self.disable_adapters or self.merged or rounds or args or kwargs:
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        output: Tensor = self.base_layer(x)
        for name in self.active_adapters:
            if name not in self.lora_A:  # of other layers
                continue
            narrow: Tensor = self.lora_A[name](self.lora_dropout[name](x))
            wide: Any = self.lora_B[name].weight
            rows, narrow = output.reshape(-1, output.shape[-1]), narrow.reshape(-1, narrow.shape[-1])
            output = torch.addmm(rows, narrow, wide.T, alpha=self.scaling[name]).view(output.shape)
        return output
