"""RMS norm of queries or keys, then rotary positions (arXiv 1910.07467, 2104.09864), in one pass.

For one token, x in R^W (W = D, one head; or W = H D, all heads together, as in Wan), weight w in R^W:

    r = 1 / sqrt(mean(x^2) + eps),   n = w * x * r,
    y[2i] = n[2i] cos[i] - n[2i+1] sin[i],   y[2i+1] = n[2i] sin[i] + n[2i+1] cos[i]      (i within a head)

Backward, with m = R^T dy (the rotation turned back) and x^ = x r:

    dx = r (w m - x^ mean(w m x^)),   dw = sum over tokens of m x^
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.kernels.backend import Backend, choose


def qk_norm_rope_torch(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """The definition, [B, S, H, D]: float32 (float64) throughout, rounded to the dtype of x once, at the end.

    Arguments as `qk_norm_rope`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    over = (-2, -1) if weight is not None and weight.numel() != x.shape[-1] else (-1,)  # all heads, or each
    n = wide * torch.rsqrt(wide.square().mean(over, keepdim=True) + eps)
    if weight is not None:
        n = n * weight.to(wide.dtype).view(-1, x.shape[-1])
    if cos is not None and sin is not None:
        c, s = cos.to(wide.dtype)[:, None], sin.to(wide.dtype)[:, None]  # [S, 1, D/2], over the heads
        even, odd = n.view(*n.shape[:-1], -1, 2).unbind(-1)
        n = torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)
    return n.to(x.dtype)


def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> Tensor:
    """x [B, S, H, D] normalised and turned, in its own dtype; contiguous.

    weight [D]: each head by itself; [H D]: all heads together; None: each head, no scale. cos, sin [S, D/2], one angle
    per pair of neighbours (2i, 2i+1), or None for no rotation.
    Raises ValueError for other shapes or an odd D, and as `backend.choose`.
    """
    heads, size = x.shape[-2:]
    if x.dim() != 4 or size % 2:
        raise ValueError(f"x must be [B, S, H, D] with an even D, got {list(x.shape)}")
    if weight is not None and weight.shape not in ((size,), (heads * size,)):
        raise ValueError(f"weight must be [{size}] or [{heads * size}] for x {list(x.shape)}, got {list(weight.shape)}")
    for name, angles in (("cos", cos), ("sin", sin)):
        if (cos is None) != (sin is None) or (angles is not None and angles.shape != (x.shape[1], size // 2)):
            given = None if angles is None else list(angles.shape)
            raise ValueError(f"{name} must be [{x.shape[1]}, {size // 2}] for x {list(x.shape)}, got {given}")
    if choose("qk_norm_rope", x, backend) == "torch":
        return qk_norm_rope_torch(x, weight, cos, sin, eps)
    from genrl.kernels.qk_norm_rope_triton import QKNormRope

    found: Tensor = QKNormRope.apply(x, weight, cos, sin, eps)  # type: ignore[no-untyped-call]
    return found
