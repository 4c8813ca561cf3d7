"""How fast a snapshot follows the trained weights: d in `snapshot <- d snapshot + (1 - d) weights`, by optimiser step.

d = 0 copies the weights, d = 1 keeps the snapshot. Published schedules, as settings of these two (see also
`matching.nft_old_policy_decay` and `matching.ema_decay`):

- AWM's and DGPO's reference: `ramp(n, slope=.001, maximum=.3)`
- CRD's old policy: `ramp(n, start_value=.25, slope=.005, maximum=.999)`; its sampling policy:
  `ramp(n, start_step=75, slope=.0075, maximum=.999)`
"""

from __future__ import annotations

import math


def ramp(step: int, *, slope: float, maximum: float, start_step: int = 0, start_value: float = 0.0) -> float:
    """`min(start_value + slope (n - start_step), maximum)`, and start_value before start_step."""
    return min(start_value + slope * max(step - start_step, 0), maximum)


def cosine(step: int, *, initial: float, final: float, total_steps: int, warmup_steps: int = 0) -> float:
    """Half a cosine from `initial` to `final` over the steps up to total_steps, after a linear rise from 0 to it.

    Flow-Factory's "cosine" and "warmup_cosine". Raises ValueError unless 0 <= warmup_steps < total_steps.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"the warm-up ({warmup_steps} steps) must end before the schedule ({total_steps} steps)")
    if step < warmup_steps:
        return initial * step / warmup_steps
    progress = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
    return initial + (final - initial) * (1.0 - math.cos(math.pi * progress)) / 2.0
