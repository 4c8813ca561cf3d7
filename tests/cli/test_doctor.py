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
    assert found["kernels"]["compile"] and found["kernels"]["prefix_attention"]
    assert "torch" in run("doctor")


def test_doctor_lists_accelerators_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their properties where they have some, unlike MPS."""
    from genrl.cli import doctor

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=f"Card {device.index}", total_memory=(device.index + 1) * 2**30)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    cards = ["Card 0, 1.0 GB, bfloat16 True", "Card 1, 2.0 GB, bfloat16 True"]
    known = SimpleNamespace(get_device_properties=properties, is_bf16_supported=lambda: True)
    for module, said in ((known, cards), (SimpleNamespace(), ["there", "there"])):
        monkeypatch.setattr(torch, "get_device_module", lambda kind, module=module: module)
        found = doctor._torch()
        assert [value for key, value in found.items() if key.startswith("xpu:")] == said


def test_doctor_says_what_to_do() -> None:
    from genrl.cli.doctor import advice

    report = {
        "system": {"free_disk_gb": 1.5},
        "packages": {"torch": "2", "peft": None},
        "torch": {"device": "cpu", "torchvision": "declared"},
        "threads": {"torch_threads": 4, "usable_cores": 4},
        "simulators": {"libero": "LIBERO lacks bddl: pip"},
    }
    text = "\n".join(advice(report))
    for part in ("pip install peft", "torchvision does not fit", "OMP_NUM_THREADS=1", "1.5 GB of disk", "lacks bddl"):
        assert part in text
