"""One of torch's attention kernels through shapes and layouts that models make, forward and backward, on this device.

    python -m benchmarks.gpu_attention auto|math|efficient|flash|cudnn

A line of JSON per case: the largest errors of output and gradients against float64, over those of the exact kernel
(math) in bfloat16. The gradient that comes in has the layout it has in the model: FLUX.1's single blocks put what
attention returns beside the MLP's part, so that it comes back as a slice of a wider tensor.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from genrl.kernels.blocks import OF_TORCH


class Shape(NamedTuple):
    batch: int
    heads: int
    tokens: int
    size: int
    beside: int = 0
    """Width of what stands beside the output; 0: the gradient is a tensor of its own."""
    padded: int = 0
    """Keys at the end that a mask hides; 0: no mask."""


CASES = {
    "SD3.5-M 512": Shape(2, 24, 1357, 64),
    "SD3.5-M, batch 1": Shape(1, 24, 1357, 64),
    "FLUX double block, 256": Shape(2, 24, 768, 128),
    "FLUX single block, 256": Shape(2, 24, 768, 128, beside=12288),
    "FLUX single block, 512": Shape(3, 24, 1536, 128, beside=12288),
    "FLUX single block, batch 1": Shape(1, 24, 1536, 128, beside=12288),
    "Qwen-Image, padded": Shape(2, 24, 1280, 128, padded=200),
    "Qwen-Image, padded, odd": Shape(2, 24, 1111, 128, padded=87),
    "masked, 64 over 128": Shape(2, 8, 704, 64, padded=64),
    "SD 1.5, 40 wide": Shape(2, 8, 1024, 40),
    "VLA suffix": Shape(2, 8, 51, 256),
}


def ran(
    case: Shape, name: str, leaves: list[Tensor], mask: Tensor | None, beside: Tensor, grad: Tensor
) -> list[Tensor]:
    """Output and gradients, of [B, S, H, D] as a model has them."""
    with nullcontext() if name not in OF_TORCH else sdpa_kernel(OF_TORCH[name]):
        q, k, v = (t.transpose(1, 2) for t in leaves)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        joined = torch.cat([out, beside], 2) if case.beside else out
        return [out, *torch.autograd.grad(joined, leaves, grad)]


def measured(case: Shape, name: str, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (case.batch, case.tokens, case.heads, case.size)
    half = {"device": device, "dtype": torch.bfloat16}
    leaves = [torch.randn(shape, **half, requires_grad=True) for _ in range(3)]
    beside = torch.randn(case.batch, case.tokens, case.beside, **half)
    grad = torch.randn(case.batch, case.tokens, case.heads * case.size + case.beside, **half)
    mask = torch.ones(case.batch, 1, 1, case.tokens, dtype=torch.bool, device=device) if case.padded else None
    if mask is not None:
        mask[..., case.tokens - case.padded :] = False
    outputs = [t.detach() for t in ran(case, name, leaves, mask, beside, grad)]
    plain = [t.detach() for t in ran(case, "math", leaves, mask, beside, grad)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = [t.detach() for t in ran(case, "math", wide, mask, beside.double(), grad.double())]
    errors = [
        float((a.double() - e).abs().max() / (p.double() - e).abs().max())
        for a, p, e in zip(outputs, plain, exact, strict=True)
    ]
    again = ran(case, name, leaves, mask, beside, grad)
    same = [bool(torch.equal(a, b)) for a, b in zip(outputs, again, strict=True)]
    return {"errors": errors, "repeats": same}


def main() -> None:
    name = sys.argv[1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for label, case in CASES.items():
        if device == "cpu":
            case = case._replace(heads=2, tokens=17, padded=min(case.padded, 4), beside=min(case.beside, 8))
        try:
            row = measured(case, name, device)
        except (RuntimeError, ValueError) as error:
            if "illegal" in str(error) or "misaligned" in str(error):  # there is no going on with this card
                print(json.dumps({"case": label, "failed": str(error).splitlines()[0]}), flush=True)
                raise
            row = {"refused": str(error).splitlines()[0]}
        print(json.dumps({"case": label, **row}), flush=True)


if __name__ == "__main__":
    main()
