"""What is logged of an iteration's samples: their scores, and how far apart they are."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.rollout.scoring import Scored


def score_metrics(scored: Scored, total: Tensor) -> dict[str, float]:
    """Means and spreads of an iteration's scores, over the samples that have one."""
    metrics = {"reward/total_mean": _mean(total), "reward/total_std": _std(total)}
    for label, values in scored.values.items():
        metrics[f"reward/{label}_mean"] = _mean(values)
        metrics[f"reward/{label}_std"] = _std(values)
        metrics[f"reward/{label}_failed"] = float(values.isnan().sum())
    return metrics | {f"reward/{name}_mean": _mean(values) for name, values in scored.parts.items()}


def spread(rollouts: Rollouts) -> Tensor:
    """Standard deviation of a number of x_0 over the samples of a prompt, its mean over numbers: for each prompt of
    which this process has two samples or more."""
    samples: dict[int, list[Tensor]] = defaultdict(list)
    for micro_batch in rollouts.mine.values():
        for slot, final in zip(micro_batch.slots, micro_batch.final, strict=True):
            samples[int(rollouts.group[slot])].append(final.float())
    return torch.tensor([float(torch.stack(same).std(dim=0).mean()) for same in samples.values() if len(same) > 1])


def _mean(values: Tensor) -> float:
    return float(values.nanmean()) if not bool(values.isnan().all()) else math.nan


def _std(values: Tensor) -> float:
    kept = values[~values.isnan()]
    return float(kept.std(correction=0)) if len(kept) else math.nan
