"""The optimiser steps of methods over tokens: micro-batches of rows, their loss, and what it measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import CAUSES, Loss, Results, descend, require_on_policy
from genrl.vlm.methods.sharing import Update

ON_POLICY = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""How far a log-probability may be from that before the update where nothing was trained yet."""

NAMES = {
    "entropy": "entropy/sampled",
    "policy_entropy": "entropy/policy",
    "ratio_mean": "ratio/mean",
    "ratio_max": "ratio/max",
    "clipped": "ratio/clipped",
    "kl_k2": "kl",
    "kl_k3": "kl",
    "kl_k3_clamped": "kl",
    "drift": "ratio/drift",
}
"""From what `policy_loss` measures to the catalogue of metrics."""
NORMS = {"policy": "grad_norm", "critic": "grad_norm/critic"}
"""The same, from groups of parameters to the norms of their gradients."""
EVIDENCE = ("loss", "log_prob")
"""What a loss returns beside its metrics."""


def update(
    loop: Loop,
    settings: Any,
    policy: Any,
    one: Update,
    recorded: Callable[[Update, Tensor], Recorded],
    loss: Loss,
    *,
    dtype: torch.dtype,
    groups: Sequence[str] = ("policy",),
    idle: Callable[[], Tensor] | None = None,
) -> dict[str, float]:
    """One optimiser step. The loss is the sum of those of the micro-batches of all processes.

    recorded: what the loss of some of this process's rows is made of. policy: what the loss is called with. groups: of
    parameters that are stepped. idle: as of `descend`.
    """
    fresh = loop.updates == 0  # nothing was trained yet: both forward passes must agree
    sums: dict[str, float] = defaultdict(float)
    most, error, num_tokens = 0.0, 0.0, 0
    figures: dict[str, float] = {}

    def prepare(rows: Tensor) -> Recorded | None:
        return recorded(one, rows) if len(rows) else None

    def measure(rows: Tensor, results: Results, given: Recorded) -> None:
        nonlocal most, error, num_tokens
        mask = given["mask"]
        number = int(mask.sum())
        if number:
            old = given["old_log_prob"] if "old_log_prob" in given else results["log_prob"].detach()
            apart = (results["log_prob"].detach() - old)[mask]
            error = max(error, float(apart.abs().max()) if fresh else 0.0)
            sums["drift"] -= float(apart.sum())
        for name in [name for name in results if name not in EVIDENCE]:
            value = float(results[name])
            if name == "ratio_max":
                most = max(most, value)
            else:  # parts of the loss add up; the others are means over the part's tokens
                sums[name] += value * (1 if name.startswith("loss/") else number)
        num_tokens += number
        sums["loss"] += float(results["loss"].detach())

    def agree() -> None:
        figures.update(_joint(sums, most, error, num_tokens))
        # Before the step, in all processes: an update on wrong ratios must not reach the weights.
        check_on_policy(figures.pop("error"), dtype)

    norms = descend(
        loop, settings, policy, one.passes, prepare, loss,
        groups=groups, done=len, measure=measure, idle=idle, before_step=agree,
    )  # fmt: skip
    return figures | {NORMS[name]: norm for name, norm in norms.items()}


def _joint(sums: dict[str, float], most: float, error: float, seen: int) -> dict[str, float]:
    every = gather_object([{"sums": dict(sums), "most": most, "error": error, "seen": seen}])
    tokens = max(1, sum(process_sums["seen"] for process_sums in every))
    figures = {"error": max(process_sums["error"] for process_sums in every)}
    for name in dict.fromkeys(name for process_sums in every for name in process_sums["sums"]):
        total = sum(process_sums["sums"].get(name, 0.0) for process_sums in every)
        mean = total if name == "loss" or name.startswith("loss/") else total / tokens
        figures[NAMES.get(name, name)] = mean
    if "ratio/mean" in figures:
        figures["ratio/max"] = max(process_sums["most"] for process_sums in every)
    return figures


def check_on_policy(error: float, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless the first update's log-probabilities are those that its ratios compare with."""
    require_on_policy(error, ON_POLICY[dtype], "the log-probability of a token of the answers", causes=CAUSES)
