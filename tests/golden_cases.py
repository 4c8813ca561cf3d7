"""Reading the golden files: cases of those that have a manifest, arrays of those that have none, and error measures."""

import json
import re
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


def through(std: Tensor, tolerance: float = 2e-6) -> float:
    """An error of the mean, as a log-density sees it: divided by the std. The released float32 arithmetic, redone in
    float64, is off by as much."""
    return tolerance / std[std > 0].min().clamp(max=1.0).item() if bool((std > 0).any()) else tolerance


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


class Arrays:
    """The arrays of one file without a manifest, and which of them have been used."""

    def __init__(self, data: np.lib.npyio.NpzFile, *, double: bool = False) -> None:
        self.data, self.used, self.double = data, set[str](), double

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def given(self, name: str) -> Tensor:
        self.used.add(name)
        value = torch.from_numpy(np.array(self.data[name]))
        return value.double() if self.double and value.is_floating_point() else value

    def number(self, name: str) -> float:
        return float(self.given(name))

    def text(self, name: str) -> str:
        self.used.add(name)
        return str(self.data[name])

    def check(self, name: str, got: object, rtol: float = 1e-9, atol: float = 1e-10) -> None:
        want = self.given(name)
        value = got if isinstance(got, Tensor) else torch.from_numpy(np.array(got))
        assert value.shape == want.shape, f"{name}: shape {list(value.shape)} instead of {list(want.shape)}"
        if not want.is_floating_point():
            assert torch.equal(value.to(want.dtype), want), f"{name}: {value} instead of {want}"
            return
        torch.testing.assert_close(value.double(), want.double(), rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")

    def checks(self, prefix: str, **got: object) -> None:
        """Several arrays whose names begin alike."""
        for name, value in got.items():
            self.check(f"{prefix}_{name}", value)

    def near(self, name: str, got: Tensor, tolerance: float = 1e-5) -> None:
        """In units of max(1, |value|); gradients, small numbers, in units of their largest."""
        want = self.given(name)
        self.check(name, got, 0.0 if "grad" in name else tolerance,
                   tolerance * (float(want.abs().max()) if "grad" in name else 1.0))  # fmt: skip

    def tags(self, pattern: str) -> Iterator[str]:
        """First groups of the names that match, each once."""
        yield from dict.fromkeys(m[1] for name in self.data.files if (m := re.fullmatch(pattern, name)))

    def matches(self, pattern: str) -> Iterator[re.Match[str]]:
        return (result for name in self.data.files if (result := re.fullmatch(pattern, name)))

    def all_used(self, among: str = ".*", *, but: str = "") -> None:
        """Every array whose name matches `among` and not `but` has been."""
        wanted = {actual[0] for actual in self.matches(among) if not re.fullmatch(but, actual[0])}
        assert wanted and wanted <= self.used, sorted(wanted - self.used)
