"""The answers of episodes as rows of a loss: a row is a step (critics), or all turns of an episode (groups); and what
the credit of turns reads of them.

Each turn is scored with the prompt that it was drawn from, whatever the row; the log-probabilities of an episode's
turns, one after the other, are those of one growing sequence whose observations have mask 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from genrl.objectives.token_credit import semi_online_returns
from genrl.vlm.episodes.episodes import Decision, stacked
from genrl.vlm.policies.policy import Encoded, Policy, Replay
from genrl.vlm.recipe.advantages import SemiOnline


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
