"""Which prompts are asked (docs/economy.md): pure functions, for pictures and language alike.

The only state is `Known`, which is plain JSON in `Loop.memory`. All draws are keyed by seed, iteration and prompt, so a
resumed run chooses the same prompts, and so do all processes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from genrl.config.sections import Selection
from genrl.mdp.noise import derive_seed

Known = Mapping[str, Sequence[float]]
"""Number of a prompt -> [a, b, times asked, iteration in which it was asked last]. a, b: discounted evidence.

By success, a successes and b failures: Beta(1 + a, 1 + b) is the posterior of its rate. By spread, of n samples
a = (n - 1) / 2 and b half the sum of squares around their mean: InverseGamma(2 + a, v + b) is the posterior of its
variance, under a prior whose mean is v, the pooled variance within all groups so far.
"""

NOTHING: Known = {}

TARGET = 0.5
"""The success rate at which a group teaches most (MoPPS)."""

DISCOUNT = 0.5
"""What an earlier visit of a prompt counts, compared with the one after it, since the model changes (MoPPS: .5)."""
COOLDOWN, TIMES = 2, 4
"""Iterations between two visits of a prompt that is asked again, and most visits in a run."""
SAME = 1e-6
"""Relative deviation of a group's rewards that counts as none."""
MEMORY = "prompts"
"""Under which it is in the loop's memory."""


def of(memory: Mapping[str, Any]) -> Known:
    """What is known by the loop's memory."""
    entries: Known = memory.get(MEMORY, NOTHING)
    return entries


def looked_at(settings: Selection | None, count: int) -> int:
    """How many prompts of the data are used up to choose `count`."""
    return count if settings is None else count * settings.candidates


def choose(
    settings: Selection | None, candidates: Sequence[int], count: int, known: Known, *, iteration: int, seed: int
) -> list[int]:
    """`count` of the candidates, which are numbers of prompts; some of them again where there are fewer.

    Thompson sampling: of each prompt's posterior one draw; those are taken whose draw is nearest to the rate TARGET
    (MoPPS, arXiv 2507.04632), or largest. With `replay`, at most its share are prompts that were asked before, had
    different samples, and are due again (Prompt Replay, arXiv 2603.21177); they come first.
    """
    if settings is None:
        return list(candidates)
    prior = _pooled(known)

    def nearest(numbers: Sequence[int], most: int) -> list[int]:
        def distance(number: int) -> float:
            source = random.Random(derive_seed(seed, "selection", iteration, number))
            return _distance(settings, known.get(str(number), (0.0, 0.0)), prior, source)

        return sorted(numbers, key=distance)[:most]

    replayed: list[int] = []
    if settings.replay is not None:
        due = [int(number) for number, entry in known.items() if _is_due(entry, iteration)]
        replayed = nearest(due, int(settings.replay.share * count))
    fresh = [number for number in dict.fromkeys(candidates) if number not in replayed]
    chosen = replayed + nearest(fresh, count - len(replayed))
    return [chosen[k % len(chosen)] for k in range(count)]


def values_of(settings: Selection, first: Tensor, total: Tensor, *, right_at: float = 1.0) -> Tensor:
    """Values by which prompts are chosen, of samples with these first and total rewards [N] (`noted`)."""
    if settings.by == "spread":
        return total
    return torch.where(first.isnan(), first, (first >= right_at - 1e-9).to(first))


def noted(
    settings: Selection, known: Known, numbers: Sequence[int], values: Tensor, *, iteration: int
) -> tuple[dict[str, Sequence[float]], dict[str, float]]:
    """What is known after these prompts were asked, and metrics of what was known of them before.

    values [P, G]: of their samples whether they succeeded (0 or 1), or the total reward; NaN = no score, no evidence.
    An entry is replaced, never changed.
    """
    entries, prior, errors = dict(known), _pooled(known), list[float]()
    for number, row in zip(map(str, numbers), values.double(), strict=True):
        scored = row[~row.isnan()]
        a, b, times, _ = entries.get(number, (0.0, 0.0, 0, 0))
        more_a, more_b = _evidence(settings, scored)
        # MoPPS: alpha <- d alpha + (1 - d) alpha_0 + successes; a = alpha - alpha_0
        entries[number] = [DISCOUNT * a + more_a, DISCOUNT * b + more_b, times + 1, iteration]
        if number in known and len(scored) > 1:
            errors.append(abs(_expected(settings, known[number], prior) - _observed(settings, scored)))
    share = sum(str(number) in known for number in numbers) / len(numbers)
    error = sum(errors) / len(errors) if errors else math.nan
    return entries, {"selection/known": share, "selection/error": error}


def _evidence(settings: Selection, scored: Tensor) -> tuple[float, float]:
    if settings.by == "success":
        right = float(scored.sum())
        return right, len(scored) - right
    if len(scored) < 2:
        return 0.0, 0.0
    off = scored - scored.mean()
    if float(off.abs().max()) <= SAME * float(scored.abs().max()):  # rounding of a mean is no spread
        off = torch.zeros_like(off)
    return (len(scored) - 1) / 2, float((off**2).sum()) / 2


def _distance(settings: Selection, entry: Sequence[float], prior: float, source: random.Random) -> float:
    """Distance of one draw from the posterior: the smaller, the better."""
    a, b = entry[:2]
    if settings.by == "success":
        return abs(source.betavariate(1 + a, 1 + b) - TARGET)
    # Minus a draw of the variance (inverse gamma): the largest spread comes first.
    return -(prior + b) / source.gammavariate(2 + a, 1.0)


def _is_due(entry: Sequence[float], iteration: int) -> bool:
    """Whether a prompt may be asked again, and is of use: with successes and failures, or with spread."""
    a, b, times, last = entry
    return a > 0 and b > 0 and times < TIMES and iteration - last > COOLDOWN


def _pooled(known: Known) -> float:
    """Variance within all groups; 1 where nothing is known."""
    freedom = math.fsum(entry[0] for entry in known.values())  # exact, whatever the order of a file
    return (math.fsum(entry[1] for entry in known.values()) / freedom if freedom else 0.0) or 1.0


def _expected(settings: Selection, entry: Sequence[float], prior: float) -> float:
    """Expected rate, or root of the expected variance."""
    a, b = entry[:2]
    return (1 + a) / (2 + a + b) if settings.by == "success" else math.sqrt((prior + b) / (1 + a))


def _observed(settings: Selection, scored: Tensor) -> float:
    if settings.by == "success":
        return float(scored.mean())
    return float(torch.std(scored))
