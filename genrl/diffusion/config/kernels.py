"""Transition kernels by name: built-in, an entry point of the group `genrl.kernels`, or `path/file.py:name`.

A kernel from outside is a function of torch tensors as those of `genrl.mdp.kernels` for flow models are,

    def kernel(x, velocity, sigma, sigma_next, *, noise_level): -> (mean, std)

with x, velocity and mean [B, ...], sigma and sigma_next [] and std one number, or one per sample [B]: the step from
sigma to sigma_next < sigma is N(mean, std^2 I). Sampling and training call the same function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args

from genrl.config.plugins import Group, find
from genrl.config.section import Text

BuiltIn = Literal["flow_sde", "dance_sde", "wan_sde", "flow_cps", "flow_ddim", "ddim"]
Kernel = BuiltIn | Text
BUILT_IN: tuple[str, ...] = get_args(BuiltIn)
UP_TO_ONE = ("flow_cps", "flow_ddim", "ddim")
"""Those whose noise level is 1 at most."""

GROUP = Group("kernel", {name: f"genrl.mdp.kernels:{name}" for name in BUILT_IN}, "genrl.kernels")


@cache
def find_kernel(name: str) -> Callable[..., Any]:
    """The function of a kernel. Raises ValueError for an unknown name, and for what cannot be called so."""
    kernel: Callable[..., Any] = find(name, GROUP)
    if not callable(kernel) or isinstance(kernel, type):
        raise ValueError(
            f"{name} is no kernel: define a function (x, velocity, sigma, sigma_next, *, noise_level) that returns "
            "the mean and the standard deviation of the step, see docs/extending.md"
        )
    if name not in BUILT_IN:
        takes, called = inspect.signature(kernel), "(x, velocity, sigma, sigma_next, noise_level=...)"
        try:
            takes.bind("x", "velocity", "sigma", "sigma_next", noise_level=0.0)
        except TypeError as error:
            text = f"{name} is defined as {kernel.__name__}{takes}; {called} is called: {error}"
            raise ValueError(text) from error
    return kernel


def kernel_problem(name: str) -> str | None:
    """Why there is no such kernel. Those of this package are known without importing torch."""
    if name in BUILT_IN:
        return None
    try:
        find_kernel(name)
    except ValueError as error:
        return str(error)
    return None


def noise_problem(kernel: str, level: float | None) -> str | None:
    """Why a kernel cannot have this noise level."""
    if kernel == "wan_sde":
        if level is not None:
            return f"wan_sde takes its noise from the schedule and has no level, found {level:g}; write null"
    elif level is None:
        return f"{kernel} needs a level; use 0.7 (flow_sde), 0.3 (dance_sde), 0.8 (flow_cps) or 1 (ddim)"
    elif level == 0:
        text = f"{kernel} at level 0 is deterministic and has no density to train on; use a level above 0"
        return f"{text}, or algorithm diffusion_nft, which needs none"
    elif kernel in UP_TO_ONE and level > 1:
        return f"{kernel} has levels above 0 to 1, found {level:g}; use 1 or less"
    return None
