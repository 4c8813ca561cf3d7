"""Training of networks beside the policy, by an optimiser of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genrl.vla.update.learn import Figures

if TYPE_CHECKING:
    from genrl.vla.run import VLARun


def descend(optimiser: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> float:
    """One step on a loss []; returns it. clip: the largest norm of the gradient; None = any."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
    optimiser.step()
    return loss.item()


def followed(run: VLARun, phase: str, steps: int, rows: Iterator[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """A training of so many steps as a phase of the run: means of what it yields, each under prefix/name."""
    run.loop.phase(phase, steps)
    figures = Figures()
    for row in rows:
        figures.add({f"{prefix}/{name}": value for name, value in row.items()})
        run.loop.advance(1)
    return figures.means
