"""Running means over the micro-batches of an iteration, over all processes."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives.advantages import GroupStatistics
from genrl.objectives.policy_losses import SurrogateOutput


class Meter:
    """Collects per-sample values; `result` is their mean (`*/std`: standard deviation, `*/max_abs_dev`: maximum)."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self._same: dict[str, float] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Values [any] of this process."""
        self._values[name].append(values.detach().flatten().double().cpu())

    def add_groups(self, statistics: GroupStatistics, advantages: Tensor, clip: float) -> None:
        """What all processes know alike."""
        self.add_spread(statistics)
        self.add_advantages(advantages, clip)

    def add_spread(self, statistics: GroupStatistics) -> None:
        self._same |= {"zero_std_ratio": statistics.zero_std_ratio, "group_std_mean": statistics.mean_std}

    def add_advantages(self, advantages: Tensor, clip: float) -> None:
        trained = advantages[advantages != 0]
        self._same |= {
            "advantage/abs_mean": float(trained.abs().mean()) if len(trained) else 0.0,
            "advantage/clipped": float((trained.abs() >= clip).double().mean()) if len(trained) else 0.0,
        }

    def add_surrogate(self, surrogate: SurrogateOutput, advantage: Tensor) -> None:
        ratio = surrogate.ratio
        self.add("loss/policy", surrogate.loss)
        self.add("ratio/mean", ratio)
        self.add("ratio/std", ratio - 1.0)  # about 1, where squares would lose what distinguishes ratios
        self.add("ratio/max_abs_dev", (ratio - 1.0).abs())
        self.add("clip_frac_high", surrogate.clipped & (advantage > 0))
        self.add("clip_frac_low", surrogate.clipped & (advantage < 0))

    def result(self) -> dict[str, float]:
        """Name -> value over all processes; the same on each."""
        mine = {name: torch.cat(values) for name, values in self._values.items()}
        summed = {name: (float(v.sum()), len(v), float(v.max()), float(v.square().sum())) for name, v in mine.items()}
        everyone: list[dict[str, tuple[float, int, float, float]]] = gather_object([summed])
        found = dict(self._same)
        for name in sorted({name for one in everyone for name in one}):
            pieces = [one[name] for one in everyone if name in one]
            count = sum(p[1] for p in pieces)
            mean = math.fsum(p[0] for p in pieces) / count
            if name.endswith("/max_abs_dev"):
                found[name] = max(p[2] for p in pieces)
            elif name.endswith("/std"):
                found[name] = math.sqrt(max(0.0, math.fsum(p[3] for p in pieces) / count - mean**2))
            else:
                found[name] = mean
        return found
