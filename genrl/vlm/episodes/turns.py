"""The turns of episodes: what the credit of turns reads of them, and what those of a group differ by (UI-S1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genrl.objectives.tokens.semi_online import semi_online_returns
from genrl.vlm.episodes.episodes import Decision
from genrl.vlm.episodes.rows import Rows
from genrl.vlm.recipe.advantages import SemiOnline


def spread(group: Sequence[Sequence[Decision]], choice: SemiOnline) -> float:
    """Standard deviation of the returns of all turns of a group's episodes that were not lost; 0 without any."""
    kept = [episode for episode in group if not episode[-1].lost]
    if not kept:
        return 0.0
    pad = torch.nn.utils.rnn.pad_sequence
    paid = [torch.tensor([one.reward for one in row], dtype=torch.float64) for row in kept]
    matched = [torch.tensor([one.matched for one in row]) for row in kept]
    rewards = pad(paid, batch_first=True, padding_value=torch.nan)
    returns = semi_online_returns(rewards, pad(matched, batch_first=True), gamma=choice.gamma)
    return float(returns[~returns.isnan()].std(correction=0))


def turns_of(rows: Rows, played: Sequence[Sequence[Decision]]) -> dict[str, Tensor]:
    """turn, turn_reward and matched of each token, [R, L]: the number of its turn, and what that was paid and was."""
    flat = [one for row in played for one in row]
    numbers = torch.tensor([k for row in played for k in range(len(row))])
    made = {
        "turn": numbers,
        "turn_reward": torch.tensor([one.reward for one in flat]),
        "matched": torch.tensor([one.matched for one in flat]),
    }
    return {name: rows.laid(values[:, None].expand(rows.mask.shape)) for name, values in made.items()}
