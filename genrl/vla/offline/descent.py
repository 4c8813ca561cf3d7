"""Optimiser steps on data: of the policy by the run's own optimiser, of networks beside it by theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter, Results, descend
from genrl.vla.rollout.sampling import Acting, Sampler
from genrl.vla.run import VLARun

Step = Callable[[Recorded], Mapping[str, Tensor]]
"""Takes what a loss is made of: loss, gradients, clipping and an optimiser step. Returns what the loss found."""


def stepper(run: VLARun, settings: Any, loss: Loss, sampler: Sampler | None = None) -> Step:
    """An optimiser step of a run's own optimiser on the policy, by the method's loss. sampler: None = that of the
    running iteration."""
    loop = run.loop

    def step(recorded: Recorded) -> Mapping[str, Tensor]:
        loop.optimizer.zero_grad(set_to_none=True)  # imitation by an optimiser of its own leaves gradients behind
        acting = run.acting if sampler is None else Acting(run.policy, sampler)
        figures: dict[str, Tensor] = {}

        def measure(part: Recorded, results: Results, _: Recorded) -> None:
            figures.update({name: value.detach().cpu() for name, value in results.items()})

        # One part: these losses are means over a batch that was sampled as a whole.
        descend(loop, settings, acting, [recorded], lambda one: one, loss, groups=["policy"], measure=measure)
        return figures

    return step


def step_beside(optimiser: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> float:
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
    meter = Meter()
    for row in rows:
        meter.note({f"{prefix}/{name}": value for name, value in row.items()})
        run.loop.advance(1)
    return meter.result()
