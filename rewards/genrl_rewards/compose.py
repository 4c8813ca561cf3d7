"""Combine several scores per sample into the one that is trained on: gates, normalisation, weights and schedules.

    total_s = sum over rewards k of  weight_k(iteration) * normalise_k(gate_k(score_k,s))

Scores are float64 [N], the N samples of one iteration over all processes; NaN = no score. Everything here is a pure
function: running statistics are passed in and returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genrl_rewards.contract import nearest

Normalize = Literal["none", "group", "running"]


@dataclass(frozen=True)
class Gate:
    """A reward counts only where another one is good enough."""

    reward: str
    """Label of the other reward, which may have weight 0."""
    at_least: float
    """Threshold, in the other reward's own units."""
    otherwise: float = 0.0
    """What a sample below the threshold scores instead, in the gated reward's own units, before normalisation."""


@dataclass(frozen=True)
class Component:
    """How one reward enters the total."""

    weight: float = 1.0
    schedule: tuple[tuple[int, float], ...] = ()
    """Points (iteration, factor on the weight), iterations rising; linear between, constant outside. Empty: 1."""
    normalize: Normalize = "none"
    gate: Gate | None = None


@dataclass(frozen=True)
class Running:
    """Mean and spread of all scores seen so far (Welford 1962; merged as in Chan, Golub and LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0
    """Sum of squared differences from the mean."""

    @property
    def std(self) -> float:
        """Population standard deviation; 0 before the first score."""
        return math.sqrt(self.sum_of_squares / self.count) if self.count else 0.0


class Combined(NamedTuple):
    """The total of one iteration, and what each reward contributed to it."""

    total: Tensor
    """float64 [N]; NaN where a reward whose weight is not 0 has no score."""
    contributions: dict[str, Tensor]
    """Label -> weight times the gated and normalised score, float64 [N]."""
    weights: dict[str, float]
    """Label -> weight at this iteration."""
    gated: dict[str, Tensor]
    """Label -> whether the gate closed, bool [N]; gated rewards only."""
    running: dict[str, Running]
    """Label -> statistics including this iteration's scores; rewards with `normalize: running` only."""
    values: dict[str, Tensor]
    """Label -> gated and normalised score without its weight, float64 [N]."""


def combine(
    scores: Mapping[str, Tensor],
    components: Mapping[str, Component],
    group: Tensor,
    *,
    iteration: int,
    running: Mapping[str, Running] | None = None,
) -> Combined:
    """The total of one iteration.

    scores: label -> float64 [N]. group: int64 [N], equal numbers mark the samples of one group. iteration: counted
    from 0. running: statistics of the iterations before. Where a reward has weight 0 now, its score may be missing.
    Raises ValueError if the labels differ, or if a gate names a reward that is not there.
    """
    if set(scores) != set(components):
        raise ValueError(f"the scores are of the rewards {sorted(scores)}, the components of {sorted(components)}")
    weights = {
        label: component.weight * factor(component.schedule, iteration) for label, component in components.items()
    }
    gated: dict[str, Tensor] = {}
    after: dict[str, Running] = {}
    used: dict[str, Tensor] = {}
    for label, component in components.items():
        values = scores[label].double()
        if component.gate is not None:
            check_gate(label, component.gate, components)
            # Gates first: their thresholds are in the units of the scores, which normalising takes away. They read the
            # other reward as it came, so that the order of the components does not matter.
            values, gated[label] = gate(values, scores[component.gate.reward].double(), component.gate)
        if component.normalize == "group":
            values = normalize_in_groups(values, group)
        elif component.normalize == "running":
            # This iteration's scores count already: in the first one there would be no spread to divide by.
            after[label] = update((running or {}).get(label, Running()), values)
            values = normalize_by(values, after[label])
        used[label] = values
    contributions = {label: weights[label] * values for label, values in used.items()}
    return Combined(_sum(contributions, weights, len(group)), contributions, weights, gated, after, used)


def evaluate(scores: Mapping[str, Tensor], components: Mapping[str, Component]) -> Tensor:
    """The total of held-out samples, float64 [N]: gates and weights, without schedules and normalisation.

    A curve over a run needs one measure, whatever the samples beside it.
    """
    plain = {k: Component(c.weight, (), "none", c.gate) for k, c in components.items()}
    lengths = {len(values) for values in scores.values()}
    return combine(scores, plain, torch.arange(max(lengths, default=0)), iteration=0).total


def factor(schedule: Sequence[tuple[int, float]], iteration: int) -> float:
    """The factor on a weight at an iteration: linear between the points, constant outside them."""
    if not schedule:
        return 1.0
    before = [point for point in schedule if point[0] <= iteration]
    after = [point for point in schedule if point[0] > iteration]
    if not before or not after:
        return float((before[-1] if before else after[0])[1])
    (left, low), (right, high) = before[-1], after[0]
    return low + (high - low) * (iteration - left) / (right - left)


def gate(values: Tensor, other: Tensor, rule: Gate) -> tuple[Tensor, Tensor]:
    """(gated scores, whether the gate closed), both [N]: `otherwise` where `other` is below the threshold.

    Where `other` has no score, there is none, since it cannot be judged; where the gated reward has none, it stays so.
    """
    closed = other < rule.at_least
    # NaN < x is false, so that without the other's score the gate is open here, and the next line takes the score away.
    replaced = torch.where(closed & ~values.isnan(), torch.full_like(values, rule.otherwise), values)
    return torch.where(other.isnan(), torch.full_like(values, math.nan), replaced), closed


def normalize_in_groups(values: Tensor, group: Tensor) -> Tensor:
    """(score - mean) / population standard deviation of its group's scores, float64 [N].

    0 for a group with a single score, or with a range of at most a millionth of its scores (that is float32 rounding,
    which dividing would turn into a preference). NaN stays NaN.
    """
    normalised = torch.full_like(values, math.nan)
    for number in set(group.tolist()):
        rows = torch.nonzero((group == number) & ~values.isnan()).flatten()
        members = values[rows]
        spread = len(members) > 1 and bool(members.max() - members.min() > 1e-6 * members.abs().max())
        centred = members - members.mean()
        spread = spread and bool(members.std(correction=0) > 0)  # 0 where the squares of tiny scores underflow
        normalised[rows] = centred / members.std(correction=0) if spread else torch.zeros_like(members)
    return normalised


def update(running: Running, values: Tensor) -> Running:
    """The statistics with this iteration's scores [N] added; NaN is left out."""
    new = values[~values.isnan()].double()
    if len(new) == 0:
        return running
    count, mean = len(new), float(new.mean())
    # About the mean of the new ones: the difference of two large sums would lose the digits that the spread is made of.
    squares = float(((new - mean) ** 2).sum())
    total, shift = running.count + count, mean - running.mean
    return Running(
        total,
        running.mean + shift * count / total,
        running.sum_of_squares + squares + shift**2 * running.count * count / total,
    )


def normalize_by(values: Tensor, running: Running) -> Tensor:
    """(score - running mean) / running standard deviation, [N]; 0 while all scores so far are equal."""
    if running.std == 0:
        return torch.where(values.isnan(), values, torch.zeros_like(values))
    return (values - running.mean) / running.std


def metrics(combined: Combined, components: Mapping[str, Component]) -> dict[str, float]:
    """What to log of an iteration besides the plain scores, by metric name: each component as it entered the total.

    Components that enter unchanged are left out.
    """
    logged: dict[str, float] = {}
    for label, component in components.items():
        if component == Component():
            continue
        values = combined.contributions[label]
        scores = values[~values.isnan()]
        logged[f"used/{label}_mean"] = float(scores.mean()) if len(scores) else math.nan
        logged[f"used/{label}_std"] = float(scores.std(correction=0)) if len(scores) else math.nan
        if component.schedule:
            logged[f"used/{label}_weight"] = combined.weights[label]
        if label in combined.gated:
            logged[f"used/{label}_gated"] = float(combined.gated[label].double().mean())
    return logged


def check_gate(label: str, rule: Gate, labels: Iterable[str]) -> None:
    """Raise ValueError if a gate names a reward that is not there, or the gated one itself."""
    known = [other for other in labels if other != label]
    if rule.reward not in known:
        others = f"The others are: {', '.join(known)}" if known else "There is no other reward"
        raise ValueError(
            f"the gate of reward {label!r} is on {rule.reward!r}, which is no other reward of this run."
            f"{nearest(rule.reward, known)} {others}"
        )


def _sum(contributions: Mapping[str, Tensor], weights: Mapping[str, float], count: int) -> Tensor:
    """The sum over rewards whose weight is not 0, float64 [count]; weights are not divided by their sum.

    NaN in any of them makes the sum NaN: a sample that lacks one of its scores has no total.
    """
    counted = [values.tolist() for label, values in contributions.items() if weights[label] != 0]
    if not counted:  # a schedule may set all weights to 0 for a while: nothing to prefer
        return torch.zeros(count, dtype=torch.float64)
    # fsum is exact, so that the total does not depend on the order of the rewards in the file.
    return torch.tensor([math.fsum(row) for row in zip(*counted, strict=True)], dtype=torch.float64)
