"""Trust regions of tokens without a clip of the ratio: DPPO, CPPO, DRPO by how far a probability has moved, HAPO by the
entropy of its distribution, Lp-Reg by how rare the token is.

Arguments and results as in `token_surrogates`. D = |p - p_old| of the sampled token: a rare token may change its ratio
much, and a common one little, for the same D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.surrogates.policy_losses import SurrogateOutput, gated_surrogate
from genrl.objectives.tokens.tokens import log_ratio, masked, per_token

FARTHEST = 20.0
"""Largest log-ratio of a token, either way."""


def _moved(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ratio with gradient, old probability, D without gradient), [B, T]; 1, 1 and 0 where masked."""
    # As verl clamps it: one token of e^80 would be all of the gradient, and nothing clips it here.
    ratio = log_ratio(log_prob, old_log_prob, mask).clamp(-FARTHEST, FARTHEST).exp()
    old = masked(old_log_prob.detach(), mask).exp()
    return ratio, old, (masked(log_prob.detach(), mask).exp() - old).abs()


def probability_mask_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, delta: float = 0.15
) -> SurrogateOutput:
    """`-A rho` where `A (rho - 1) <= 0 or D <= delta`, else 0: DPPO of tokens, with total variation by the sampled one.
    `clipped` marks the others."""
    ratio, _, distance = _moved(log_prob, old_log_prob, mask)
    return gated_surrogate(ratio, per_token(advantage.detach(), mask).to(ratio.dtype), distance > delta)


def cumulative_mask_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    delta: float = 0.2,
    last: float = 0.8,
    slack: float = 0.02,
) -> SurrogateOutput:
    """`-A rho` where `A (rho - 1) <= 0 or w D <= c`, else 0: CPPO. The budget c of a token shrinks by what those before
    it have moved.

    With w falling from 1 to `last` along a row of n tokens, S and W the sums of w D and w before the token, and b the
    row's .9 quantile of D, in [slack, 2 slack]: `c = min(delta, delta + b W - S)`.
    """
    ratio, _, distance = _moved(log_prob, old_log_prob, mask)
    valid = mask.bool()
    place = (valid.cumsum(1) - 1).to(distance.dtype)
    count = valid.sum(1, keepdim=True)
    weight = masked(1.0 - (1.0 - last) * place / (count - 1).clamp(min=1), mask)
    far = weight * distance
    # the masked count as no number, so that the quantile is of the row's tokens; a row without any has none to mask
    tail = torch.where(valid, distance, torch.nan).nanquantile(0.9, dim=1, keepdim=True)
    rate = tail.nan_to_num(nan=0.0).clamp(slack, 2.0 * slack)
    before = rate * (weight.cumsum(1) - weight) - (far.cumsum(1) - far)
    return gated_surrogate(
        ratio, per_token(advantage.detach(), mask).to(ratio.dtype), far > (delta + before).clamp(max=delta)
    )


def quadratic_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, width: float = 12.5
) -> SurrogateOutput:
    """`-A rho + |A| p_old (rho - 1)^2 / (2 width)`: DRPO (arXiv 2606.09821), smooth, and 0 in gradient where
    `D = width` has been reached in the direction of A. Nothing is clipped."""
    ratio, old, _ = _moved(log_prob, old_log_prob, mask)
    weight = per_token(advantage.detach(), mask).to(ratio.dtype)
    loss = -weight * ratio + weight.abs() * old * (ratio - 1.0) ** 2 / (2.0 * width)
    return SurrogateOutput(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def lowest_share(values: Tensor, among: Tensor, *, share: float) -> Tensor:
    """The floor(share n), one at least, of the n tokens of `among` bool [B, T] with the lowest values [B, T], bool;
    none where n is 1."""
    chosen = torch.zeros_like(among)
    number = int(among.sum())
    if number > 1:
        last = values.detach()[among].sort().values[max(1, int(share * number)) - 1]
        chosen = among & (values.detach() <= last)
    return chosen


def min_p_log_prob(logits: Tensor, tokens: Tensor, *, kappa: float = 0.02) -> Tensor:
    """Log-probability [...] of tokens [...] among those of at least kappa times the largest probability, renormalised;
    -inf for the others. logits [..., V]."""
    log_p = logits.log_softmax(-1)
    floor = log_p.amax(-1, keepdim=True) + torch.log(torch.tensor(kappa, dtype=log_p.dtype))
    allowed = torch.where(log_p < floor, -torch.inf, log_p)
    return allowed.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def low_probability_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    proxy: Tensor,
    chosen: Tensor,
    *,
    beta: float = 1.0,
    low: float = 1.0,
    high: float = 9.0,
) -> SurrogateOutput:
    """PPO's clip at [1 - low, 1 + high]; of the `chosen` bool [B, T] that are less likely than by `proxy` [B, T],
    `-A rho + beta k` instead, unclipped, k the estimate k3 of the KL from the proxy, in [-10, 10]: Lp-Reg
    (arXiv 2510.03222). So rare but sensible tokens of wrong answers are not pressed to nothing."""
    ratio = log_ratio(log_prob, old_log_prob, mask).clamp(-FARTHEST, FARTHEST).exp()
    weight = per_token(advantage.detach(), mask).to(ratio.dtype)
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    clipped = -weight * bounded > -weight * ratio
    now, rare = masked(log_prob, mask), masked(proxy.detach().to(log_prob.dtype), mask)
    held = chosen.bool() & mask.bool() & (now.detach() < rare)
    apart = torch.where(held, rare - now, 0.0)
    loss = torch.where(
        held,
        -weight * ratio + beta * (apart.exp() - apart - 1.0).clamp(-10.0, 10.0),
        torch.maximum(-weight * ratio, -weight * bounded),
    )
    return SurrogateOutput(loss, ratio, clipped & ~held)


def relative_entropy(entropy: Tensor, mask: Tensor, *, share: float = 0.8) -> Tensor:
    """h in [-1, 1], [B, T]: log-entropies less their `share` quantile over all tokens, over their root mean square,
    then over the largest of either sign: HAPO. 0 where masked."""
    valid = mask.bool()
    if not bool(valid.any()):
        return torch.zeros_like(entropy)
    log_entropy = entropy.detach()[valid].double().clamp(min=1e-12).log()
    ordered = log_entropy.sort().values  # torch.quantile refuses more than 2^24 numbers
    position = share * (len(ordered) - 1)
    below = min(int(position), len(ordered) - 1)
    quantile = torch.lerp(ordered[below], ordered[min(below + 1, len(ordered) - 1)], position - below)
    log_entropy = log_entropy - quantile
    log_entropy = log_entropy / log_entropy.square().mean().sqrt().clamp(min=1e-12)
    up, down = log_entropy.clamp(min=0).max().clamp(min=1e-12), (-log_entropy).clamp(min=0).max().clamp(min=1e-12)
    scaled = torch.where(log_entropy > 0, log_entropy / up, log_entropy / down)
    return torch.zeros_like(entropy).masked_scatter(valid, scaled.to(entropy.dtype))


def entropy_adaptive(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, height: Tensor, *, width: float = 0.2
) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, advantage), [B, T], of HAPO by h (`relative_entropy`): sure tokens may fall further, unsure ones may
    rise further; `A (1 + h)` for unsure tokens outside of half the range, and for sure ones inside of it."""
    low = torch.where(height <= 0, width * (1.0 - height), width)
    high = torch.where(height > 0, width * (1.0 + height), width)
    ratio = log_ratio(log_prob.detach(), old_log_prob, mask).exp()
    outside = (ratio < 1.0 - low / 2.0) | (ratio > 1.0 + high / 2.0)
    changed = ((height > 0) & outside) | ((height < 0) & ~outside)
    weight = per_token(advantage.detach(), mask).to(height.dtype).expand(mask.shape)
    return low, high, torch.where(changed, weight * (1.0 + height), weight)
