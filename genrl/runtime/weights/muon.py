"""Muon for matrices, AdamW for everything else: one optimiser with the groups of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for parameters with two dimensions and `torch.optim.AdamW` for the others, as its authors do
    (Jordan et al. 2024).

    betas: of AdamW. adjust_lr_fn: by default steps are scaled to the size of AdamW's (Liu et al., arXiv 2502.16982,
    eq. 4), so that one learning rate serves both.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._muon = torch.optim.Muon(
            [{"params": list(filter(_is_matrix, group["params"]))} for group in self.param_groups],
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=(ns_coefficients[0], ns_coefficients[1], ns_coefficients[2]),
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        rest = [{"params": [p for p in group["params"] if not _is_matrix(p)]} for group in self.param_groups]
        self._adamw = torch.optim.AdamW(rest, betas=betas, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both."""
        parts: tuple[torch.optim.Optimizer, ...] = (self._muon, self._adamw)
        for part in parts:
            part.state = self.state  # loading a state puts another dictionary there
            for own, group in zip(self.param_groups, part.param_groups, strict=True):
                group["lr"] = own["lr"]
            part.step()


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim == 2
