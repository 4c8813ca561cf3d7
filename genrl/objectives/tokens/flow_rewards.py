"""Rewards of tokens by how far their hidden states lie from a flow's: RLFR (arXiv 2510.10201 and the authors' code).

Time runs as in the paper, against that of `genrl.mdp`: t = 0 is noise, t = 1 is data, and the velocity is data - noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.objectives.tokens.token_advantages import token_returns
from genrl.objectives.tokens.tokens import masked

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [N, H], t [N]) -> [N, H]."""


class Deviation(NamedTuple):
    """error [N]: mean over the given times of the mean square that a velocity is off; score [N]: the same with each
    time's error multiplied by t / (1 - t), which estimates how unlikely the data is."""

    error: Tensor
    score: Tensor


def velocity_error(velocity: Velocity, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """`mean_h (v(t x + (1 - t) n, t) - (x - n))^2`, [N], of data x and noise n [N, H] at t [N] in (0, 1)."""
    share = t[:, None]
    predicted = velocity(share * data + (1 - share) * noise, t)
    return (predicted - (data - noise)).square().mean(-1)


def velocity_deviation(velocity: Velocity, data: Tensor, noise: Tensor, times: Sequence[float]) -> Deviation:
    """Deviation of the velocities of data [N, H], with the same noise [N, H] at all times."""
    errors = [velocity_error(velocity, data, noise, torch.full_like(data[:, 0], t)) for t in times]
    weighted = [t / (1 - t) * error for t, error in zip(times, errors, strict=True)]
    return Deviation(torch.stack(errors).mean(0), torch.stack(weighted).mean(0))


def unlikely_tokens(score: Tensor, mask: Tensor, *, threshold: float, most: int | None) -> Tensor:
    """Unlikeliness, from 0 to 1 between the lowest and the highest score of an answer, [B, T] float64; 0 unless above
    the threshold and, where there are more of these than `most`, among that many highest. An answer whose scores are
    all equal has 0."""
    valid, values = mask.bool(), score.detach().double()
    low = torch.where(valid, values, torch.inf).amin(1, keepdim=True)
    high = torch.where(valid, values, -torch.inf).amax(1, keepdim=True)
    spread = high - low
    share = masked((values - low) / torch.where(spread > 0, spread, 1.0), valid)
    share = torch.where(share > threshold, share, 0.0)
    if most is not None and most < share.shape[1]:
        top = share.topk(most, dim=1).indices
        share = torch.zeros_like(share).scatter(1, top, share.gather(1, top))
    return share


def flow_returns(unlikely: Tensor, mask: Tensor, *, coefficient: float) -> Tensor:
    """What is added to the advantages of tokens, float64 [B, T]: `-coefficient sum_{t' >= t} unlikely_t'`."""
    return token_returns(-coefficient * unlikely, mask)
