"""Advantages of episodes: which steps belong to one, what it was worth, advantage estimation over its steps.

Shapes: T rows of B environments; a row is one decision (a chunk of up to C actions, or one action). done [T, B, C]: an
episode ended with that action. Groups are integers [B]; environments of one group start from the same initial state.
Estimates are computed in float64. terminated: the episode ended in this row by the task's own rules; truncated: it was
cut (a time limit). next_values is the value of the *true* next observation, the final one where the episode ended,
never that of the episode which follows. Rows that only reset an environment (gymnasium's next-step mode) may hold
anything: no trace enters or leaves through them; leave them out with `valid_transitions`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genrl.objectives.groups import group_advantages


def valid_transitions(done: Tensor, carried: Tensor) -> Tensor:
    """Which rows are transitions of an episode under gymnasium's next-step auto-reset, bool [T, B].

    In that mode the row after a done only resets: its action is ignored, its reward 0, and its observation begins the
    next episode. done [T, B]; carried [B]: the row before the first was a done (all false after a reset).
    """
    before = torch.cat([carried[None].bool(), done[:-1].bool()])
    return ~before


def first_episode_steps(done: Tensor) -> Tensor:
    """Which actions belong to the first episode of their column, the one that ends it included: bool [T, B, C]."""
    flat = done.bool().transpose(1, 2).flatten(0, 1)  # [T C, B]
    # Less the step itself: the one that ends an episode still belongs to it.
    ended_before = flat.long().cumsum(0) - flat.long() > 0
    return ~ended_before.view(done.shape[0], done.shape[2], done.shape[1]).transpose(1, 2)


def first_episode_returns(rewards: Tensor, done: Tensor) -> Tensor:
    """Sum of the rewards of the first episode of each column, undiscounted: rewards and done [T, B, C] -> [B]."""
    return torch.where(first_episode_steps(done), rewards.double(), 0.0).sum((0, 2))


def episode_group_advantages(returns: Tensor, group: Tensor) -> Tensor:
    """GRPO over episodes from one initial state: `(R - mean_g) / (std_g + 1e-6)`, sample std, float64 [B].

    All decisions of an episode have its advantage. Source: pi_RL's GRPO (arXiv 2510.25889, code).
    """
    return group_advantages(returns, group, scale="group", eps=1e-6, ddof=1)


def informative_groups(returns: Tensor, group: Tensor, *, low: float, high: float) -> Tensor:
    """Which samples are in a group whose mean return lies in [low, high], bool [B]: the success filter, .1 to .9.

    Groups that always or never succeed have no gradient under GRPO and little under PPO (pi_RL, SimpleVLA-RL,
    arXiv 2509.09674). Log the share of groups kept: below about 15 % a policy has next to nothing to learn from.
    """
    index = torch.unique(group, return_inverse=True)[1]
    empty = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=returns.device)
    count = empty.index_add(0, index, torch.ones_like(returns, dtype=torch.float64))
    mean = empty.index_add(0, index, returns.double()) / count
    slack = 1e-6  # a mean of float32 rewards that equals a bound counts as inside
    return ((mean >= low - slack) & (mean <= high + slack))[index]


ChunkMode = Literal["chunk", "smdp"]


class Estimate(NamedTuple):
    """advantages and returns = advantages + values, the critic's target: [T, B], of actions [T, B, C]; float64."""

    advantages: Tensor
    returns: Tensor


class ChunkReward(NamedTuple):
    """reward [T, B] of what was executed of each chunk, and the discount [T, B] of what follows it; float64."""

    reward: Tensor
    discount: Tensor


def gae(
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    discount: Tensor | float,
    lam: float,
) -> Estimate:
    """`d = r + G (1 - terminated) V' - V`, `A = d + G lam (1 - done) A'`: GAE (arXiv 1506.02438, eq. 16).

    A truncated episode is bootstrapped, a terminated one is not, and both end the trace. All [T, B]; discount G is one
    number or [T, B] (`chunk_rewards`). Raises ValueError for shapes that differ.
    """
    shapes = {tuple(t.shape) for t in (rewards, terminated, truncated, values, next_values)}
    if len(shapes) != 1 or rewards.dim() != 2:
        raise ValueError(f"rewards, flags and values must all have one shape [T, B]; got {sorted(shapes)}")
    factor = torch.as_tensor(discount, dtype=torch.float64, device=rewards.device).expand(rewards.shape)
    now = values.detach().double()
    # where, not a product: values of rows that only reset may be NaN.
    following = torch.where(terminated.bool(), 0.0, next_values.detach().double())
    delta = rewards.double() + factor * following - now
    carried = torch.where(terminated.bool() | truncated.bool(), 0.0, factor * lam)
    advantages = torch.zeros_like(delta)
    ahead = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        ahead = delta[t] + carried[t] * ahead
        advantages[t] = ahead
    return Estimate(advantages, advantages + now)


def executed_mask(n_executed: Tensor, size: int) -> Tensor:
    """Which actions of chunks of `size` were executed, bool [..., size]: the first n_executed [...] of each.

    The mask of action-level losses, and all false for a row that only resets (n_executed 0).
    """
    return torch.arange(size, device=n_executed.device) < n_executed[..., None]


def chunk_rewards(rewards: Tensor, n_executed: Tensor, *, gamma: float, mode: ChunkMode) -> ChunkReward:
    """The rewards of the executed actions of each chunk as one: rewards [T, B, C], n_executed [T, B] of 0 .. C.

    "chunk": their sum, and gamma per chunk, whatever its length (pi_RL, DPPO). "smdp": `sum_j gamma^j r_j`, and gamma^n
    for n executed actions, the exact discount of a semi-Markov process (RL-100). Rewards after n do not count.
    Raises ValueError where n_executed is not in 0 .. C.
    """
    paid = torch.where(_executed(rewards, n_executed), rewards.double(), 0.0)
    if mode == "chunk":
        return ChunkReward(paid.sum(-1), torch.full(paid.shape[:-1], gamma, dtype=torch.float64, device=paid.device))
    if mode == "smdp":
        place = torch.arange(rewards.shape[-1], dtype=torch.float64, device=rewards.device)
        return ChunkReward((paid * gamma**place).sum(-1), gamma ** n_executed.double())
    raise ValueError(f"mode must be 'chunk' or 'smdp', got {mode!r}")


def chunk_gae(
    rewards: Tensor,
    n_executed: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    gamma: float,
    lam: float,
    mode: ChunkMode,
) -> Estimate:
    """`gae` over decisions: rewards [T, B, C], the rest [T, B]. With one action per decision it is plain GAE."""
    chunk = chunk_rewards(rewards, n_executed, gamma=gamma, mode=mode)
    return gae(chunk.reward, terminated, truncated, values, next_values, discount=chunk.discount, lam=lam)


def action_gae(
    rewards: Tensor,
    n_executed: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Estimate:
    """GAE whose steps are the executed actions of chunks, gamma per action (pi_RL's action level): [T, B, C].

    rewards and values [T, B, C], values[..., j] that of going on with action j of the chunk, having seen what came
    before the chunk alone; the rest [T, B]: flags of the last executed action, next_values of the observation after it.
    Actions that were not executed have advantage and return 0. With chunks of one action it is `gae`.
    Raises ValueError for shapes that differ, and where n_executed is not in 0 .. C.
    """
    shapes = {tuple(t.shape) for t in (n_executed, terminated, truncated, next_values)}
    if rewards.shape != values.shape or shapes != {tuple(rewards.shape[:-1])} or rewards.dim() != 3:
        shapes_got = [list(rewards.shape), list(values.shape), sorted(shapes)]
        raise ValueError(f"rewards and values must be [T, B, C], flags and next_values [T, B]; got {shapes_got}")
    executed = _executed(rewards, n_executed)
    paid, now = rewards.double(), values.detach().double()
    done = terminated.bool() | truncated.bool()
    advantages = torch.zeros_like(paid)
    ahead = torch.zeros_like(paid[0, :, 0])
    for t in reversed(range(len(paid))):
        ahead = torch.where(done[t], 0.0, ahead)
        following = torch.where(terminated[t].bool(), 0.0, next_values[t].detach().double())
        for j in reversed(range(paid.shape[-1])):
            advantage = paid[t, :, j] + gamma * following - now[t, :, j] + gamma * lam * ahead
            # An action that was not executed hands on what comes after it, undiscounted: it took no time.
            ahead = torch.where(executed[t, :, j], advantage, ahead)
            following = torch.where(executed[t, :, j], now[t, :, j], following)
            advantages[t, :, j] = advantage
    advantages = torch.where(executed, advantages, 0.0)
    return Estimate(advantages, torch.where(executed, advantages + now, 0.0))


def normalise_advantages(advantages: Tensor, valid: Tensor | None = None, *, eps: float, ddof: int = 1) -> Tensor:
    """`(A - mean) / (std + eps)` with the statistics of the valid entries, applied to all: any shape, float64.

    eps 1e-5 in pi_RL, 1e-8 in DPPO; both ddof 1. Fewer than two valid entries have no spread: std 0.
    Raises ValueError where none is valid, and for a NaN among the valid ones.
    """
    counted = (advantages if valid is None else advantages[valid]).double()
    if counted.numel() == 0:
        raise ValueError("no entry is valid: there is no advantage to normalise")
    if bool(counted.isnan().any()):
        raise ValueError("an advantage of a valid entry is NaN: look for a NaN reward or value")
    spread = counted.std(correction=ddof) if counted.numel() > ddof else counted.new_zeros(())
    return (advantages.double() - counted.mean()) / (spread + eps)


def _executed(rewards: Tensor, n_executed: Tensor) -> Tensor:
    size = rewards.shape[-1]
    if bool(((n_executed < 0) | (n_executed > size)).any()):
        extremes = [int(n_executed.min()), int(n_executed.max())]
        raise ValueError(
            f"of chunks of {size} actions between {extremes[0]} and {extremes[1]} cannot have been executed"
        )
    return executed_mask(n_executed, size)
