"""Cases of the golden files of token policies, and their comparison."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One case of a file. Masked entries of the inputs are made NaN: whatever stands there must not matter."""

    arrays: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> Tensor:
        value = torch.from_numpy(np.array(self.arrays[name]))
        hidden = "mask" in self.arrays and value.shape == self.arrays["mask"].shape and name.endswith(("logp", "adv"))
        if hidden and not name.startswith("out_"):
            value = torch.where(torch.from_numpy(self.arrays["mask"]).bool(), value, torch.nan)
        return value

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def number(self, name: str) -> float:
        return float(self.arrays[name])

    @property
    def params(self) -> dict[str, Any]:
        return json.loads(str(self.arrays["params"])) if "params" in self.arrays else {}

    @property
    def log_prob(self) -> Tensor:
        return self["logp"].requires_grad_()

    @property
    def group(self) -> Tensor:
        return self.group_of("rewards")

    def group_of(self, rows: str) -> Tensor:
        size = int(self.arrays["G"])
        return torch.arange(len(self.arrays[rows]) // size).repeat_interleave(size)


Expected = dict[str, Tensor]


def with_gradient(loss: Tensor, log_prob: Tensor, suffix: str = "") -> Expected:
    return {f"loss{suffix}": loss.detach(), f"grad{suffix}": torch.autograd.grad(loss, log_prob, retain_graph=True)[0]}


def cases(data: np.lib.npyio.NpzFile) -> Iterator[tuple[str, Case]]:
    names = {}
    for key in data.files:
        if key == "meta":
            continue
        result = re.fullmatch(r"c(\d+)_(.+)", key)
        assert result, f"no case in the name {key}"
        names.setdefault(int(result[1]), {})[result[2]] = data[key]
    for number, arrays in sorted(names.items()):
        yield f"c{number}", Case(arrays)


NOT_A_TARGET = (
    "adv_released_code",  # what R1-Reward's repository does instead of the published filter
    "length_reward",  # OpenVLThinkerV2's, a term that is left out here
)


def compare(data: np.lib.npyio.NpzFile, check: Callable[[Case], Expected]) -> None:
    """All expected arrays of all cases, and nothing else, to 1e-9; masks exactly."""
    for number, case in cases(data):
        ours = check(case)
        wanted = {field.removeprefix("out_") for field in case.arrays if field.startswith("out_")} - {*NOT_A_TARGET}
        assert wanted and ours.keys() == wanted, f"{number}: not compared {wanted ^ ours.keys()}"
        for field, value in ours.items():
            want = case[f"out_{field}"]
            assert value.shape == want.shape, (number, field, value.shape)
            if want.dtype == torch.bool:
                assert torch.equal(value, want), (number, field)
                continue
            rtol, atol = (1e-8, 1e-8) if field.startswith("reinforce_pp") else (1e-9, 1e-10)
            worst = (value.double() - want.double()).abs().max().item()
            close = torch.allclose(value.double(), want.double(), rtol=rtol, atol=atol)
            assert close, f"{number} {field}: off by {worst:.3g}"
