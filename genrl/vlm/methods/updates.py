"""The optimiser steps of methods over tokens: micro-batches of rows, their loss, and what it measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.recorded import Recorded
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

Loss = Callable[[Any, Any, Recorded], Mapping[str, Tensor]]


def passes(
    loop: Loop,
    settings: Any,
    called: Any,
    parts: Sequence[Tensor],
    number: int,
    recorded: Callable[[Tensor], Recorded],
    loss: Loss,
    *,
    idle: Callable[[], Tensor] | None = None,
) -> Iterator[tuple[Mapping[str, Tensor], Recorded]]:
    """The forward and backward passes of one optimiser step; yields what each part's loss returned and was made of.

    parts: of this process, int64 rows each. number: passes of the process that has most. recorded: what the loss of
    some rows is made of. called: what the loss is called with. idle: the loss of a pass without rows, where processes
    make their passes together.
    """
    for k in range(number):
        rows = (
            parts[k] if k < len(parts) else torch.zeros(0, dtype=torch.int64)
        )  # it is another process that has the last ones
        results: Mapping[str, Tensor] = {"loss": torch.zeros(())}
        given = Recorded(None, {})
        with loop.fitting():
            if len(rows):
                given = recorded(rows)
                results = loss(settings, called, given)
            elif idle is not None:
                results = {"loss": idle()}
            loop.backward(settings, results, given)
        loop.advance(len(rows))
        if len(rows):
            yield results, given
    loop.check_stop()


def summed(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums by name over all processes, of which some may lack a name."""
    every = gather_object([dict(sums)])
    return {name: sum(one.get(name, 0.0) for one in every) for name in dict.fromkeys(n for one in every for n in one)}


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
    parameters that are stepped. idle: the loss of a pass without rows, where processes make their passes together.
    """
    fresh = loop.updates == 0  # nothing was trained yet: both forward passes must agree
    sums: dict[str, float] = defaultdict(float)
    most, error, seen = 0.0, 0.0, 0
    for results, given in passes(
        loop, settings, policy, one.parts, one.passes, partial(recorded, one), loss, idle=idle
    ):
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
        seen += number
        sums["loss"] += float(results["loss"].detach())
    found = _joint(sums, most, error, seen)
    check_on_policy(found.pop("error"), dtype)
    norms = loop.step(groups)
    return found | {NORMS[name]: norm for name, norm in norms.items()}


def _joint(sums: dict[str, float], most: float, error: float, seen: int) -> dict[str, float]:
    every = gather_object([{"sums": dict(sums), "most": most, "error": error, "seen": seen}])
    tokens = max(1, sum(one["seen"] for one in every))
    found = {"error": max(one["error"] for one in every)}
    for name in dict.fromkeys(name for one in every for name in one["sums"]):
        total = sum(one["sums"].get(name, 0.0) for one in every)
        mean = total if name == "loss" or name.startswith("loss/") else total / tokens
        found[NAMES.get(name, name)] = mean
    if "ratio/mean" in found:
        found["ratio/max"] = max(one["most"] for one in every)
    return found


def check_on_policy(error: float, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless the first update's log-probabilities are those that its ratios compare with."""
    if not error <= ON_POLICY[dtype]:
        raise RuntimeError(
            "the model assigns different log-probabilities to the answers it has just generated: they are "
            f"{error:.2g} off before any update. Look for dropout, statistics that change, or another "
            "device or precision."
        )
