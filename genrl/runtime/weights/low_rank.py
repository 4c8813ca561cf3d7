"""How a network is held and computes: in fewer bits while diffusers or transformers loads it, and with low-rank
adapters in the precision of what they adapt, whose weights stay float32."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl_rewards.models.torchvision_compat import ensure

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


class _Linear(nn.Linear):
    """A matrix of an adapter, rounded to the precision of its input wherever it is used."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features], in its precision."""
        output: Tensor = functional.linear(input, self.weight.to(input.dtype), _as(self.bias, input))
        return output


class _Conv2d(nn.Conv2d):
    """The same of a convolution."""

    def forward(self, input: Tensor) -> Tensor:
        """input [B, C, H, W] -> [B, out_channels, H', W'], in its precision."""
        output: Tensor = self._conv_forward(input, self.weight.to(input.dtype), _as(self.bias, input))
        return output


def _as(bias: Tensor | None, input: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(input.dtype)


_ROUNDED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _Linear, nn.Conv2d: _Conv2d}


def adapted(model: Any, config: LoraConfig, seed: int) -> PeftModel:
    """`model` with adapters inside it, in float32 and in the input's precision; their values follow from `seed` alone.

    Raises ValueError where no layer is meant by the configuration.
    """
    ensure()  # peft looks for a torchvision that may be broken
    from peft import get_peft_model

    # peft draws from the global generator, in the order of the modules.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        peft_model: PeftModel = get_peft_model(model, config)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            # In float32 whatever the model: steps of 1e-4 of a weight are below half of bfloat16's spacing, and would
            # be lost.
            parameter.data = parameter.data.float()
    in_input_precision(peft_model)
    return peft_model


@contextmanager
@torch.no_grad()
def merged(networks: Collection[nn.Module]) -> Iterator[None]:
    """Within the block, which is without gradients, each adapted layer computes with one matrix, W + s B A; afterwards
    its own is back, to the bit. A rank of a third of the width costs a forward pass half as much again.

    For what needs no exact ratio, since sums are rounded otherwise; for float32 weights that stay on a CPU. In less
    precision small steps of B A would be lost in W, and a layer that is moved or recorded by a GPU's means would hold
    them twice or not at all. Elsewhere nothing changes.
    """
    from peft.tuners.lora import LoraLayer

    # peft's layers are modules of several classes, each of which also is a LoraLayer: typed by what is used of them.
    layers: list[Any] = [m for network in networks for m in network.modules() if isinstance(m, LoraLayer)]
    matrices = [layer.get_base_layer().weight for layer in layers]
    plain = all(type(weight) is nn.Parameter and weight.dtype == torch.float32 for weight in matrices)
    other = any(layer.disable_adapters or layer.merged or layer.lora_variant for layer in layers)
    compiled = any("forward" in vars(network) for network in networks)  # whose graphs know the layers as they are
    if torch.accelerator.is_available() or not plain or other or compiled:
        yield
        return
    values = [weight.data for weight in matrices]
    try:
        for layer, weight, value in zip(layers, matrices, values, strict=True):
            weight.data = value.clone()
            layer.merge()
        yield
    finally:
        # Not unmerged: W + B A - B A is W up to rounding only.
        for layer, weight, value in zip(layers, matrices, values, strict=True):
            weight.data = value
            layer.merged_adapters.clear()


@cache
def summed() -> type[Any]:
    """peft's layer of a LoRA, with its second product and its sum in one operation. Made when first asked for: peft
    takes a second to import."""
    ensure()  # peft looks for a torchvision that may be broken
    from peft.tuners.lora.layer import Linear

    class Summed(Linear):
        """W x + s B A x in float32: what B makes is added where it is made.

        peft makes B A x, s B A x and the sum one after the other, each as large as W x, and scales again in the
        backward pass: passes over memory that the product itself does along the way. Where s is a power of two, the
        numbers are the same bit for bit. In half precision peft rounds in between, as whoever loads the LoRA into
        diffusers does.
        """

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """x [..., in_features] -> [..., out_features]."""
            # A policy is held in fewer bits after it was adapted, so the input says what the model is.
            rounds = torch.is_autocast_enabled(x.device.type) or x.dtype != torch.float32
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

    return Summed


def in_input_precision(model: nn.Module) -> None:
    """Have the LoRA layers of `model` compute in the precision of their inputs, in place.

    Left to itself, peft casts what enters an adapter to that of the adapter's weights: in a bfloat16 model every
    adapted layer would keep a float32 copy of its input for the backward pass, and multiply it in float32 without
    tensor cores. Rounding the two small matrices instead is what autocast does, and what diffusers computes with a LoRA
    that it loads into such a model. Gradients arrive in float32. Where the model is float32, linear layers add what
    their adapter makes in one operation (`summed`). DoRA's layers, whose norms need it, and those of float16 models
    stay as peft has them.
    """
    ensure()  # peft looks for a torchvision that may be broken
    from peft.tuners.lora.layer import Linear, LoraLayer

    for layer in model.modules():
        if not isinstance(layer, LoraLayer) or layer.lora_variant:
            continue
        if layer.get_base_layer().weight.dtype == torch.float16:  # whose range a gradient may leave
            continue
        parts = [*layer.lora_A.values(), *layer.lora_B.values()]
        # Quantised and fused layers of other libraries compute in their own way.
        if any(type(part) not in (*_ROUNDED, *_ROUNDED.values()) for part in parts):
            continue
        layer.cast_input_dtype_enabled = False
        for part in parts:
            part.__class__ = _ROUNDED.get(type(part), type(part))
        linear: Any = layer
        is_float32 = linear.get_base_layer().weight.dtype == torch.float32
        if type(linear) is Linear and is_float32 and not any(linear.lora_bias.values()):
            linear.__class__ = summed()


def quantization_config(kind: str, loader: Any, dtype: torch.dtype) -> Any:
    """What `from_pretrained(quantization_config=...)` of `loader` (the module diffusers or transformers) is to be told.

    kind: int8 or fp8 (torchao, weights alone), nf4 (bitsandbytes, scales quantised too). dtype: of what is computed.
    """
    if kind == "nf4":
        return loader.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return loader.TorchAoConfig(Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())


def computed_one_way(model: nn.Module) -> None:
    """Have nf4 layers compute the same in sampling as in training, on every CPU.

    Where a CPU has AVX512-BF16, bitsandbytes (0.50) repacks the weights of a layer in evaluation and multiplies in
    bfloat16, but not in training: ratios would not begin at 1. It also fails for layers with fewer than 64 inputs.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
