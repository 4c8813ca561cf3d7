"""Every kernel compiles for four GPUs without spills, in a process of its own that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genrl.kernels.aot import LIMITS, Compiled, main
from tests.kernels.kernel_errors import needs_triton


@pytest.mark.slow
@needs_triton
def test_all_kernels_fit_four_targets(tmp_path: Path) -> None:
    file = tmp_path / "aot.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "genrl.kernels.aot", "128", "adaln 3072", "sde_step"],
        env=environment | {"GENRL_AOT_JSON": str(file), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    rows = [Compiled(**row) for row in json.loads(file.read_text())]
    assert {row.target for row in rows} == set(LIMITS) and len(rows) == 9 * len(LIMITS)
    for row in rows:
        assert row.spilled == 0 and row.shared <= LIMITS[row.target] and 0 < row.registers <= 512, row


@pytest.mark.parametrize(
    ("spilled", "shared", "fits"), [(0, 163 * 1024, True), (0, 163 * 1024 + 1, False), (8, 0, False)]
)
def test_what_fits(spilled: int, shared: int, fits: bool) -> None:
    assert Compiled("kernel", "sm_80", 64, spilled, shared).fits is fits


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="TRITON_INTERPRET=1 is set"):
        main()
