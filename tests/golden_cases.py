"""Reading the golden sampler files: their cases, the error measures, and which cases are not reproduced on purpose."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PUBLIC_HALF = "GENRL_GOLDEN" not in os.environ
"""The exact ids of the cases left out are asserted for the files at the default place only."""


@dataclass(frozen=True)
class Case:
    id: str
    peer: str
    fn: str
    params: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    def __getitem__(self, field: str) -> Tensor:
        return torch.from_numpy(np.array(self.arrays[field]))

    def __contains__(self, field: str) -> bool:
        return field in self.arrays


def cases(data: Mapping[str, np.ndarray]) -> Iterator[Case]:
    for entry in json.loads(str(data["manifest"])):
        # a few manifests list a field that the peer does not return (the log-prob of an ODE rollout)
        names = {field: f"{entry['id']}/{field}" for field in entry["fields"]}
        arrays = {field: data[name] for field, name in names.items() if name in data}
        yield Case(entry["id"], entry["peer"], entry["fn"], entry["params"], arrays)


def error(got: Tensor, want: Tensor) -> float:
    """Largest absolute error in units of max(1, |value|), the golden files' measure. NaN is an infinite error."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, f"shape {list(got.shape)} instead of {list(want.shape)}"
    worst = ((got - want).abs() / want.abs().clamp(min=1.0)).max().item()
    return float("inf") if worst != worst else worst


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest |got - want| / |want|: for small numbers, such as KLs, that `error` would let pass."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, f"shape {list(got.shape)} instead of {list(want.shape)}"
    worst = ((got - want).abs() / want.abs().clamp(min=1e-300)).max().item()
    return float("inf") if worst != worst else worst


def check_all(
    data: Mapping[str, np.ndarray],
    check: Callable[[Case], dict[str, tuple[float, float]]],
    left_out: Callable[[Case], str | None] = lambda case: None,
    expected_left_out: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Run `check` (name -> (error, tolerance)) on every case that `left_out` gives no reason against.

    Fails listing each case out of tolerance; and where the cases left out are not exactly the expected ones.
    Returns the worst error per name.
    """
    worst: dict[str, float] = {}
    failures, skipped, checked = [], {}, 0
    for case in cases(data):
        reason = left_out(case)
        if reason is not None:
            skipped[case.id] = reason
            continue
        checked += 1
        results = check(case)
        assert results, f"{case.id} was not compared with anything"
        for name, (err, tolerance) in results.items():
            worst[name] = max(worst.get(name, 0.0), err)
            if not err <= tolerance:
                failures.append(f"{case.id} {case.fn}: {name} is off by {err:.3g} (allowed {tolerance:.3g})")
    assert not failures, "\n".join(failures)
    assert checked > 0
    if PUBLIC_HALF:
        assert skipped == dict(expected_left_out or {})
    print({name: f"{value:.2g}" for name, value in worst.items()}, f"{checked} checked, {len(skipped)} left out")
    return worst
