"""The plan for a GPU: its order, its clocks, and that every check runs; on a CPU, with stand-in sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_checks, gpu_page
from benchmarks.gpu import PLAN, Check

SHORT = ("ratio:flux1_dev", "speed:sd35_medium")
"""Checks that a CPU runs in seconds; what the others run has tests of its own."""


def test_every_check_has_its_function() -> None:
    assert {check.name.partition(":")[0] for check in PLAN} == set(gpu_checks.CHECKS)


def test_the_plan_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--plan"])
    gpu.main()
    said = capsys.readouterr().out
    assert all(check.name in said for check in PLAN) and "at most" in said


def test_a_check_that_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "ratio:sd4"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "no check ratio:sd4; there are device, tests" in capsys.readouterr().err


@pytest.mark.slow
def test_checks_run_without_a_gpu(tmp_path: Path) -> None:
    checks = [check for check in PLAN if check.name in SHORT]
    assert gpu.run(checks, tmp_path, budget=1.0, dry=True, side_by_side=2)
    known = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: row["status"] for name, row in known.items()} == dict.fromkeys(SHORT, "done")
    ways = known["ratio:flux1_dev"]["found"]
    assert all(ways[way]["max_abs_dev"] == 0 for way in ("bfloat16", "attention: flash", "fused", "keep_graph"))
    assert known["speed:sd35_medium"]["found"]["as published"]["estimate_mb"] > 0
    assert "| bfloat16 |  | 0 |" in gpu_page.page(known)


def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A check is this program."""
    (tmp_path / "check.py").write_text(text)
    monkeypatch.setattr(
        gpu, "command_of", lambda check, found: [sys.executable, str(tmp_path / "check.py"), str(found)]
    )


def test_one_that_hangs_is_ended_and_what_it_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper(tmp_path, monkeypatch, "import sys, time\nopen(sys.argv[1], 'w').write('{\"a\": 1}')\ntime.sleep(60)\n")
    assert not gpu.run([Check("slow", "", 2)], tmp_path, budget=60, dry=False, side_by_side=1)
    row = json.loads((tmp_path / "gpu.json").read_text())["slow"]
    assert (row["status"], row["found"]) == ("out of time", {"a": 1})


def test_one_that_fails_stops_no_other_and_one_that_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper(tmp_path, monkeypatch, "import sys\nsys.exit('broken' if 'bad' in sys.argv[1] else 0)\n")
    checks = [Check("bad", "", 9), Check("good", "", 9, alone=True), Check("long", "", 900)]
    assert not gpu.run(checks, tmp_path, budget=60, dry=False, side_by_side=3)
    known = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: row["status"] for name, row in known.items()} == {"bad": "failed", "good": "done"}
    assert "broken" in known["bad"]["tail"] and "broken" in (tmp_path / "gpu.log").read_text()
    assert "long" in capsys.readouterr().out


def test_a_second_call_goes_on_where_the_first_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpu.json"
    rows = {"device": {"status": "done", "found": {"name": "card"}}, "peer": {"status": "failed"}}
    file.write_text(json.dumps(rows))
    monkeypatch.setattr(gpu_checks, "card", lambda: "card")
    assert gpu._done(file) == {"device"}
    monkeypatch.setattr(gpu_checks, "card", lambda: "another")
    assert gpu._done(file) == set()


def test_the_page_is_that_of_the_results(root: Path) -> None:
    known = json.loads((root / "benchmarks" / "results" / "gpu.json").read_text())
    assert (root / "docs" / "gpu.md").read_text() == gpu_page.page(known)
    assert "Nothing was measured on a GPU yet" in gpu_page.page({})
