"""The value function of an agent, and the credit that it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from genrl.objectives.token_credit import step_gae, token_gae
from genrl.vlm.episodes.episodes import Walk
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.advantages import CriticAdvantage
from genrl.vlm.rollout.token_batch import TokenBatch


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
        # Detached: the value loss would pull the language model's states towards what predicts returns.
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
    credit = step_gae(rewards, values, terminated, truncated, last, gamma=gamma, lam=lam)
    return Credit(credit.advantages.flatten(), credit.returns.flatten())


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
    gamma_within: float = 1.0,
) -> Credit:
    """POAD: `token_gae` of each episode's actions; values and mask [K, E, T], the rest [K, E]. gamma_within:
    the discount of tokens inside of an action.

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
            span = slice(begin, k + 1)
            last = torch.zeros(1, longest, dtype=torch.float64)
            last[0, 0] = after[k, slot]
            advantages[span, slot] = token_gae(
                torch.cat([values[span, slot].double(), last]),
                mask[span, slot].sum(1),
                rewards[span, slot],
                terminated[span, slot],
                gamma=gamma,
                lam=lam,
                gamma_within=gamma_within,
            )
            begin = k + 1
    valid = mask.bool()
    returns = torch.where(valid, advantages + values.double(), 0.0)
    return Credit(advantages.flatten(0, 1), returns.flatten(0, 1))


def credit_of(
    policy: Policy,
    critic: ValueHead,
    choice: CriticAdvantage,
    done: Walk,
    kept: Tensor,
    values: Tensor,
    mask: Tensor,
    size: int | None,
) -> Credit:
    """Credit of all K E steps of a walk; values and mask [R, T] are of those at the places `kept`. size: prompts per
    pass of the model, for the values of what follows a step; None = all."""
    steps, slots = len(done.decisions), len(done.decisions[0])

    def table(name: str) -> Tensor:
        return torch.tensor([[float(getattr(decision, name)) for decision in step] for step in done.decisions])

    rewards, terminated, truncated, lost = map(table, ("reward", "terminated", "truncated", "lost"))
    terminated, truncated, lost = terminated.bool(), truncated.bool(), lost.bool()
    value = torch.zeros(steps * slots, values.shape[1]).index_copy(0, kept, values).view(steps, slots, -1)
    chosen = torch.zeros_like(value, dtype=torch.bool).flatten(0, 1).index_copy(0, kept, mask).view_as(value)
    after = torch.zeros(steps, slots)
    died = [(k, slot) for k, slot in lost.nonzero().tolist()]
    prompts = {**done.following, **{(k, slot): done.decisions[k][slot].prompt for k, slot in died}}
    places = list(prompts)
    size = size or max(1, len(places))
    for first in range(0, len(places), size):
        some = places[first : first + size]
        _, states = policy.prefix([prompts[place] for place in some])
        for place, value_found in zip(some, critic(states).tolist(), strict=True):
            (value[..., 0] if lost[place] else after)[place] = value_found
    constants = {"gamma": choice.gamma, "lam": choice.lam}
    if choice.level == "step":
        return credit_of_steps(value[..., 0], rewards, terminated, truncated, after[-1], **constants)
    # A lost step counts as one token, so that `token_gae` has a place for the value before it; it is no row of the
    # loss.
    chosen[lost] = torch.arange(value.shape[2]) == 0
    for k, slot in died:  # what led to a lost step ends before it, bootstrapped by its value
        if k and not (terminated | truncated)[k - 1, slot]:
            truncated[k - 1, slot], after[k - 1, slot] = True, value[k, slot, 0]
    within = choice.gamma if choice.level == "every_token" else 1.0
    return credit_of_tokens(value, chosen, rewards, terminated, truncated, after, **constants, gamma_within=within)


def explained_variance(batch: TokenBatch) -> float:
    """Share of the variance of the returns that the old values explain."""
    returns, values = batch.extra["returns"], batch.extra["old_value"].double()
    valid = batch.mask if returns.dim() == 2 else torch.ones(len(batch.mask), dtype=torch.bool)
    returns, values = returns[valid], values[valid]
    return float(1.0 - (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-12))
