"""Intent-conditioned value functions: what passive data say of reaching outcomes (ICVF, arXiv 2304.04782)."""

from __future__ import annotations

from torch import Tensor


def icvf_errors(
    values: Tensor,
    next_values: Tensor,
    intent_values: Tensor,
    next_intent_values: Tensor,
    at_goal: Tensor,
    at_intent: Tensor,
    *,
    discount: float,
    expectile: float,
) -> Tensor:
    """`|expectile - 1[A < 0]| (r(s, g) + G V'(s', g, z) - V(s, g, z))^2`, summed over the copies of V, [B].

    A = r(s, z) + G V'(s', z, z) - V'(s, z, z) says whether s -> s' is what somebody would do who wants z: the value of
    an outcome g is that under such a one (section 4.2). values [K, B] of (s, g, z), with gradients; of the slow copies
    V', without: next_values of (s', g, z), intent_values of (s, z, z), next_intent_values of (s', z, z). at_goal,
    at_intent bool [B]: s is g, or z. As released: r is 0 there and ends, -1 elsewhere; A takes the least V' of s' and
    the mean of s.
    """

    def target(there: Tensor, following: Tensor) -> Tensor:
        away = (~there).float()
        return away * (discount * following - 1.0)

    advantage = target(at_intent, next_intent_values.amin(0)) - intent_values.mean(0)
    weight = expectile + (1.0 - 2.0 * expectile) * (advantage < 0).float()
    return (weight * (target(at_goal, next_values).detach() - values) ** 2).sum(0)
