"""`genrl doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import run


@pytest.mark.slow
def test_doctor(folder: Path) -> None:
    found = json.loads(run("doctor", "--json"))
    assert found["packages"]["torch"] and found["torch"]["device"] in ("cpu", "cuda", "mps", "xpu")
    assert found["torch"]["torchvision"] in ("absent", "works", "declared") and isinstance(found["advice"], list)
    assert found["kernels"]["compile"] and found["kernels"]["adaln"]
    assert "torch" in run("doctor")


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
