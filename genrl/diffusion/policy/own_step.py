"""Guard for schedulers from outside: a flow scheduler's own step is the one that kernels and losses take it for."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

TOLERANCE = 1e-3
"""Of the distance that the step goes; numbers of half precision are rounded by as much."""


def require_flow_step(scheduler: Any) -> None:
    """Raise ValueError where the first step of a flow scheduler is not `x + (sigma' - sigma) velocity`.

    A class of one's own may turn the sign or scale the levels: samples would be drawn, and losses made, by another
    velocity than the one that the model is used with. Those of diffusers are tested, and cost nothing here.
    """
    kind = type(scheduler)
    if kind.__module__.startswith("diffusers.") or scheduler.config.get("stochastic_sampling"):
        return
    # A scheduler counts its steps: the pipeline's own is left as it is.
    copied, draws = deepcopy(scheduler), torch.Generator().manual_seed(0)
    # Its shift depends on the picture's size, and it refuses to make levels without one; any will do here.
    shifted = {"mu": 1.0} if copied.config.get("use_dynamic_shifting") else {}
    copied.set_timesteps(4, **shifted)
    state, velocity = torch.randn(2, 1, 4, 8, 8, generator=draws)
    theirs = copied.step(velocity, copied.timesteps[0], state, return_dict=False)[0]
    ours = state + (copied.sigmas[1] - copied.sigmas[0]) * velocity
    difference, far = float((theirs - ours).abs().max()), float((ours - state).abs().max())
    if not difference <= TOLERANCE * far:
        raise ValueError(
            f"the step of its scheduler, {kind.__module__}.{kind.__name__}, is not that of a flow: from one state and "
            f"velocity it goes up to {difference:.3g} elsewhere, where the step is {far:.3g} long (the other sign is "
            "twice that), so training would go by another velocity than the pipeline does"
        )
