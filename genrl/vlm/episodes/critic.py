"""The value function of an agent, the credit that it gives, and the rows of a loss in which credit stands: a row is a
step (critics), or all turns of an episode (groups).

Each turn is scored with the prompt that it was drawn from, whatever the row; the log-probabilities of an episode's
turns, one after the other, are those of one growing sequence whose observations have mask 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genrl.objectives.token_credit import macro_actions, macro_values, semi_online_returns, step_gae, token_gae
from genrl.objectives.tokens import masked
from genrl.vlm.episodes.episodes import Decision, Walk, stacked
from genrl.vlm.policies.policy import Encoded, Policy, Replay
from genrl.vlm.recipe.advantages import CriticAdvantage, SemiOnline
from genrl.vlm.rollout.token_batch import TokenBatch


@dataclass(frozen=True)
class Rows:
    """N turns in R rows. tokens int64, mask bool, sampler float32 [N, T]; row int64 [N]: of each turn, ascending.

    place int64 [R, L]: where the row's tokens are in the flattened [N T], -1 at its padding.
    """

    prompts: list[Encoded]
    tokens: Tensor
    mask: Tensor
    sampler: Tensor
    row: Tensor
    place: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """int64: the turns of some rows, ascending."""
        return torch.isin(self.row, rows).nonzero()[:, 0]

    def places(self, rows: Tensor | None = None, turns: Tensor | None = None) -> Tensor:
        """int64 [R, L]: where the tokens of rows are in flattened [N, T], -1 at their padding; or in [n, T] of some
        turns, which are all of these rows'."""
        width = self.mask.shape[1]
        place = self.place if rows is None else self.place[rows]
        if turns is None:
            return place
        at = torch.full((len(self.prompts),), -1)
        at[turns] = torch.arange(len(turns))
        # Padding is -1, which would index the last turn: made valid here, and put back below.
        where = at[place.clamp(min=0) // width] * width + place.clamp(min=0) % width
        return torch.where(place >= 0, where, -1)

    def laid(self, values: Tensor) -> Tensor:
        """[N, T] as rows [R, L], 0 at their padding."""
        return laid(values, self.place)


def laid(values: Tensor, places: Tensor) -> Tensor:
    """Values of turns [n, T] as rows [R, L] by their places (`Rows.places`), 0 at padding."""
    return torch.where(places >= 0, values.flatten()[places.clamp(min=0)], torch.zeros((), dtype=values.dtype))


def rows_of(decisions: Sequence[Sequence[Decision]]) -> Rows:
    """One row per list of decisions."""
    flat = [decision for row in decisions for decision in row]
    mask = stacked(flat, "mask")
    # answers are padded as they were drawn: to the longest, which may be one that is in no row
    longest = int(mask.sum(1).max())
    mask = mask[:, :longest]
    row = torch.arange(len(decisions)).repeat_interleave(torch.tensor([len(decision) for decision in decisions]))
    width, places = mask.shape[1], []
    for number in range(len(decisions)):
        turns = (row == number).nonzero()[:, 0]
        inside = mask[turns].nonzero()
        places.append(turns[inside[:, 0]] * width + inside[:, 1])
    place = torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)
    tokens, sampler = (stacked(flat, name)[:, :longest] for name in ("tokens", "log_prob"))
    return Rows([decision.prompt for decision in flat], tokens, mask, sampler, row, place)


def replay(policy: Policy, rows: Rows, turns: Tensor, temperature: float, *, entropy: bool = False) -> Replay:
    """Log-probabilities of some turns under the weights as they are. Every turn has a prompt of its own."""
    return policy.log_probs(
        [rows.prompts[turn] for turn in turns.tolist()],
        rows.tokens[turns],
        rows.mask[turns],
        group=torch.arange(len(turns)),
        temperature=temperature,
        entropy=entropy,
        share_prefix=False,
    )


def spread(group: Sequence[Sequence[Decision]], choice: SemiOnline) -> float:
    """Standard deviation of the returns of all turns of a group's episodes that were not lost; 0 without any."""
    complete = [episode for episode in group if not episode[-1].lost]
    if not complete:
        return 0.0
    pad = torch.nn.utils.rnn.pad_sequence
    paid = [torch.tensor([decision.reward for decision in row], dtype=torch.float64) for row in complete]
    matched = [torch.tensor([decision.matched for decision in row]) for row in complete]
    rewards = pad(paid, batch_first=True, padding_value=torch.nan)
    returns = semi_online_returns(rewards, pad(matched, batch_first=True), gamma=choice.gamma)
    return float(returns[~returns.isnan()].std(correction=0))


def turns_of(rows: Rows, played: Sequence[Sequence[Decision]]) -> dict[str, Tensor]:
    """turn, turn_reward and matched of each token, [R, L]: the number of its turn, and what that was paid and was."""
    flat = [decision for row in played for decision in row]
    numbers = torch.tensor([k for row in played for k in range(len(row))])
    by_turn = {
        "turn": numbers,
        "turn_reward": torch.tensor([decision.reward for decision in flat]),
        "matched": torch.tensor([decision.matched for decision in flat]),
    }
    return {name: rows.laid(values[:, None].expand(rows.mask.shape)) for name, values in by_turn.items()}


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
    macro: int = 1,
) -> Credit:
    """POAD: `token_gae` of each episode's actions; values and mask [K, E, T], the rest [K, E]. gamma_within:
    the discount of tokens inside of an action. macro: tokens of a macro action, which stand for one (MA-RLHF): their
    values are averaged, and they share its advantage and return.

    after: the value of what follows a step, read where the episode was cut in it or the steps end: it is bootstrapped
    there. A terminated one is not.
    """
    steps, slots, longest = values.shape
    advantages, macro_of = torch.zeros(values.shape, dtype=torch.float64), macro_actions(mask, size=macro)
    value, there = macro_values(values, mask, macro_of)
    for slot in range(slots):
        begin = 0
        for k in range(steps):
            if not (terminated[k, slot] or truncated[k, slot] or k == steps - 1):
                continue
            span = slice(begin, k + 1)
            last = torch.zeros(1, longest, dtype=torch.float64)
            last[0, 0] = after[k, slot]
            advantages[span, slot] = token_gae(
                torch.cat([value[span, slot], last]),
                there[span, slot].sum(1),
                rewards[span, slot],
                terminated[span, slot],
                gamma=gamma,
                lam=lam,
                gamma_within=gamma_within,
            )
            begin = k + 1
    each = (masked(of_macro.gather(-1, macro_of), mask) for of_macro in (advantages, advantages + value))
    return Credit(*(values.flatten(0, 1) for values in each))


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
        for place, predicted in zip(some, critic(states).tolist(), strict=True):
            (value[..., 0] if lost[place] else after)[place] = predicted
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
    return credit_of_tokens(
        value, chosen, rewards, terminated, truncated, after, **constants, gamma_within=within, macro=choice.macro
    )


def explained_variance(batch: TokenBatch) -> float:
    """Share of the variance of the returns that the old values explain."""
    returns, values = batch.extra["returns"], batch.extra["old_value"].double()
    valid = batch.mask if returns.dim() == 2 else torch.ones(len(batch.mask), dtype=torch.bool)
    returns, values = returns[valid], values[valid]
    return float(1.0 - (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-12))
