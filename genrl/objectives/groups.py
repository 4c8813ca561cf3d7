"""Advantages within groups: samples of one prompt slot compared with each other.

Shapes: rewards [N] (any float type, computed in float64), group [N] integers: the *slot* a sample belongs to, never a
hash of its prompt (two slots with the same text stay two groups). Returned advantages are float64 [N].
NaN means "no score": left out of every statistic, its advantage is 0. An infinite reward is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scale = Literal["group", "global", "none"]


class GroupStatistics(NamedTuple):
    """How much the rewards of one iteration can teach."""

    zero_std_ratio: float  # share of the groups without spread (fewer than two scores included): they give no update
    mean_std: float  # mean over scored groups of the population standard deviation; NaN where nothing has a score


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    *,
    scale: Scale,
    eps: float = 1e-4,
    eps_mode: Literal["add", "floor"] = "add",
    ddof: int = 0,
    clip: float | None = None,
) -> Tensor:
    """`(r - mean of its group) / std`, [N]: the group-relative advantage of GRPO (arXiv 2402.03300, section 4.1.2).

    scale: "group" divides by the group's own std (Flow-GRPO, arXiv 2505.05470); "global" keeps
    the group's mean and divides by the std of all rewards of the iteration, so that groups with a small spread keep
    small advantages; "none" only subtracts the mean (Dr. GRPO, arXiv 2503.20783).
    eps_mode: "add" gives `std + eps` (Flow-GRPO 1e-4, DanceGRPO 1e-8), "floor" `max(std, eps)` (Flow-Factory 1e-6).
    ddof: 0 population std, 1 sample std (DanceGRPO). clip: clamp to +-clip afterwards (5 in the released trainers).
    For a global mean as well as a global std, give all samples one group.
    Groups with fewer than two scores or no spread get exactly 0.
    """
    values, index, scored = _checked(rewards, group)
    mean, std = _moments(values, index, scored, ddof)
    informative = _informative(values, index, scored)[0]
    centred = torch.where(informative, values - mean[index], 0.0)
    if scale == "group":
        centred = centred / _regularised(std[index], eps, eps_mode)
    elif scale == "global":
        everyone = torch.zeros_like(index)
        centred = centred / _regularised(_moments(values, everyone, scored, ddof)[1], eps, eps_mode)
    elif scale != "none":
        raise ValueError(f"scale must be 'group', 'global' or 'none', got {scale!r}")
    centred = torch.where(informative, centred, 0.0)  # with eps = 0 a group without spread is 0 / 0
    return centred if clip is None else centred.clamp(-clip, clip)


def informative(rewards: Tensor, group: Tensor) -> Tensor:
    """Whether a sample can be learnt from, bool [N]: it has a score, and the scores of its group differ."""
    values, index, scored = _checked(rewards, group)
    return _informative(values, index, scored)[0]


def group_statistics(rewards: Tensor, group: Tensor) -> GroupStatistics:
    """Spreads of rewards [N] by group [N], to be logged beside the advantages."""
    values, index, scored = _checked(rewards, group)
    _, std = _moments(values, index, scored, ddof=0)
    _, spread = _informative(values, index, scored)
    has_score = torch.zeros_like(std).index_add(0, index, scored.to(std)) > 0
    return GroupStatistics(
        zero_std_ratio=float((~spread).double().mean()),
        mean_std=float(std[has_score].mean()),
    )


def best_and_worst(rewards: Tensor, group: Tensor, *, pair_in_ties: bool = False) -> Tensor:
    """+1 for the first maximum of a group, -1 for its first minimum, else 0, [N] ("dpo" mode of Flow-GRPO's tracker).

    A group without spread gives no pair. pair_in_ties makes one of it as the released tracker does: +1 for its second
    sample and -1 for its first, which prefers nothing.
    """
    values, index, scored = _checked(rewards, group)
    result = torch.zeros_like(values)
    for slot in range(int(index.max()) + 1):
        members = ((index == slot) & scored).nonzero()[:, 0]
        if members.numel() < 2:
            continue
        scores = values[members]
        best, worst = int(scores.argmax()), int(scores.argmin())
        if scores[best] == scores[worst]:
            if not pair_in_ties:
                continue
            best, worst = 1, 0
        result[members[best]], result[members[worst]] = 1.0, -1.0
    return result


def gdpo_advantages(rewards: Sequence[Tensor], weights: Sequence[float], group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Decoupled normalisation of several rewards (GDPO, arXiv 2601.05242, as in Flow-Factory).

    Each reward is normalised in its group by itself, `z_k = (r_k - mean_g) / max(std_g, eps)`; then
    `c = sum_k w_k z_k` is whitened over the iteration, `A = (c - mean c) / max(std c, eps)` (population std).
    rewards: K tensors [N]. A sample without one of the scores has none.
    """
    parts = complete_rewards(rewards, weights)
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        total += weight * group_advantages(part, group, scale="group", eps=eps, eps_mode="floor")
    # Its advantages are 0, which would count as an average sample in the whitening.
    total[torch.stack(parts).isnan().all(0)] = torch.nan
    return group_advantages(total, torch.zeros_like(group), scale="group", eps=eps, eps_mode="floor")


def _checked(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards in float64 (0 where unscored), the dense group index of each, and the mask of the scored ones."""
    if rewards.dim() != 1 or rewards.shape != group.shape or rewards.numel() == 0:
        raise ValueError(
            f"rewards and group must be vectors of one length; got {list(rewards.shape)} and {list(group.shape)}"
        )
    if group.is_floating_point():
        raise ValueError(f"group must hold integers (slot numbers), got {group.dtype}")
    values = rewards.detach().double()
    if bool(values.isinf().any()):
        where = values.isinf().nonzero()[:, 0].tolist()
        raise ValueError(f"the rewards of samples {where} are infinite; a sample without a score must be NaN")
    scored = ~values.isnan()
    # Numbered densely: slots may be any integers, and sums per group are taken by index.
    index = torch.unique(group, return_inverse=True)[1].to(values.device)
    return torch.where(scored, values, 0.0), index, scored


def complete_rewards(rewards: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    """K rewards [N] in float64, NaN in all where any of weight other than 0 is: the same samples in every statistic.

    Raises ValueError for no reward, another number of weights, or no weight other than 0.
    """
    if not rewards or len(rewards) != len(weights):
        raise ValueError(f"as many weights as rewards are needed, at least one; got {len(weights)} and {len(rewards)}")
    if not any(weights):
        raise ValueError("all reward weights are 0: there is nothing to learn from")
    parts = [reward.detach().double() for reward in rewards]
    missing = torch.stack([part.isnan() for part, weight in zip(parts, weights, strict=True) if weight != 0])
    return [torch.where(missing.any(0), torch.nan, part) for part in parts]


def _moments(values: Tensor, index: Tensor, kept: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and std per group over the kept samples, in two passes (never E[x^2] - E[x]^2); 0 where undefined."""
    groups = int(index.max()) + 1
    empty = values.new_zeros(groups)
    count = empty.index_add(0, index, kept.to(values))
    mean = empty.index_add(0, index, torch.where(kept, values, 0.0)) / count.clamp(min=1)
    squares = torch.where(kept, values - mean[index], 0.0) ** 2
    std = (empty.index_add(0, index, squares) / (count - ddof).clamp(min=1)).sqrt()
    return mean, torch.where(_informative(values, index, kept)[1], std, 0.0)


def _range(values: Tensor, index: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    groups = int(index.max()) + 1
    low, high = values.new_full((groups,), torch.inf), values.new_full((groups,), -torch.inf)
    low = low.scatter_reduce(0, index, torch.where(kept, values, torch.inf), "amin")
    return low, high.scatter_reduce(0, index, torch.where(kept, values, -torch.inf), "amax")


def _informative(values: Tensor, index: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Per sample and per group: is it scored, in a group of two different scores at least?

    Decided by the range: the std of equal numbers need not be exactly 0. Rewards are float32 numbers at best, so what
    is less than their precision apart is equal.
    """
    low, high = _range(values, index, kept)
    groups = high - low > torch.finfo(torch.float32).eps * torch.maximum(high.abs(), low.abs())
    return groups[index] & kept, groups


def _regularised(std: Tensor, eps: float, eps_mode: Literal["add", "floor"]) -> Tensor:
    if eps_mode == "add":
        return std + eps
    if eps_mode == "floor":
        return std.clamp(min=eps)
    raise ValueError(f"eps_mode must be 'add' or 'floor', got {eps_mode!r}")


# Which groups of a rollout are worth an update: pure tensors.
#
# rewards or accuracies [N] (NaN = no score, left out), group [N] integers.


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
