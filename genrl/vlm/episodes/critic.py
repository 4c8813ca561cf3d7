"""The value function of an agent, and the credit that it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from genrl.objectives.tokens.token_credit import step_gae, token_gae


class ValueHead(nn.Module):
    """Values of states [..., H] of a language model, [...], float32. The model is not trained through them.

    VL-DAC: hidden layers of 3072 and 2048 (SiLU between them is ours); the last layer begins at 0, so every value does.
    """

    def __init__(self, width: int, hidden: tuple[int, ...], seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            layers: list[nn.Module] = []
            for size in hidden:
                layers += [nn.Linear(width, size), nn.SiLU()]
                width = size
            last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, states: Tensor) -> Tensor:
        values: Tensor = self.layers(states.detach().float())[..., 0]
        return values


class Credit(NamedTuple):
    """advantages and returns: [K E] of steps, or [K E, T] of tokens, 0 where there is none; float64."""

    advantages: Tensor
    returns: Tensor


def credit_of_steps(
    values: Tensor, rewards: Tensor, terminated: Tensor, truncated: Tensor, last: Tensor, *, gamma: float, lam: float
) -> Credit:
    """VL-DAC: `step_gae` of K steps of E environments; all [K, E], last [E]: values after the last step.

    A step at which the time limit cut the episode has no advantage, and its value is its own target.
    """
    found = step_gae(rewards, values, terminated, truncated, last, gamma=gamma, lam=lam)
    return Credit(found.advantages.flatten(), found.returns.flatten())


def credit_of_tokens(
    values: Tensor,
    mask: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    after: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Credit:
    """POAD: `token_gae` of each episode's actions; values and mask [K, E, T], the rest [K, E].

    after: the value of what follows a step, read where the episode was cut in it or the steps end: it is bootstrapped
    there. A terminated one is not.
    """
    steps, slots, longest = values.shape
    advantages = torch.zeros(values.shape, dtype=torch.float64)
    for slot in range(slots):
        begin = 0
        for k in range(steps):
            if not (terminated[k, slot] or truncated[k, slot] or k == steps - 1):
                continue
            own = slice(begin, k + 1)
            last = torch.zeros(1, longest, dtype=torch.float64)
            last[0, 0] = after[k, slot]
            advantages[own, slot] = token_gae(
                torch.cat([values[own, slot].double(), last]),
                mask[own, slot].sum(1),
                rewards[own, slot],
                terminated[own, slot],
                gamma=gamma,
                lam=lam,
            )
            begin = k + 1
    kept = mask.bool()
    returns = torch.where(kept, advantages + values.double(), 0.0)
    return Credit(advantages.flatten(0, 1), returns.flatten(0, 1))
