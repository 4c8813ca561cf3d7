"""Advantages for token policies beyond `groups.group_advantages`, and what is done to advantages afterwards.

Shapes: rewards [N] (one per completion; NaN = no score, advantage 0), group [N] integers, mask [N, T]. Advantages are
float64, [N] or [N, T]. **All rows of the rollout batch of all processes go in at once**: a mean over a micro-batch is
another estimator. GRPO's own advantage is `group_advantages(r, group, scale="group", eps=1e-4, ddof=1)` (TRL; 1e-6 in
verl and EasyR1), Dr. GRPO's has scale "none", and TRL's batch scaling is "global".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.objectives.groups import group_advantages
from genrl.objectives.tokens import masked, per_token, row_mean

Visits = dict[str, tuple[int, float, float]]
"""Prompt -> (visits, mean, std) of its rewards so far. Plain JSON, so that a checkpoint can hold it."""


class SmoothedAdvantages(NamedTuple):
    """advantage float64 [N]; visits: the statistics after this rollout batch, of all prompts."""

    advantage: Tensor
    visits: Visits


class HierarchicalAdvantages(NamedTuple):
    """high [N] for the tokens of the first step, low [N] for those of the second."""

    high: Tensor
    low: Tensor


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """`r - mean of the others of its group`: RLOO (arXiv 2402.14740), [N]. A sample without others gets 0."""
    index, count = _scored_counts(rewards, group)
    size = count[index]
    # r - mean of the others = (r - mean of all) n / (n - 1): no second pass over the group.
    return group_advantages(rewards, group, scale="none") * size / (size - 1.0).clamp(min=1.0)


def length_weighted(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """`r - sum_j n_j r_j / sum_j n_j` over the group, [N]: OPO's optimal baseline (arXiv 2505.23585), under its
    assumption that the squared gradient of a completion grows as its number of tokens. lengths [N].

    Groups without spread or with one score get 0 (verl keeps the whole reward of a group of one).
    """
    plain = group_advantages(rewards, group, scale="none")
    index = torch.unique(group, return_inverse=True)[1].to(plain.device)
    weight = torch.where(rewards.isnan(), 0.0, lengths.double())
    zero = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=plain.device)
    shift = zero.index_add(0, index, weight * plain) / zero.index_add(0, index, weight).clamp(min=1)
    informative = zero.index_add(0, index, plain.abs()) > 0
    return torch.where(informative[index] & ~rewards.isnan(), plain - shift[index], 0.0)


def over_tokens(rewards: Tensor, lengths: Tensor, group: Tensor, *, eps: float = 1e-6, limit: float = 5.0) -> Tensor:
    """`(r - mean) / (std + eps)` over the tokens of the group, a reward for each token, [N]: HAPO. A group in which one
    would reach `limit`, a short answer among long ones, has GRPO's. lengths [N]; std is that of a sample.
    """
    plain = group_advantages(rewards, group, scale="group", eps=eps, ddof=1)
    centred = group_advantages(rewards, group, scale="none")
    index = torch.unique(group, return_inverse=True)[1].to(plain.device)
    weight = torch.where(rewards.isnan(), 0.0, lengths.double())
    zero = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=plain.device)

    def summed(values: Tensor) -> Tensor:
        return zero.index_add(0, index, weight * values)

    tokens = zero.index_add(0, index, weight)
    centred = torch.where(rewards.isnan(), 0.0, centred - (summed(centred) / tokens.clamp(min=1))[index])
    std = (summed(centred**2) / (tokens - 1).clamp(min=1)).sqrt()
    scores = centred / (std[index] + eps)
    far = zero.index_add(0, index, (scores.abs() >= limit).double()) > 0
    return torch.where(far[index] | rewards.isnan(), plain, scores)


def signed(right: Tensor, lengths: Tensor, *, positive: float, negative: float) -> Tensor:
    """`positive` of right answers and `negative` of the others, [N]: NSR is 0 and -1, PSR 1 and 0, W-REINFORCE .1 and
    -1 (arXiv 2506.01347). right [N]: 1, 0, NaN = no score.

    Answers of 0 are removed there; here the others are multiplied by all tokens over theirs, the same in a mean over
    all tokens. lengths [N].
    """
    value = torch.full_like(right, negative, dtype=torch.float64).masked_fill(right > 0, positive)
    value = value.masked_fill(right.isnan(), 0.0)
    tokens = lengths.double()
    return value * tokens.sum() / torch.where(value != 0, tokens, 0.0).sum().clamp(min=1.0)


def asymmetric(advantage: Tensor, right: Tensor, group: Tensor, *, alpha: float = 1.0, eps: float = 1e-6) -> Tensor:
    """`(1 - M) A / 2 / (1 - sqrt(m) + eps) + M A / 2 / (sqrt(m) + eps)`, positive ones times min(1, M / alpha): A-GRAE
    (arXiv 2602.05548), m the share of right answers [N] of the group, M the mean of m over groups.

    advantage [N] or [N, T]. right: 1, 0, NaN = no score. A group that is all wrong or all right keeps its advantages,
    but for the praise: in the paper they are 0, and here they come from other rewards, which eps would make a million
    times as large.
    """
    index = torch.unique(group, return_inverse=True)[1].to(right.device)
    zero = torch.zeros(len(group), dtype=torch.float64, device=right.device)
    number = zero.index_add(0, index, (~right.isnan()).double())
    share = zero.index_add(0, index, right.double().nan_to_num(nan=0.0)) / number.clamp(min=1)
    mean = share[number > 0].mean() if bool((number > 0).any()) else share.sum()
    root = share.sqrt()[index]
    factor = 0.5 * ((1 - mean) / (1 - root + eps) + mean / (root + eps))
    factor = torch.where((root > 0) & (root < 1), factor, 1.0)
    praise = (mean / alpha).clamp(max=1.0)
    factor = factor if advantage.dim() == 1 else factor[:, None]
    changed = advantage.double() * factor
    return torch.where(changed > 0, changed * praise, changed)


def greedy_baseline(rewards: Tensor, greedy: Tensor) -> Tensor:
    """`r - r_greedy`, [N]: ReMax (arXiv 2310.10505, algorithm 1); greedy [N], the reward of the most probable answer to
    the same question. 0 where either has no score (NaN)."""
    return (rewards.detach().double() - greedy.detach().double()).nan_to_num(nan=0.0)


def informative_factor(advantage: Tensor, group: Tensor) -> Tensor:
    """`B / (B - M)`, [], M of the B rows being in groups whose advantages [N] are all 0, or without a score (NaN): GPG
    multiplies all advantages by it (arXiv 2504.02546), since these rows add nothing and count in the mean. 1 if M = B.

    verl has the number of rows whose *reward* is not 0 in place of B - M.
    """
    index = torch.unique(group, return_inverse=True)[1]
    total = torch.zeros(int(index.max()) + 1, dtype=advantage.dtype, device=advantage.device)
    spread = total.index_add(0, index, advantage.nan_to_num(nan=0.0).abs()) > 0
    informative = (spread[index] & ~advantage.isnan()).sum()
    return len(advantage) / torch.where(informative > 0, informative, len(advantage)).to(advantage.dtype)


def with_virtual_reward(
    rewards: Tensor, group: Tensor, *, best: float = 1.0, count: int = 1, eps: float = 1e-6
) -> Tensor:
    """Group z-score with `count` virtual samples of reward `best` in mean and std: NGRPO (arXiv 2509.18851), [N].

    A group that is all wrong gets a common negative advantage instead of 0. Sample std.
    """
    # Not of groups without a score, which would be made of virtual samples alone.
    slots = torch.unique(group[~rewards.isnan()]).repeat_interleave(count)
    extended = torch.cat([rewards, rewards.new_full((len(slots),), best)])
    advantage = group_advantages(extended, torch.cat([group, slots]), scale="group", eps=eps, ddof=1)
    return advantage[: len(rewards)]


def normalise_then_sum(components: Tensor, weights: Sequence[float], group: Tensor, *, eps: float = 1e-4) -> Tensor:
    """Each reward a z-score in its group, then their weighted sum, then a z-score over the batch: GDPO as in TRL, [N].

    components [N, K]; NaN = does not apply to this sample, and adds nothing. Sample std, `std + eps` throughout.
    `groups.gdpo_advantages` is Flow-Factory's form, with population std, a floor, and no missing parts.
    """
    if components.dim() != 2 or components.shape[1] != len(weights):
        raise ValueError(f"components [N, K] need K weights, got {list(components.shape)} and {len(weights)}")
    total = torch.zeros(len(components), dtype=torch.float64, device=components.device)
    for part, weight in zip(components.unbind(dim=1), weights, strict=True):
        total += weight * group_advantages(part, group, scale="group", eps=eps, ddof=1)
    # Not the 0 of an empty sum, which would count in mean and std of the batch.
    total[components.isnan().all(dim=1)] = torch.nan
    return batch_normalised(total, eps=eps)


def batch_normalised(advantage: Tensor, mask: Tensor | None = None, *, eps: float = 1e-8) -> Tensor:
    """`(A - mean) / (std + eps)`, sample std: over the rows [N], or over the valid tokens of [N, T] (0 elsewhere).

    VL-DAC over the steps of a rollout (1e-8), POAD over its tokens, PARA-GRPO over rows after the group's z-score.
    """
    if mask is None:
        return group_advantages(advantage, _one_group(advantage), scale="group", eps=eps, ddof=1)
    valid = mask.bool()
    result = torch.zeros(mask.shape, dtype=torch.float64, device=advantage.device)
    result[valid] = group_advantages(advantage[valid], _one_group(advantage[valid]), scale="group", eps=eps, ddof=1)
    return result


def rank_quantiles(rewards: Tensor, group: Tensor) -> Tensor:
    """Quantile of the standard normal at the reward's rank in its group, [N]: G2RPO (OpenVLThinkerV2).

    `q_(k) = Phi^-1((k - 1/2) / n)`, k = 1 for the lowest of n; equal rewards share the mean of theirs, so that a group
    without spread gets 0. One outlier cannot make all others equal, as it does in a z-score. For ranks within a task
    instead of a prompt, give all samples of the task one group.
    """
    values = rewards.detach().double()
    index = torch.unique(group, return_inverse=True)[1].to(values.device)
    result = torch.zeros_like(values)
    for slot in range(int(index.max()) + 1):
        members = ((index == slot) & ~values.isnan()).nonzero()[:, 0]
        if members.numel() == 0:
            continue
        size = members.numel()
        levels = (torch.arange(size, dtype=torch.float64, device=values.device) + 0.5) / size
        _, which, counts = torch.unique(values[members], return_inverse=True, return_counts=True)
        quantiles = torch.special.ndtri(levels)
        # members sorted by reward: those of one reward hold a run of the levels
        sums = torch.stack([run.sum() for run in quantiles.split(counts.tolist())])
        result[members] = (sums / counts)[which] if len(counts) > 1 else 0.0
    return result


def smoothed_advantages(
    rewards: Tensor, group: Tensor, prompts: Sequence[str], visits: Mapping[str, tuple[int, float, float]]
) -> SmoothedAdvantages:
    """DCPO's smooth advantage standardisation (arXiv 2509.02333), [N]: this visit's statistics and all visits'.

    With i the number of this visit: `A_new = (r - m_new) / s_new` of this group, `A_tot` the same with mean
    and std over visits 1 .. i; of `((i-1) A_new + A_tot) / i` and `(A_new + (i-1) A_tot) / i` the one closer to 0 (the
    second on a tie). A part without spread is 0. Sample std.
    prompts: one per group, in the order of the sorted group numbers; `visits` is not changed.
    """
    values = rewards.detach().double()
    index = torch.unique(group, return_inverse=True)[1].to(values.device)
    if len(prompts) != int(index.max()) + 1:
        raise ValueError(f"one prompt per group is needed: {len(prompts)} prompts for {int(index.max()) + 1} groups")
    advantage, after = torch.zeros_like(values), dict(visits)
    new_scores = group_advantages(values, group, scale="group", eps=0.0, ddof=1)
    for slot, prompt in enumerate(prompts):
        members = (index == slot) & ~values.isnan()
        if not bool(members.any()):
            continue
        scores = values[members]
        before, mean, std = after.get(prompt, (0, 0.0, 0.0))
        visit = before + 1
        new_mean = float(scores.mean())
        # Exactly 0 for equal scores: what rounding leaves would be divided by.
        new_variance = float(scores.var()) if len(scores) > 1 and bool((scores != scores[0]).any()) else 0.0
        # The variance of all visits from two variances and the distance of their means (Chan's update).
        variance = (before * std**2 + new_variance + before / visit * (new_mean - mean) ** 2) / visit
        mean, std = (before * mean + new_mean) / visit, variance**0.5
        new = new_scores[members]
        total = (scores - mean) / std if std > 0 else torch.zeros_like(scores)
        first, second = (before * new + total) / visit, (new + before * total) / visit
        advantage[members] = torch.where(first.abs() < second.abs(), first, second)
        after[prompt] = (visit, mean, std)
    return SmoothedAdvantages(advantage, after)


def token_returns(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """`sum_{t' >= t} gamma^(t' - t) r_t'` over the valid tokens, float64 [N, T]: REINFORCE++'s return."""
    rewards = masked(token_rewards.detach().double(), mask)
    running, columns = torch.zeros_like(rewards[:, 0]), []
    for t in range(rewards.shape[1] - 1, -1, -1):
        # a masked position (an observation in the middle) passes the return on without discounting it
        running = torch.where(mask[:, t].bool(), rewards[:, t] + gamma * running, running)
        columns.append(running)
    return masked(torch.stack(columns[::-1], dim=1), mask)


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-8, ddof: int = 1) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over the valid tokens of the batch; 0 elsewhere. [N, T].

    REINFORCE++ (arXiv 2501.03262), whose code divides by the tokens less one (ddof 1); StableReinforce with eps = 0 and
    ddof 0. Values without spread give 0.
    """
    valid = mask.bool()
    chosen = masked(values.detach().double(), mask)
    count = valid.sum().clamp(min=1)
    centred = masked(chosen - chosen.sum() / count, mask)
    # eps may be 0: equal values less their rounded mean would be divided by that rounding.
    if not bool(valid.any()) or bool((chosen[valid] == chosen[valid][0]).all()):
        return torch.zeros_like(centred)
    return centred / ((centred**2).sum() / (count - ddof) + eps).sqrt()


def sigma_filtered(scores: Tensor, *, limit: float = 3.0) -> Tensor:
    """z-scores, those of |z| > limit set to 0: StableReinforce's filter (arXiv 2505.02835), elementwise."""
    return torch.where(scores.abs() > limit, torch.zeros_like(scores), scores)


def score_uncertainty(scores: Tensor, group: Tensor, *, low: float = 1.0, high: float = 5.0) -> Tensor:
    """How much the scores that a group wrote scatter, [N] in [0, 1]: Q-Hawkeye's u.

    Population variance of the parsed scores (NaN = unparsable), clipped to [low, high] first, over the largest that is
    possible, `(high - low)^2 / 4 + 1e-8`. 0 where fewer than two could be parsed.
    The transform is `A exp(-alpha u)` (alpha .2).
    """
    index, _, variance = _variances(scores.detach().double().clamp(low, high), group)
    return (variance / (0.25 * (high - low) ** 2 + 1e-8)).clamp(0.0, 1.0)[index]


def wide_groups(
    rewards: Tensor, group: Tensor, average: float | None, *, share: float, decay: float
) -> tuple[Tensor, float]:
    """Which rows, bool [N], are of groups whose rewards [N] (NaN = none) have a deviation of `share` times its moving
    average over iterations, or more; and that average, which begins as the first mean: RLPR (arXiv 2506.18254).
    """
    index, count, variance = _variances(rewards.detach().double(), group)
    deviation = variance.sqrt()
    now = float(deviation[count > 0].mean()) if bool((count > 0).any()) else 0.0
    average = now if average is None else decay * average + (1 - decay) * now
    return (deviation >= share * average)[index], average


def trajectory_weight(dependency: Tensor, mask: Tensor, *, minimum: float = 0.9) -> Tensor:
    """VPPO's factor of a row's advantage by its mean visual dependency, [N]: from `minimum` up, of mean 1.

    `beta_min + (beta_max - beta_min) n`, n the min-max normalised row mean over the batch, beta_max such that the mean
    is 1. dependency [N, T] from `token_weights.visual_dependency`. All 1 where rows differ by no more than 1e-6.
    """
    score = row_mean(dependency.detach().double(), mask)
    spread = score.max() - score.min()
    if float(spread) <= 1e-6:
        return torch.ones_like(score)
    normalised = (score - score.min()) / spread
    maximum = minimum + (1.0 - minimum) / (normalised.mean() + 1e-8)
    return minimum + (maximum - minimum) * normalised


def scaled(advantage: Tensor, factor: Tensor, mask: Tensor) -> Tensor:
    """Advantage [N] or [N, T] times one factor per row [N]."""
    return advantage * factor if advantage.dim() == 1 else per_token(advantage, mask) * factor[:, None]


def hierarchical_advantages(
    high: Tensor, low: Tensor, group: Tensor, *, share: float = 0.5, eps: float = 1e-8
) -> HierarchicalAdvantages:
    """Hi-GRPO (AR3D-R1, arXiv 2512.10949): the coarse step answers also for what the fine step makes of it.

    Rewards [N] of the coarse and of the fine step; `R_high + share R_low` and `R_low`, each a z-score in its group
    (sample std). The two losses are separate, `L = L_high + L_low`. share is not published; .5 is ours.
    """
    both = group_advantages(high + share * low, group, scale="group", eps=eps, ddof=1)
    return HierarchicalAdvantages(both, group_advantages(low, group, scale="group", eps=eps, ddof=1))


def _one_group(values: Tensor) -> Tensor:
    return torch.zeros(values.shape, dtype=torch.long, device=values.device)


def _scored_counts(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """The dense group index of each sample, and float64 counts of scored samples per group."""
    index = torch.unique(group, return_inverse=True)[1].to(values.device)
    counts = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=values.device)
    return index, counts.index_add(0, index, (~values.isnan()).double())


def _variances(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The dense group index of each sample, and of each group how many of its float64 values are no NaN, and their
    population variance; 0 where there is none."""
    index, count = _scored_counts(values, group)
    total = torch.zeros_like(count)
    mean = total.index_add(0, index, values.nan_to_num(nan=0.0)) / count.clamp(min=1)
    squares = torch.where(values.isnan(), 0.0, (values - mean[index]) ** 2)
    return index, count, total.index_add(0, index, squares) / count.clamp(min=1)
