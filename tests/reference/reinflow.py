"""ReinFlow (arXiv 2505.22094): the noise of the steps that its noise head does not set."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NoiseSchedule = Literal["vp", "lin", "const"]


def scheduled_std(sigma: Tensor, kind: NoiseSchedule, *, low: float) -> Tensor:
    """ReinFlow's std for steps that its noise head does not set, shape of sigma: time = 1 - sigma.

    "vp" sqrt(.2 time (1 - time)), "lin" .1 time, "const" `low` (its choice for the steps before the trained ones).
    """
    time = 1.0 - sigma
    if kind == "vp":
        return (0.2 * time * (1.0 - time)).sqrt()
    if kind == "lin":
        return 0.1 * time
    if kind == "const":
        return torch.full_like(sigma, low)
    raise ValueError(f"kind must be 'vp', 'lin' or 'const', got {kind!r}")
