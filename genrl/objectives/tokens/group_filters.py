"""Which groups of a rollout are worth an update: pure tensors.

rewards or accuracies [N] (NaN = no score, left out), group [N] integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.advantages.groups import group_advantages


def within(accuracy: Tensor, group: Tensor, *, low: float = 0.01, high: float = 0.99) -> Tensor:
    """Rows of groups whose mean accuracy is inside of (low, high), bool [N]: online filtering (EasyR1, VPPO).

    Groups always or never solved teach nothing. low -1: only those always solved are dropped (NGRPO). A group without
    any score is dropped.
    """
    if low >= high:
        raise ValueError(f"the bounds of the mean accuracy must be low < high, got {low} and {high}")
    mean = group_means(accuracy, group)
    return (mean > low) & (mean < high)


def with_spread(rewards: Tensor, group: Tensor) -> Tensor:
    """Rows of groups with two different rewards or more, [N]: DAPO's dynamic sampling (arXiv 2503.14476, eq. 11)."""
    centred = group_advantages(rewards, group, scale="none").abs()
    index = torch.unique(group, return_inverse=True)[1].to(centred.device)
    total = centred.new_zeros(int(index.max()) + 1).index_add(0, index, centred)
    return total[index] > 0


def group_means(values: Tensor, group: Tensor) -> Tensor:
    """Mean over the scored rows of each row's group, float64 [N]; NaN where none is scored."""
    index = torch.unique(group, return_inverse=True)[1].to(values.device)
    scored = ~values.isnan()
    empty = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=values.device)
    total = empty.index_add(0, index, torch.where(scored, values.detach().double(), 0.0))
    return (total / empty.index_add(0, index, scored.double()))[index]
