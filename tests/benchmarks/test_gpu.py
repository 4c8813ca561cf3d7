"""The plan for a GPU: its order, its clocks, and that every check runs; on a CPU, with stand-in sizes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import drills, gpu, gpu_checks, gpu_page
from benchmarks.drills import DRILLS, run_drill
from benchmarks.gpu import PLAN, Check
from genrl.config import load

CALLS = gpu.calls(PLAN, gpu.CALL)


def test_every_check_has_its_function_and_is_told(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {check.name.partition(":")[0] for check in PLAN} == set(gpu_checks.CHECKS)
    monkeypatch.setattr(sys, "argv", ["gpu", "--plan"])
    gpu.main()
    said = capsys.readouterr().out
    assert all(check.name in said for check in PLAN) and "at most" in said
    monkeypatch.setattr(sys, "argv", ["gpu", "ratio:sd4"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "no check ratio:sd4; there are device, models" in capsys.readouterr().err


@pytest.mark.slow
def test_a_check_runs_in_its_process_without_a_gpu(tmp_path: Path) -> None:
    assert gpu.run([check for check in PLAN if check.name == "kernel:joint_attention"], tmp_path, budget=1.0, dry=True)
    (row,) = gpu.results(tmp_path)["no GPU"].values()
    assert row["status"] == "done" and row["found"]["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(check.name for call in CALLS[:2] for check in call), "speed:flux1_dev", "compiled:sd15"]
)
def test_a_dry_run(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setenv(gpu_checks.KEEP, str(tmp_path / "models"))
    for ways in ("WAYS", "COMPILED"):  # the first and the last of them
        given = list(getattr(gpu_checks, ways).items())
        monkeypatch.setattr(gpu_checks, ways, dict([given[0], given[-1]]))
    result, (check, _, argument) = gpu_checks.Findings(tmp_path / "found.json"), name.partition(":")
    gpu_checks.CHECKS[check](result, True, *([argument] if argument else []))
    assert result.values and not result.failed
    assert all(row.get("max_abs_dev", 0) == 0 for row in result.values.values() if isinstance(row, dict))
    if check == "ratio":
        assert "| bfloat16 |" in gpu_page.page({name: {"status": "done", "found": result.values}})


def test_operations_are_those_of_the_products_and_the_attention(tmp_path: Path) -> None:
    """Of a network of one block, counted by hand: 2 for each weight and token, 4 D S^2 for attention."""
    from diffusers import SD3Transformer2DModel

    sizes = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16}
    sizes |= {"joint_attention_dim": 12, "pooled_projection_dim": 10, "in_channels": 4, "sample_size": 4}
    SD3Transformer2DModel(**sizes, patch_size=2, pos_embed_max_size=8).save_pretrained(tmp_path / "transformer")
    tokens, text, width = 16, 333, 16
    embeddings = 2 * (
        tokens * 16 * width + text * 12 * width + 256 * width + width * width + 10 * width + width * width
    )
    # The one block is the last, whose text goes no further: it has no output projection, no MLP and two modulations.
    picture = 2 * tokens * (3 + 1 + 8) * width**2 + 2 * 6 * width**2
    words = 2 * text * 3 * width**2 + 2 * 2 * width**2
    attention = 4 * width * (tokens + text) ** 2
    last = 2 * 2 * width**2 + 2 * tokens * width * 4 * 16  # patches of 2 x 2 and 16 channels
    assert gpu_checks.flop(tmp_path, 64) == embeddings + picture + words + attention + last


def test_what_checks_start_is_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    monkeypatch.setattr(gpu_checks, "_pytest", lambda result, what, dry, workers: named.extend(what))
    for name in ("tests", "suite"):
        gpu_checks.CHECKS[name](None, True)
    folders = [name for name in named if name.startswith("tests/")]
    assert len(folders) > len(gpu_checks.TRAINING) and all((root / name).exists() for name in folders)
    started: list[list[str]] = []
    monkeypatch.setattr(gpu_checks.subprocess, "run", lambda command, **_: started.append(command))
    gpu_checks.group(SimpleNamespace(put=lambda *_: None), True)  # type: ignore[arg-type]
    file = started[0].index("configs/quickstart.yaml")
    assert load(root / started[0][file], started[0][file + 1 :]).iterations == 1


def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A check is this program."""
    (tmp_path / "check.py").write_text(text)
    command = [sys.executable, str(tmp_path / "check.py")]
    monkeypatch.setattr(gpu, "command_of", lambda check, result: [*command, str(result)])


def test_one_that_hangs_is_ended_and_what_it_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import subprocess, sys, time\nopen(sys.argv[1], 'w').write('{\"a\": 1}')\n"
    child += "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(own.pid))\ntime.sleep(60)\n"
    sleeper(tmp_path, monkeypatch, child)
    assert not gpu.run([Check("slow", "", 2)], tmp_path, budget=60, dry=False, on="card")
    row = gpu.results(tmp_path)["card"]["slow"]
    assert (row["status"], row["found"]) == ("out of time", {"a": 1})
    own = int((tmp_path / "pid").read_text())  # in a session of its own, as torchrun starts its workers
    assert not psutil.pid_exists(own) or psutil.Process(own).status() == psutil.STATUS_ZOMBIE
    assert "Nothing was measured" in gpu_page.page(gpu.results(tmp_path)["card"])


def test_one_that_fails_stops_no_other_and_a_long_one_is_left_out(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    sleeper(tmp_path, monkeypatch, "import sys\nsys.exit('broken' if 'bad' in sys.argv[1] else 0)\n")
    checks = [Check("bad", "", 9, gigabytes=1), Check("good", "", 9), Check("long", "", 900)]
    assert not gpu.run(checks, tmp_path, budget=60, dry=False, on="card", gigabytes=2)
    known = gpu.results(tmp_path)["card"]
    assert {name: row["status"] for name, row in known.items()} == {"bad": "failed", "good": "done"}
    assert "broken" in known["bad"]["tail"] and "broken" in (tmp_path / "gpu.log").read_text()
    assert "long" in capsys.readouterr().out


def test_a_second_call_goes_on_where_the_first_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"device": {"status": "done"}, "peer": {"status": "failed", "found": {"a": 1}}}
    (tmp_path / "gpu.json").write_text(json.dumps({"another": {"peer": {"status": "done"}}, "card": rows}))
    assert gpu.is_done(tmp_path, "card", "device") and not gpu.is_done(tmp_path, "card", "peer")
    assert not gpu.is_done(tmp_path, "another", "device")
    sleeper(tmp_path, monkeypatch, "import json, sys\nassert json.load(open(sys.argv[1])) == {'a': 1}\n")
    assert gpu.run([Check("peer", "", 9)], tmp_path, budget=60, dry=False, on="card")
    assert gpu.is_done(tmp_path, "card", "peer") and list(gpu.results(tmp_path)) == ["another", "card"]


def test_what_fits_into_the_card_runs_side_by_side() -> None:
    for first, second, begins in ((5, 4, True), (5, 6, False), (None, 1, False), (1, None, False)):
        running = [SimpleNamespace(check=Check("a", "", 1, gigabytes=first))]
        assert gpu._may_begin(Check("b", "", 1, gigabytes=second), running, 10) is begins  # type: ignore[arg-type]
        assert gpu._may_begin(Check("b", "", 1, gigabytes=second), [], 0.5)


def test_a_deviation_or_a_failure_is_not_done_and_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    result = gpu_checks.Findings(tmp_path / "found.json")
    result.put("fine", {"max_abs_dev": 0.0})
    result.fail("broken", RuntimeError("no"))
    assert result.failed and result.knows("fine") and not result.knows("broken")
    assert gpu_checks.Findings(tmp_path / "found.json").knows("fine")
    with pytest.raises(SystemExit):
        result.fail("lost", RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(gpu_checks, "_ratio_of", lambda *_: {"max_abs_dev": 0.3})
    again = gpu_checks.Findings(tmp_path / "again.json")
    gpu_checks._ratios(again, True, "sd15", {"bfloat16": ()})
    assert again.failed and not again.knows("bfloat16")


def test_the_page_is_that_of_the_results(root: Path) -> None:
    newest = list(gpu.results(root / "benchmarks" / "results").values())[-1]
    assert (root / "docs" / "gpu.md").read_text() == gpu_page.page(newest)
    assert "Nothing was measured on a GPU yet" in gpu_page.page({})


# -- A short form of every drill on runs: nothing is lost, nothing is wrong
FEW = {name: 1 for name in ("killed at random", "stopped", "two starters", "NaN")}
FEW |= {"bits of a manifest flipped": 20, "mutated requests": 30}
KIND = "policy in simulation"  # the lightest


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRILLS if name != "killed on Ray"])  # diffusion/rollout kills there
def test_a_short_drill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drills.ROOT)
    monkeypatch.setattr(drills, "KINDS", {KIND: drills.KINDS[KIND]})
    for row in run_drill(name, FEW.get(name)):
        if not row.tries:
            pytest.skip(row.drill)
        assert row.survived == row.tries, row
