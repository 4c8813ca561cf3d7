"""Normalisation of states and actions as LeRobot has it: its modes, its statistics, its formulas.

Statistics are a dictionary of vectors [D], by the names of a data set's `meta/stats.json`; values are [..., D].
Everything that a mode maps from its bounds goes to [-1, 1]; nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"]

EPS = 1e-8
_BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
LEAST_SPREAD = 0.1
_MOST = 2**24
"""Rows of which torch computes quantiles."""
_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def statistics(values: Tensor) -> dict[str, Tensor]:
    """min, max, mean, std (population), q01, q10, q50, q90, q99 of values [..., D], float32 [D] each, and count [1].

    Of more than 2^24 rows, quantiles are those of every second, third, ... one.

    Raises ValueError where there is none, or one is not finite.
    """
    flat = values.reshape(-1, values.shape[-1]).double()
    if not len(flat) or not bool(flat.isfinite().all()):
        bad = (~flat.isfinite()).any(1).nonzero()[:3, 0].tolist()
        raise ValueError(f"statistics need finite values; {len(flat)} rows, the first that are not finite: {bad}")
    stats = {
        "min": flat.amin(0),
        "max": flat.amax(0),
        "mean": flat.mean(0),
        "std": flat.std(0, correction=0),
        "count": torch.tensor([float(len(flat))]),
    }
    some = flat[:: -(-len(flat) // _MOST)]
    stats |= {name: some.quantile(share, dim=0) for name, share in _QUANTILES.items()}
    return {name: value.float() for name, value in stats.items()}


def with_least_spread(stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Statistics with bounds of quantiles at least `LEAST_SPREAD` of the range apart: a dimension that hardly ever
    moves (a gripper that closes once) would be blown up when it does."""
    widened = dict(stats)
    for low, high in (_BOUNDS["QUANTILES"], _BOUNDS["QUANTILE10"]):
        if {low, high, "min", "max"} <= widened.keys():
            lack = (LEAST_SPREAD * (widened["max"] - widened["min"]) - (widened[high] - widened[low])).clamp(
                min=0.0
            ) / 2.0
            widened[low], widened[high] = widened[low] - lack, widened[high] + lack
    return widened


def normalise(values: Tensor, stats: Mapping[str, Tensor], mode: Mode) -> Tensor:
    """`(x - mean) / (std + 1e-8)`, or `2 (x - low) / (high - low) - 1` with the mode's bounds (1e-8 apart if equal).

    MIN_MAX: min and max; QUANTILES: q01 and q99 (pi0.5); QUANTILE10: q10 and q90; IDENTITY: nothing. [..., D].
    Raises KeyError for statistics that are not there.
    """
    if mode == "IDENTITY":
        return values
    offset, scale = _affine(stats, mode, values)
    return (values - offset) / scale


def unnormalise(values: Tensor, stats: Mapping[str, Tensor], mode: Mode) -> Tensor:
    """The inverse of `normalise`, for actions of a policy on their way to the robot."""
    if mode == "IDENTITY":
        return values
    offset, scale = _affine(stats, mode, values)
    return values * scale + offset


def _affine(stats: Mapping[str, Tensor], mode: Mode, like: Tensor) -> tuple[Tensor, Tensor]:
    names = ("mean", "std") if mode == "MEAN_STD" else _BOUNDS.get(mode)
    if names is None:
        raise ValueError(f"mode must be MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10 or IDENTITY, got {mode!r}")
    missing = [name for name in names if name not in stats]
    if missing:
        raise KeyError(f"mode {mode} needs the statistics {missing}, there are only {sorted(stats)}")
    low, high = (stats[name].to(like) for name in names)
    if low.shape[-1:] != like.shape[-1:]:  # else one number would be broadcast against many
        raise ValueError(f"{like.shape[-1]} numbers cannot be normalised by statistics of {low.shape[-1]}")
    if mode == "MEAN_STD":
        return low, high + EPS
    # A number that never moves in the data has no range: it maps to 0, and back to itself.
    half = torch.where(high == low, EPS, high - low) / 2.0
    return low + half, half
