"""All of them: what they say of themselves, and the kernels' without a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as every
from benchmarks import kernels


@pytest.mark.parametrize("name", [*every.BRIEF, "compiled", "reward_cost", "vla_throughput"])
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    said = capsys.readouterr().out
    assert f"python -m benchmarks.{name}" in said and "--out" in said and f"{name}.json" in said


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "overheads"])
    with pytest.raises(SystemExit, match="2"):
        every.main()
    assert "no benchmark overheads; there are model_calls, overhead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratios", "on"),
    [
        ([[1.05, 1.2]] * 4, True),
        ([[1.05, 1.2]] * 3 + [[1.2, 1.04]] + [[1.0, 0.97]], False),  # three shapes in both phases
        ([[1.5, 1.5]] * 5 + [[1.5, 0.969]], False),
        ([[1.05, 1.05]] * 4 + [[0.97, 0.97]] * 2, True),
        ([], False),
    ],
)
def test_the_rule_of_a_default(ratios: list[list[float]], on: bool) -> None:
    assert kernels.on_by_default({str(k): one for k, one in enumerate(ratios)}) is on


@pytest.mark.slow
def test_every_kernel_runs_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "--dry-run", "--out", str(tmp_path)])
    kernels.main()
    rows = json.loads((tmp_path / "kernels.json").read_text())["found"]
    names = {"prefix_attention", "joint_attention"}
    assert {row["kernel"] for row in rows} == names
    assert all("seconds" not in row and row["errors"]["ours"] <= 2 for row in rows)


def test_a_kernel_that_is_wrong_is_not_timed() -> None:
    case = kernels.cases("joint_attention", "cpu", kernels.torch.float32, tiny=True)["tiny"]
    wrong = case._replace(ours=lambda *given: 1.001 * case.definition(*given))
    with pytest.raises(RuntimeError, match="joint_attention, tiny: .* times the error of its definition"):
        kernels.measure("joint_attention", "tiny", wrong, 1, "cpu")


def test_nothing_is_timed_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels"])
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        kernels.main()
    assert "no kernel can be timed: there is no GPU. --dry-run checks all but the times" in capsys.readouterr().err
