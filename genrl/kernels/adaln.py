"""Gate, residual, LayerNorm and modulation of a diffusion transformer's block (adaLN, arXiv 2212.09748) in one pass.

For one token, with h rounded to the dtype of the residual stream before it is normalised, as when it is stored:

    h = x + gate * branch,   h^ = (h - mean(h)) / sqrt(var(h) + eps),   y = h^ (1 + scale) + shift

Backward, with r = 1 / sqrt(var(h) + eps), n = dy (1 + scale), and dh of the residual stream:

    g = dh + r (n - mean(n) - h^ mean(n h^)),   dx = g,   dbranch = gate g,
    dgate = g branch,   dscale = dy h^,   dshift = dy       (summed over the tokens that share a modulation)
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.kernels.backend import Backend, choose


def adaln_torch(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The definition: (h, y), [B, S, W] each, float32 (float64) between their roundings. Arguments as `adaln`."""
    h, wide = x, torch.promote_types(x.dtype, torch.float32)
    if branch is not None and gate is not None:
        h = (x.to(wide) + gate.to(wide) * branch.to(wide)).to(x.dtype)
    normed = torch.nn.functional.layer_norm(h.to(wide), h.shape[-1:], eps=eps)
    return h, (normed * (1.0 + scale.to(wide)) + shift.to(wide)).to(x.dtype)


def adaln(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(h, y), both [B, S, W] in the dtype of x: the residual stream, and its normalised and modulated copy.

    x, branch [B, S, W]; gate, scale, shift [B, 1, W] or one per token [B, S, W], of any of the three dtypes. With
    branch and gate None there is nothing to add, and h is x.
    Raises ValueError for other shapes, or a branch without its gate; and as `backend.choose`.
    """
    if (branch is None) != (gate is None) or (branch is not None and branch.shape != x.shape):
        raise ValueError(f"branch and gate come together, branch of the shape of x, {list(x.shape)}")
    of_token, of_sample = x.shape, torch.Size((x.shape[0], 1, x.shape[2]))
    shapes = {t.shape for t in (gate, scale, shift) if t is not None}
    if len(shapes) != 1 or not shapes <= {of_token, of_sample}:
        found = ", ".join(str(list(s)) for s in shapes)
        raise ValueError(
            f"gate, scale and shift must all be {list(of_sample)} or all {list(of_token)} for x {list(x.shape)}; got "
            f"{found}"
        )
    if choose("adaln", x, backend) == "torch":
        return adaln_torch(x, branch, gate, scale, shift, eps)
    from genrl.kernels.adaln_triton import AdaLN

    h, y = AdaLN.apply(x, branch, gate, scale, shift, eps)  # type: ignore[no-untyped-call]
    return (x if branch is None else h), y
