"""What counts as the same run, and which configurations are run how."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks import brief_runs, run_entries, same_numbers
from benchmarks.run_in_tree import Outcome
from genrl.config import load
from genrl.runtime.folder.metrics import catalogue

ROOT = Path(__file__).resolve().parents[2]
LAST = "checkpoints/step-000002"
STATE = f"{LAST}/state.json"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal run folders; what differs between equal runs differs in them."""
    for name, seconds in (("there", 1.5), ("here", 2.5)):
        run = tmp_path / name
        for step in (1, 2):
            folder = run / f"checkpoints/step-00000{step}"
            folder.mkdir(parents=True)
            weights = {"net.a": torch.arange(6.0).reshape(2, 3) * step, "net.b": torch.ones(2, dtype=torch.bfloat16)}
            save_file(weights, folder / "weights.safetensors")
            save_file({"state/0/step": torch.tensor(float(step))}, folder / "optimizer.safetensors")
            state: dict[str, Any] = {"optimizer_steps": step, "kept": {}, "unfinished_row": {"timing/train_s": seconds}}
            held = {"$dict": [[0, {"step": {"$tensor": "state/0/step"}}]]}
            state["optimizer"] = {"state": held, "betas": {"$tuple": [0.9]}}
            (folder / "state.json").write_text(json.dumps(state))
            (folder / "manifest.json").write_text(json.dumps({"seconds": seconds}))
        rows = [{"step": step, "loss": 0.5 / (step + 1), "timing/train_s": seconds} for step in range(3)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (run / "run.json").write_text(json.dumps({"command": [name]}))
        (run / "samples").mkdir()
        Image.new("RGB", (4, 4), (10, 20, 30)).save(run / "samples/step-000000.png", compress_level=int(seconds))
        (run / "samples/step-000001.jsonl").write_text('{"answer": "red"}\n')
    return tmp_path / "there", tmp_path / "here"


def compared(runs: tuple[Path, Path]) -> list[str]:
    there, here = (run_entries.read(run) for run in runs)
    return [one.name for one in run_entries.differences(there, here)]


def test_equal_runs_are_equal_whatever_their_times_and_however_their_pictures_are_packed(runs: Any) -> None:
    assert (runs[0] / "samples/step-000000.png").read_bytes() != (runs[1] / "samples/step-000000.png").read_bytes()
    assert compared(runs) == []
    entries = run_entries.read(runs[0])
    assert entries["metrics.jsonl:step-1:loss"] == "0.25"
    assert entries[f"{STATE}:optimizer.betas.0"] == "0.9"
    assert entries[f"{LAST}/weights.safetensors:net.a"].startswith("F32 [2, 3] sum 30 sha256 ")
    assert entries[f"{LAST}/weights.safetensors:net.b"].startswith("BF16 [2] sha256 ")
    assert len(entries) == 3 + 2 * (2 + 1 + 3) + 2


def _one_byte(run: Path) -> None:
    file = run / LAST / "weights.safetensors"
    tensors = load_file(file)
    tensors["net.b"].view(torch.uint8)[0] ^= 1
    save_file(tensors, file)


def _one_pixel(run: Path) -> None:
    with Image.open(run / "samples/step-000000.png") as picture:
        changed = picture.copy()
    changed.putpixel((3, 3), (10, 20, 31))
    changed.save(run / "samples/step-000000.png")


def _edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_one_byte, [f"{LAST}/weights.safetensors:net.b"]),
        (_one_pixel, ["samples/step-000000.png"]),
        (_edit("metrics.jsonl", "0.25", "0.25000000000000006"), ["metrics.jsonl:step-1:loss"]),
        (_edit(STATE, '"optimizer_steps": 2', '"optimizer_steps": 3'), [f"{STATE}:optimizer_steps"]),
        (_edit(STATE, '"kept": {}', '"kept": {"a": {}}'), [f"{STATE}:kept", f"{STATE}:kept.a"]),
        (lambda run: (run / "samples/step-000001.jsonl").unlink(), ["samples/step-000001.jsonl"]),
        (lambda run: (run / "samples/new.wav").write_bytes(b"RIFF"), ["samples/new.wav"]),
        (lambda run: shutil.rmtree(run / "checkpoints/step-000001"), None),
    ],
)  # fmt: skip
def test_what_differs_is_named(runs: Any, change: Callable[[Path], None], names: list[str] | None) -> None:
    change(runs[1])
    result = compared(runs)
    assert result == names if names is not None else len(result) == 6
    assert sorted(compared(runs[::-1])) == sorted(result)
    word, notes = same_numbers.compare(run_entries.read(runs[0]), run_entries.read(runs[1]), {}, [])
    assert word == "DIFFERS" and f"first {result[0]}: there " in notes
    assert f"keys {result[0].rsplit(':', 1)[-1]} 1" in notes


def test_what_may_differ_is_told_and_nothing_else_is_let_through(runs: Any) -> None:
    _edit("metrics.jsonl", "0.25", "0.75")(runs[1])
    there, here = (run_entries.read(run) for run in runs)
    assert same_numbers.compare(there, here, {}, ["los"])[0] == "DIFFERS"
    assert same_numbers.compare(there, here, {}, ["loss"]) == ("equal", "17 entries, but (allowed) loss 1")
    _one_byte(runs[1])
    word, notes = same_numbers.compare(there, run_entries.read(runs[1]), {}, ["loss", "*state.json:*"])
    assert word == "DIFFERS" and notes.startswith("1 of 17 entries")
    shutil.copy(runs[0] / LAST / "weights.safetensors", runs[0] / "checkpoints/step-000001")
    still = run_entries.read(runs[0])
    assert run_entries.trained(there) and "no weight moves" in same_numbers.compare(still, still, {}, [])[1]
    varying = {key for key in catalogue() if run_entries.varies(key)}
    assert varying == {key for key, doc in catalogue().items() if not doc.reproducible}


def test_brief_runs_are_configurations_that_hold() -> None:
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        tree = brief_runs.load(file)
        if brief_runs.left_out(tree, ROOT):
            continue
        changes = brief_runs.overrides(tree, 2)
        config = load(file, [f"{key}={number}" for key, number in changes.items()])
        number = max(2, len(getattr(config, "stages", ())))
        assert config.iterations == config.evaluation.every == number and config.checkpoint.every == 1, file
        assert getattr(config.trainer, "critic_warmup", 0) == 0, file


def test_what_cannot_run_here_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brief_runs, "find_spec", lambda name: None)
    for name, reason in (
        ("quickstart", None),
        ("diffusion/flux1_dev_flow_grpo", "model.path black-forest-labs/FLUX.1-dev is not among the embedded models"),
        ("vla/pi0_libero", "policy.path lerobot/pi0_libero_finetuned is not among the embedded models"),
    ):
        assert brief_runs.left_out(brief_runs.load(ROOT / f"configs/{name}.yaml"), ROOT) == reason
    assert brief_runs.left_out({"environment": {"name": "libero"}}, ROOT) == "the package libero is not installed"
    including = brief_runs.load(ROOT / "configs/diffusion/grpo_guard.yaml")  # beneath which the included files lie
    assert brief_runs.value(including, "trainer.kernel") == "flow_sde"
    assert brief_runs.value(including, "sampling.group_size") == 12
    assert brief_runs.value(including, "trainer.kernel.more") is None


def test_every_third_is_run_by_two_processes_and_a_missing_file_is_told(tmp_path: Path) -> None:
    given = {"iterations": 2, "processes": [1, 2]}
    for name in ("there", "here"):
        shutil.copytree(ROOT / "configs", tmp_path / name / "configs")
        (tmp_path / name / "assets").symlink_to(ROOT / "assets")
    there, here = tmp_path / "there", tmp_path / "here"
    jobs, others = same_numbers.select(there, here, Namespace(only=["*"], rename=[], **given))
    once = [job.config for job in jobs if job.processes == 1]
    assert [job.config for job in jobs if job.processes == 2] == once[::3]
    assert {result.word for result in others} == {"left out"}
    (here / once[0]).rename(here / "configs/new.yaml")
    _, others = same_numbers.select(there, here, Namespace(only=[once[0]], rename=[], **given))
    assert [(result.word, result.job.config) for result in others] == [("MISSING", once[0])]


def test_the_cache_gives_back_what_a_commit_left_and_no_failure(tmp_path: Path) -> None:
    job = same_numbers.Job("configs/a.yaml", "configs/a.yaml", 1, ["iterations=2"])
    cache = same_numbers.Cache(tmp_path, "abc")
    cache.put(job, Outcome({}, 1, "killed", 1.0))
    assert cache.get(job) is None
    outcome = Outcome({"metrics.jsonl:step-1:loss": "0.5"}, 0, "", 1.0)
    cache.put(job, outcome)
    assert cache.get(job) == outcome
    assert same_numbers.Cache(tmp_path, "abd").get(job) is None
    assert cache.get(same_numbers.Job("configs/a.yaml", "configs/a.yaml", 1, ["iterations=3"])) is None
