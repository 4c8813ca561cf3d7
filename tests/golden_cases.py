"""Reading the golden files that have a manifest: their cases and the error measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
    left_out: Callable[[Case], bool] = lambda case: False,
) -> dict[str, float]:
    """Run `check` (name -> (error, tolerance)) on every case that is not left out, by what its parameters say it is.

    Fails listing each case out of tolerance, and where nothing was compared. Returns the worst error per name.
    """
    worst: dict[str, float] = {}
    failures, checked = [], 0
    for case in cases(data):
        if left_out(case):
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
    print({name: f"{value:.2g}" for name, value in worst.items()}, f"{checked} checked")
    return worst
