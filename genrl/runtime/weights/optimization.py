"""Backward passes and optimiser steps: summed over processes, scaled, clipped by group, refused where not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from genrl.config.method import Method
from genrl.config.sections import EMA, Optimizer
from genrl.runtime.loop.guards import non_finite, require_finite
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.weights.optimizers import Masters, set_rate
from genrl.runtime.weights.sharding import local, whole
from genrl.runtime.weights.weights import AVERAGE, Weights


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a step: linear warm-up, then constant, or falling to the lowest.

    steps: optimiser steps of the run, where the schedule follows these; None = the warm-up follows the steps of a
    parameter group, the rest the iterations. rates: of each group before the schedule. first: the iteration that it
    begins with.
    """

    settings: Optimizer
    rates: Mapping[str, float]
    iterations: int
    steps: int | None = None
    first: int = 0

    def rate(self, group: str, *, group_steps: int, all_steps: int, iteration: int) -> float:
        """Learning rate of the (0-based) step."""
        settings = self.settings
        falls = settings.schedule_iterations or self.iterations
        if self.steps is not None:
            return scheduled(self.rates[group], settings, all_steps, self.steps * falls // self.iterations)
        warm = min(group_steps, settings.warmup_steps)  # a step of the warm-up, then an iteration
        step = warm if warm < settings.warmup_steps else warm + iteration - self.first
        return scheduled(self.rates[group], settings, step, settings.warmup_steps + falls)


@dataclass(frozen=True)
class Suspect:
    """A micro-batch of this process whose loss or gradient was not finite."""

    recorded: Recorded
    checked: dict[str, Tensor]
    """Losses, and the norm of this process's gradient (its shard) of each group with this micro-batch added."""
    results: dict[str, Tensor]
    """What the method's `loss` made of it."""
    info: dict[str, Any]


@dataclass
class Optimization:
    """The trained weights and their optimiser, whose groups have names. dumps: folder for what is not finite."""

    accelerator: Accelerator
    weights: Weights
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    dumps: Path
    average: EMA | None
    """Of the weights; None = none is kept."""
    loss_scale: float = 1.0
    """Factor on losses before their backward pass, undone in the gradients: for float16."""
    slowed: float = 1.0
    """Factor on the learning rate, of a run that has gone back (`genrl.runtime.loop.collapse`)."""
    iteration: int = 0
    steps: int = 0
    """Optimiser steps so far, those without a gradient included: the position in the schedule."""
    updates: int = 0
    """Those of the running iteration that moved the weights."""
    other_updates: int = 0
    """The same of other optimisers (`step_other`)."""
    suspects: dict[str, Suspect] = field(default_factory=dict, repr=False)
    """The first of this update, for each name that `Suspect.checked` has."""

    def backward(
        self, settings: Method, results: Mapping[str, Tensor], recorded: Recorded, *, divisor: float = 1.0
    ) -> None:
        """Add the gradient of `results["loss"].sum() / divisor`, one micro-batch's share of the update.

        results: of the method's `loss(settings, policy, recorded)`, "loss" [B] or []. divisor: the weights of all
        losses of the update, over all processes. Where a loss or the gradient is not finite, what was recorded goes
        into the dump; that all processes stop is agreed in `step`.
        """
        loss = results["loss"]
        if loss.requires_grad:
            (loss.sum() / divisor * self.loss_scale).backward()
        if "loss" in self.suspects:  # its NaN is in the gradients of all that follow
            return
        # After every micro-batch, not once per step: the dump is to hold the one that did it, not the last.
        checked = {"loss": loss.detach()}
        for group in self.optimizer.param_groups:
            gradients = [local(p.grad) for p in group["params"] if p.grad is not None]
            if gradients:
                checked[_called(group["name"])] = torch.stack(torch._foreach_norm(gradients)).sum()
        newly_bad = [name for name in non_finite(checked) if name not in self.suspects]
        if newly_bad:
            info = {
                "settings": settings.model_dump(mode="json"),
                "divisor": divisor,
                "loss_scale": self.loss_scale,
                "optimizer_steps": self.steps,
            }
            tensors = {name: value.detach() for name, value in results.items()}
            self.suspects |= dict.fromkeys(newly_bad, Suspect(recorded, checked, tensors, info))

    def step(self, groups: Sequence[str] | None = None) -> dict[str, float]:
        """Sum the gradients over the processes and step these parameter groups, the norm of each clipped by itself.

        groups: None = all. Returns the norms before clipping. One collective for the gradient, one to agree. Raises
        NonFiniteError in all processes together; the weights are then untouched.
        """
        chosen = [g for g in self.optimizer.param_groups if groups is None or g["name"] in groups]
        gradients = self._whole_gradients([p for group in chosen for p in group["params"]])
        norms, parts, first = {}, {}, 0
        for group in chosen:
            parts[group["name"]] = group_gradients = gradients[first : first + len(group["params"])]
            first += len(group["params"])
            norms[group["name"]] = _norm(group_gradients)
        self._require_finite({_called(name): norm for name, norm in norms.items()})
        self.suspects.clear()
        self.optimizer.zero_grad(set_to_none=True)  # groups that are not stepped keep no gradient either
        moved = False
        for group in chosen:
            name, norm = group["name"], float(norms[group["name"]])
            done = group["steps"] = group.get("steps", 0) + 1  # its own: others may be trained alone before
            if norm == 0.0:  # no sample counted, and momentum or weight decay alone must not move the weights
                continue
            self._clip(group["params"], parts[name], norm)
            rate = self.schedule.rate(name, group_steps=done - 1, all_steps=self.steps, iteration=self.iteration)
            set_rate(group, rate * self.slowed)
            moved = True
        if moved:
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if moved and self.average is not None and self.steps % self.average.every == 0:
            self.weights.blend(AVERAGE, self.average.decay)
        return {name: float(norm) for name, norm in norms.items()}

    def step_other(self, optimizer: torch.optim.Optimizer) -> float:
        """Make a step as `step` does for parameters beside the model, with an optimiser of their own; returns the
        gradient's norm."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = self._summed(_given(parameters))
        norm = _norm(gradients)
        self._require_finite({"gradient of another optimiser": norm})
        if float(norm) > 0.0:
            self._clip(parameters, gradients, float(norm))
            optimizer.step()
            self.other_updates += 1
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def figures(self) -> dict[str, float]:
        """Figures of the running iteration, to be logged."""
        row = {"updates": float(self.updates)}
        if isinstance(self.optimizer, Masters) and self.optimizer.applied is not None:
            row["rounding/applied"] = self.optimizer.applied
        return row

    def _clip(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], norm: float) -> None:
        # The 1e-6 is that of torch's clip_grad_norm_.
        scale = min(1.0, self.schedule.settings.max_grad_norm / (norm + 1e-6))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.mul_(scale)

    def _whole_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        gradients = _given(parameters)
        torch._foreach_div_([local(g) for g in gradients], self.loss_scale)  # in place; some may be shares
        return self._summed(gradients)

    def _summed(self, gradients: list[Tensor]) -> list[Tensor]:
        """Over the processes; one collective."""
        if self.accelerator.num_processes == 1:
            return gradients
        # FSDP has averaged those of shards; losses are divided by all processes' samples
        summed = [g * self.accelerator.num_processes if isinstance(g, DTensor) else g for g in gradients]
        replicated = [k for k, g in enumerate(summed) if not isinstance(g, DTensor)]
        if replicated:
            # Flattened into one: many small collectives cost a round trip each.
            flat = self.accelerator.reduce(torch.cat([summed[k].flatten() for k in replicated]), reduction="sum")
            for k, piece in zip(replicated, flat.split([summed[k].numel() for k in replicated]), strict=True):
                # In its own precision: beside a critic in float32 those of a policy in bfloat16 come back as that.
                summed[k] = piece.view_as(summed[k]).to(summed[k].dtype)
        return summed

    def _require_finite(self, norms: Mapping[str, Tensor]) -> None:
        """Check what is stepped: that a group which is not has no finite gradient is no reason to stop."""
        names = [name for name in ("loss", *norms) if name in self.suspects]
        suspect = self.suspects[names[0]] if names else None
        tensors: dict[str, Tensor] = {}
        results: Mapping[str, Tensor] = {}
        info: dict[str, Any] = {}
        checked = dict(norms)
        if suspect is not None:
            checked = {name: value for name, value in suspect.checked.items() if name in ("loss", *norms)}
            dumped, tensors = suspect.recorded.dumped()
            info, results = {**suspect.info, **dumped}, suspect.results
            if self.weights.can_be_copied:  # those of a large model are too many; a checkpoint has them nearly
                tensors |= {f"weights/{key}": whole(p.detach()) for key, p in self.weights.named.items()}
        require_finite(
            checked,
            where="loss" if "loss" in names else "gradient",
            step=self.iteration,
            dumps=self.dumps,
            batch=tensors,
            results=results,
            info=info,
            accelerator=self.accelerator,
        )


def _called(group: str) -> str:
    """The gradient of a group of parameters, in a dump and its message."""
    return "gradient" if group == "policy" else f"gradient/{group}"


def _given(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    # In float32: bfloat16 would round it to 8 bits. The norm of a shard is one process's part: `whole` adds the parts
    # up, so that all clip alike.
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([whole(norm) for norm in norms]))
    return norm


def scheduled(rate: float, config: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of the (0-based) optimiser step: linear warm-up, then constant, or falling to the lowest and no
    further."""
    if step < config.warmup_steps:
        # The first step already has a share of the rate: at 0 it would be computed for nothing.
        return rate * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return rate * max(config.lowest, factor[config.schedule])
