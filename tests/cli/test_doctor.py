"""`genrl doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cli.commands import run


@pytest.mark.slow
def test_doctor(folder: Path) -> None:
    found = json.loads(run("doctor", "--json"))
    assert found["packages"]["torch"] and found["torch"]["device"] in ("cpu", "cuda", "mps", "xpu")
    assert found["torch"]["torchvision"] in ("absent", "works", "declared") and isinstance(found["advice"], list)
    assert found["kernels"]["compile"] and found["kernels"]["adaln"]
    assert "torch" in run("doctor")


def properties(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(name=f"Card {device.index}", total_memory=(device.index + 1) * 2**30)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            SimpleNamespace(get_device_properties=properties, is_bf16_supported=lambda: True),
            {"xpu:0": "Card 0, 1.0 GB, bfloat16 True", "xpu:1": "Card 1, 2.0 GB, bfloat16 True"},
        ),
        (SimpleNamespace(), {"xpu:0": "there", "xpu:1": "there"}),
    ],
    ids=["with properties", "without, as MPS"],
)
def test_doctor_lists_accelerators_of_any_kind(
    module: SimpleNamespace, said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from genrl.cli import doctor

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    found = doctor._torch()
    assert {key: value for key, value in found.items() if key.startswith("xpu")} == said


def test_doctor_says_what_to_do() -> None:
    from genrl.cli.doctor import advice

    report = {
        "system": {"free_disk_gb": 1.5},
        "packages": {"torch": "2", "peft": None},
        "torch": {"device": "cpu", "torchvision": "declared"},
        "threads": {"torch_threads": 4, "usable_cores": 4},
    }
    text = "\n".join(advice(report))
    for part in ("pip install peft", "torchvision does not fit", "OMP_NUM_THREADS=1", "1.5 GB of disk"):
        assert part in text
