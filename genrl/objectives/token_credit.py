"""Credit of multi-turn episodes from a critic: generalised advantage estimation over steps, and over tokens; and credit
of tokens from the answers of a group, which begin alike.

All in float64, without gradient. A step is one action text of the agent; its tokens are what the policy chose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from genrl.objectives.groups import group_advantages, group_means
from genrl.objectives.token_advantages import leave_one_out
from genrl.objectives.tokens import masked


class StepCredit(NamedTuple):
    """advantages and returns (targets of the value function), of the shape of the rewards."""

    advantages: Tensor
    returns: Tensor


def step_gae(
    rewards: Tensor,
    values: Tensor,
    done: Tensor,
    truncated: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    lam: float = 0.95,
) -> StepCredit:
    """GAE over environment steps (arXiv 1506.02438, eq. 16; PPO, eqs. 11 and 12), cut at time limits, as in VL-DAC.

    `d_k = r_k + gamma V_k+1 (1 - done_k) - V_k`, `A_k = d_k + gamma lam (1 - done_k) A_k+1`, returns `A_k + V_k`.
    rewards, values, done, truncated [K] or [K, E] (E environments side by side); done: the episode ended with step k;
    last_value [] or [E]: V of the state after the last step. truncated: it was ended by the time limit, so that V_k+1
    belongs to another episode: A_k = 0 there, and the recursion starts again.
    """
    reward, value = rewards.detach().double(), values.detach().double()
    ended, cut = done.to(reward), truncated.bool()
    following = torch.cat([value[1:], last_value.detach().to(value).reshape(1, *value.shape[1:])])
    delta = reward + gamma * following * (1.0 - ended) - value
    running, steps = torch.zeros_like(value[0]), []
    for k in range(len(value) - 1, -1, -1):
        running = delta[k] + gamma * lam * (1.0 - ended[k]) * running
        running = torch.where(cut[k], torch.zeros_like(running), running)
        steps.append(running)
    advantages = torch.stack(steps[::-1])
    return StepCredit(advantages, advantages + value)


def token_gae(
    token_values: Tensor,
    lengths: Tensor,
    rewards: Tensor,
    done: Tensor,
    *,
    gamma: float,
    lam: float = 0.95,
    gamma_within: float = 1.0,
) -> Tensor:
    """GAE (arXiv 1506.02438, eq. 16) over the tokens of actions: POAD's Bellman backup with action decomposition (BAD,
    arXiv 2405.15821), [S, L].

    Within an action time stands still (gamma_within = 1): `d = V_j+1 - V_j`, `A_j = d + lam A_j+1`. Its last token gets
    the reward: `d = r + gamma V(next action's first token)(1 - done) - V`, `A = d + gamma lam (1 - done) A_next`.
    gamma_within = gamma is the token-level PPO that discounts long actions more, which BAD corrects.
    token_values [S + 1, L] (of the state after the last action only the first counts), lengths int64 [S] >= 1,
    rewards and done [S]. 0 at padding; returns are `advantages + token_values[:-1]` at valid tokens.
    """
    value, reward, ended = token_values.detach().double(), rewards.detach().double(), done.double()
    steps, longest = len(reward), value.shape[1]
    if value.shape[0] != steps + 1 or bool((lengths < 1).any()) or bool((lengths > longest).any()):
        raise ValueError(
            f"{steps} actions need values [{steps + 1}, L] and lengths in 1 .. L, got {list(value.shape)} and "
            f"{lengths.tolist()}"
        )
    advantages = torch.zeros(steps, longest, dtype=torch.float64, device=value.device)
    running = torch.zeros((), dtype=torch.float64, device=value.device)
    for step in range(steps - 1, -1, -1):
        last = int(lengths[step]) - 1
        going = 1.0 - ended[step]
        running = (
            reward[step]
            + gamma * value[step + 1, 0] * going
            - value[step, last]
            + gamma * lam * going * running
        )  # fmt: skip
        advantages[step, last] = running
        for token in range(last - 1, -1, -1):
            delta = gamma_within * value[step, token + 1] - value[step, token]
            running = delta + gamma_within * lam * running
            advantages[step, token] = running
    return advantages


def macro_actions(mask: Tensor, *, size: int) -> Tensor:
    """Number of each token's macro action within its action, int64 [..., T]: MA-RLHF (arXiv 2410.02743), fixed n-grams.

    mask [..., T]: an action's tokens, from its first on. `size` of them are a macro action, and the last token is one
    by itself, as in the code, which averages rewards too, and must not average what the answer is paid. (It adds an
    empty one, of value 0, where `size` divides the number of the tokens before.)
    """
    place, length = torch.arange(mask.shape[-1], device=mask.device), mask.sum(-1, keepdim=True)
    return torch.where(place == length - 1, (length - 2 + size) // size, place // size)


def macro_values(values: Tensor, mask: Tensor, macro: Tensor) -> tuple[Tensor, Tensor]:
    """Means of token values [..., T] over the macro actions of `macro_actions`, float64 [..., T], and which there are,
    bool [..., T]: the weights "equal" of MA-RLHF. 0 after the last."""
    empty = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    number = empty.scatter_add(-1, macro, mask.double())
    return empty.scatter_add(-1, macro, masked(values.double(), mask)) / number.clamp(min=1), number > 0


def branch_credit(values: Tensor, tokens: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """`V(s_t+1) - V(s_t)`, float64 [B, T]: V is the mean value of the answers of a group that begin with these tokens.

    TEMPO (arXiv 2509.18314). values [B] (NaN = none) of the answers tokens [B, T], mask [B, T], group int64 [B]. Other
    than 0 only where answers part that were alike so far. 0 at padding; NaN where no answer has a value.
    """
    said, node = torch.where(mask.bool(), tokens, -1), torch.unique(group, return_inverse=True)[1]
    credit = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    before = group_means(values, node)
    for t in range(mask.shape[1]):
        node = torch.unique(torch.stack([node, said[:, t]], 1), dim=0, return_inverse=True)[1]
        after = group_means(values, node)
        credit[:, t], before = after - before, after
        if int(node.max()) + 1 == len(node):  # nothing branches behind the point where every answer is alone
            break
    return masked(credit, mask)


# Credit of the turns of episodes, each compared with the same turn of its group's others: TRLOO (arXiv 2602.05885).
# float64, no gradient.


def turn_returns(rewards: Tensor, *, gamma: float) -> Tensor:
    """`G_k = r_k + gamma G_k+1`, [B, K]; rewards float [B, K], NaN after a row's last turn, which stays NaN."""
    return semi_online_returns(rewards, torch.ones_like(rewards, dtype=torch.bool), gamma=gamma)


def turn_leave_one_out(rewards: Tensor, group: Tensor, *, gamma: float) -> Tensor:
    """`G_k - mean of the others' G_k`, [B, K]: the others are the episodes of its group int64 [B] that have a turn k.

    0 where there is no turn. A turn that no other episode has keeps its G_k, as in the released code.
    """
    returns = turn_returns(rewards, gamma=gamma)
    has_turn = ~returns.isnan()
    turn = torch.unique(group, return_inverse=True)[1][:, None] * rewards.shape[1] + torch.arange(rewards.shape[1])
    compared = leave_one_out(returns.flatten(), turn.flatten()).view_as(returns)
    alone = (torch.bincount(turn[has_turn], minlength=int(turn.max()) + 1) == 1)[turn]
    return torch.where(has_turn, torch.where(alone, returns, compared), 0.0)


# Credit of turns that are compared with an expert's (UI-S1, arXiv 2509.11543). float64, no gradient.


def semi_online_returns(rewards: Tensor, matched: Tensor, *, gamma: float) -> Tensor:
    """What a turn brings later, R [B, K]: `R_k = r_k + gamma R_k+1` from an action that is the expert's, `R_k = r_k`
    from another, and nothing that comes with or after the other counts for those before it.

    rewards float [B, K], NaN after a row's last turn; matched bool [B, K]. NaN stays NaN. The paper sums up to the end
    of the stretch that the policy walked by itself; that a mismatch is no part of it is its code's reading.
    """
    reward = rewards.detach().double()
    running, columns = torch.zeros(len(reward), dtype=torch.float64), []
    for k in range(reward.shape[1] - 1, -1, -1):
        running = torch.where(matched[:, k].bool(), reward[:, k] + gamma * running, torch.zeros_like(running))
        turn_return = torch.where(matched[:, k].bool(), running, reward[:, k])
        running = running.nan_to_num(nan=0.0)
        columns.append(torch.where(reward[:, k].isnan(), torch.nan, turn_return))
    return torch.stack(columns[::-1], 1)


def semi_online_advantages(
    rewards: Tensor, matched: Tensor, group: Tensor, *, gamma: float, episode: float, step: float
) -> Tensor:
    """`episode (R - mean) / std + step (R_k - mean_k) / std_k`, [B, K], 0 where there is no turn.

    R is the sum of an episode's rewards, compared with those of its group int64 [B]; R_k is `semi_online_returns`,
    compared with those of the same turn in its group. Sample deviations, + 1e-6; 0 where one is alone. Those
    of R are over episodes, as in the paper; the code takes mean and deviation over all turns of the group.
    """
    returns = semi_online_returns(rewards, matched, gamma=gamma)
    has_turn = ~rewards.isnan()
    sums = torch.where(has_turn.any(1), rewards.double().nansum(1), torch.nan)
    of_episode = group_advantages(sums, group, scale="group", eps=1e-6, ddof=1)
    turn = group[:, None] * rewards.shape[1] + torch.arange(rewards.shape[1])
    alone = group_advantages(returns.flatten(), turn.flatten(), scale="group", eps=1e-6, ddof=1).view_as(returns)
    return torch.where(has_turn, episode * of_episode[:, None] + step * alone, 0.0)


# Credit of whole utterances from a critic that learns off policy (ArCHer, arXiv 2402.19446, section 3). Each of two
# critics has a Q of (observation, utterance) and a V of the observation, and slow copies of both are their targets.


class CriticLosses(NamedTuple):
    """q and v, [] each: mean squares over the turns, summed over the critics."""

    q: Tensor
    v: Tensor


def critic_losses(
    q: Tensor, v: Tensor, target_q: Tensor, target_v: Tensor, rewards: Tensor, terminated: Tensor, *, gamma: float
) -> CriticLosses:
    """`mean (Q(o, a) - r - gamma (1 - e) V'(o'))^2` and `mean (V(o) - Q'(o, u))^2`, V' and Q' of the slow copies.

    a is what was said in a stored turn, u what the policy says now; q [C, B] of a, v [C, B], target_q [C, B] of u,
    target_v [C, B] of the next observation, rewards and terminated [B]. No gradient goes to the targets.
    """
    goal = rewards + gamma * (1.0 - terminated.to(rewards)) * target_v.detach()
    return CriticLosses((q - goal).square().mean(1).sum(), (v - target_q.detach()).square().mean(1).sum())


def utterance_advantages(q: Tensor, v: Tensor) -> Tensor:
    """`min over the critics of Q(o, u) - min of V(o)`, [B], of q and v [C, B] (its code)."""
    return (q.min(0).values - v.min(0).values).detach()


def utterance_loss(log_prob: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """`- mean_b A_b sum_t log pi(u_t | o, u_<t)`, []: all tokens of an utterance have its advantage."""
    return -(torch.where(mask.bool(), log_prob, 0.0).sum(1) * advantages).mean()
