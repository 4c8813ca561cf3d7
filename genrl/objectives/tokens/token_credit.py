"""Credit of multi-turn episodes from a critic: generalised advantage estimation over steps, and over tokens.

All in float64, without gradient. A step is one action text of the agent; its tokens are what the policy chose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
