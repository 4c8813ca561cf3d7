"""Who may start, resume and write into a run folder, and what a reader finds in it."""

import errno
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from genrl.config import dump, load
from genrl.runtime.folder import run as runs
from genrl.runtime.folder.contents import config_edits
from genrl.runtime.folder.run import Run, json_line, read_metrics, truncate_metrics, write_atomic
from genrl.runtime.loop.process import lock

WRITTEN = """
model: {path: a/b, lora: {rank: 32, alpha: 64}}
prompts: {train: a.txt, eval: b.txt}
rewards: [{name: shapes, weight: 1.0}]
trainer: {algorithm: flow_grpo}
optimizer: {lr: 0.0003}
evaluation: {every: 20}
checkpoint: {every: 20, keep: 3}
trackers: [tensorboard]
iterations: 10
output: runs/x
"""


def configured(*overrides: str) -> str:
    """The whole configuration, as a run writes it."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "x.yaml")).write_text(WRITTEN)
        return dump(load(file, overrides))


CONFIG = configured()


def start(folder: Path) -> Run:
    return runs.start(folder, CONFIG, seed=7, command=["genrl", "train", "x.yaml"])


def test_a_new_run_says_where_it_came_from_and_layout_is_no_edit(tmp_path: Path) -> None:
    run = start(tmp_path / "runs" / "x")
    assert run.config.read_text() == CONFIG
    text, info = run.info.read_text(), json.loads(run.info.read_text())
    assert info["command"] == ["genrl", "train", "x.yaml"] and info["seed"] == 7 and info["processes"] == 1
    assert info["versions"]["torch"] != "-" and info["started"].endswith("+00:00")
    assert info["git_commit"] is None or len(info["git_commit"].rstrip("+")) == 40
    assert str(tmp_path) not in text and f'"{os.uname().nodename}"' not in text
    assert config_edits("{a: 1.0, b: {c: [1, 2]}}", "b:\n  c:\n  - 1\n  - 2\na: 1.0\n") == {}
    assert config_edits("a: null", "b: null") == {"a": "a: null -> (absent)", "b": "b: (absent) -> null"}


def test_a_start_that_failed_before_training_may_be_repeated(tmp_path: Path) -> None:
    start(tmp_path)
    lock(tmp_path).release()
    (tmp_path / ".config.yaml.tmp-123").write_text("killed while wri")
    for name in ("dumps", "heartbeat", "tensorboard"):
        (tmp_path / name).mkdir()
    (tmp_path / "tensorboard" / "events").touch()
    start(tmp_path)
    (tmp_path / "dumps" / "step-000000-loss-rank-0").mkdir()
    with pytest.raises(ValueError, match=r"not empty \(dumps; made by"):
        start(tmp_path)
    shutil.rmtree(tmp_path / "dumps"), shutil.rmtree(tmp_path / "heartbeat"), shutil.rmtree(tmp_path / "tensorboard")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "run.json", "run.lock"]


def test_a_used_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.metrics.write_text(json_line({"step": 1}))
    (tmp_path / ".mine.tmp-5").write_text("of another program")
    made = r"not empty \(metrics.jsonl; made by `genrl train x.yaml`\): it has no checkpoint: delete it.*output="
    with pytest.raises(ValueError, match=made):
        start(tmp_path)
    assert (tmp_path / ".mine.tmp-5").exists()
    (run.checkpoints / "step-000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"genrl resume {tmp_path}"):
        start(tmp_path)


EDITS = [
    ("iterations=20", "iterations: 10 -> 20"),
    ("checkpoint.keep=1", "checkpoint.keep: 3 -> 1"),
    ("evaluation.every=5", "evaluation.every: 20 -> 5"),
    ("trackers=[tensorboard, wandb]", 'trackers: ["tensorboard"] -> ["tensorboard", "wandb"]'),
    ("output=moved", 'output: "runs/x" -> "moved"'),
    ("rewards.0.remote=http://b", 'rewards.0.remote: null -> "http://b"'),
]


def test_edits_that_a_resume_allows_and_refuses_and_keys_newer_than_the_run(tmp_path: Path) -> None:
    run = start(tmp_path)
    for override, shown in EDITS:
        run.config.write_text(CONFIG)
        edited = configured(override)
        assert runs.resume(tmp_path, edited, step=4, command=["genrl", "resume"]) == [shown]
        assert run.config.read_text() == edited
    assert [entry["step"] for entry in json.loads(run.info.read_text())["resumed"]] == [4] * len(EDITS)
    run.config.write_text(CONFIG)
    for override in ("optimizer.lr=0.001", "model.lora.rank=16", "model.lora=null", "rewards.0.weight=0.5", "seed=1"):
        with pytest.raises(ValueError, match=f"another value of .*{override.partition('=')[0]}.*Only iterations, "):
            runs.resume(tmp_path, configured(override), step=1, command=[])
    assert run.config.read_text() == CONFIG
    old = yaml.safe_load(CONFIG)
    del old["idle_iterations"], old["model"]["quantize"], old["rewards"][0]["outage"], old["ema"]
    run.config.write_text(yaml.safe_dump(old))
    with pytest.raises(ValueError, match=r"another value of model\.quantize: model\.quantize: null -> \"int8\""):
        runs.resume(tmp_path, configured("model.quantize=int8"), step=1, command=[])
    assert runs.resume(tmp_path, CONFIG, step=1, command=[]) == []
    assert run.config.read_text() == CONFIG


def test_edits_of_a_vision_language_run(tmp_path: Path) -> None:
    """Training may go by what counts as right, though it is a key of the evaluation; and shards whose weights would be
    rounded stay shards."""

    def resumed(before: list[str], after: list[str]) -> list[str]:
        old, new = (dump(load("configs/vlm/quickstart.yaml", changes)) for changes in (before, after))
        Run(tmp_path).config.write_text(old)
        return runs.resume(tmp_path, new, step=1, command=[])

    with pytest.raises(ValueError, match=r"another value of evaluation\.right_at: .*1\.0 -> 0\.5"):
        resumed([], ["evaluation.right_at=0.5"])
    half = "vlm.dtype=bfloat16"
    with pytest.raises(ValueError, match=r"another value of distributed\.fsdp: weights in shards are float32"):
        resumed([half, "distributed.fsdp=true"], [half])
    assert resumed(["distributed.fsdp=true"], []) == ["distributed.fsdp: true -> false"]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)  # root may write anywhere
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be written to: Read-only file system.*output=FOLDER"):
        lock(tmp_path)


ROWS = [json_line({"step": step}) for step in range(22)]
HALF_A_RECORD = r"run.json cannot be read \(.*delete it to go on without"
DAMAGES: list[tuple[str, str, str]] = [
    *(("run.json", text, HALF_A_RECORD) for text in ('{"command": ["gen', "", "[1]", '{"resumed": 3}')),
    *(("run.json", f'{{"resumed": [], "contents": {held}}}', HALF_A_RECORD) for held in ("null", "[]")),
    ("metrics.jsonl", '{"step": 0, "loss": NaN}\n', "metrics.jsonl:1: not a row of metrics"),
    ("config.yaml", CONFIG[:-4] + "\n}{", "(?s)config.yaml is no .*damaged.*Nothing was changed.*not YAML"),
    ("config.yaml", CONFIG + "group_sise: 4\n", r"(?s)another version.*config\.yaml:\d+: group_sise: unknown key"),
    ("metrics.jsonl", "".join(ROWS), "has no checkpoint left, and it has done 21 iterations; nothing was changed"),
]


@pytest.mark.parametrize(("name", "text", "says"), DAMAGES)
def test_a_damaged_run_stays_as_it_is(tmp_path: Path, name: str, text: str, says: str) -> None:
    run = start(tmp_path)
    run.metrics.write_text("".join(ROWS[:2]))
    (tmp_path / name).write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=says):
        runs.resume(tmp_path, configured("iterations=20"), step=0, command=[])
    with pytest.raises(ValueError, match="is not empty"):
        start(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_run_json_a_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        runs.resume(tmp_path, CONFIG, step=1, command=[])
    run = start(tmp_path)
    run.info.unlink()
    runs.resume(tmp_path, CONFIG, step=3, command=["genrl", "resume"])
    assert "how the run was begun is not known" in caplog.text
    assert [entry["step"] for entry in json.loads(run.info.read_text())["resumed"]] == [3]


def test_resume_cuts_the_rows_after_its_step_and_keeps_bytes(tmp_path: Path) -> None:
    run = start(tmp_path)
    lines = [json_line({"step": step, "loss": step / 3}) for step in range(6)]
    run.metrics.write_text("".join(lines) + '{"loss": 0.1, "st')
    runs.resume(tmp_path, CONFIG, step=3, command=[])
    assert run.metrics.read_text() == "".join(lines[:4])
    run.metrics.write_text(json_line({"step": 0}) + json_line({"step": 1}))
    runs.resume(tmp_path, CONFIG, step=0, command=[])
    assert run.metrics.read_text() == ""  # row 0 is made again
    path = tmp_path / "none" / "metrics.jsonl"
    path.parent.mkdir()
    truncate_metrics(path, 3)
    assert read_metrics(path) == [] and not path.exists()
    text = json_line({"step": 1, "a": 0.1 + 0.2, "b": 1e-17, "c": None, "d": 5})
    path.write_text(text)
    truncate_metrics(path, 1)
    assert path.read_text() == text == '{"a": 0.30000000000000004, "b": 1e-17, "c": null, "d": 5, "step": 1}\n'
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b'{"step": 1}\n{"step\xc3')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a row of metrics"):
        read_metrics(path)


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "file.txt"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"] and path.read_text() == "old"


def test_one_process_per_run(tmp_path: Path) -> None:
    (tmp_path / "heartbeat").mkdir()
    heartbeat = {"ended": False, "phase": "training", "step": 3, "pid": 7, "host": "gone", "time": 0.0}
    (tmp_path / "heartbeat" / "rank-0.json").write_text(json.dumps(heartbeat))
    held = lock(tmp_path)
    with ThreadPoolExecutor(1) as other, pytest.raises(ValueError, match="process 7 on gone, .* 1970-01-01"):
        other.submit(lock, tmp_path).result()
    held.release()
    lock(tmp_path).release()


def test_a_damaged_config_is_seen_by_the_checkpoints_own(tmp_path: Path) -> None:
    """Cut after a key, config.yaml is good YAML of another run."""
    run = start(tmp_path)
    last_checkpoint = run.checkpoints / "step-000003"
    last_checkpoint.mkdir(parents=True)
    (last_checkpoint / "config.yaml").write_text(CONFIG)
    other = configured("optimizer.lr=0.0001")
    run.config.write_text(other)
    with pytest.raises(ValueError, match="with another value of optimizer.lr: .*0.0003 -> 0.0001"):
        runs.resume(tmp_path, other, step=3, command=[], last_checkpoint=last_checkpoint)
    runs.resume(tmp_path, CONFIG, step=3, command=[], last_checkpoint=last_checkpoint)
    assert run.config.read_text() == CONFIG


OTHERS = {
    "a configuration": ({"config.yaml": "mine"}, "no run has made these files"),
    "another program's record": ({"run.json": "{}", "config.yaml": "mine"}, "no run has made these files"),
    "prompts": ({"train_prompts.jsonl": "{}"}, "no run has made these files"),
    "curves of a trainer": ({"tensorboard/events": ""}, "no run has made these files"),
    "a project": ({"README.md": "", "src/x.py": ""}, "no run has made these files"),
    "a run": ({"a/run.json": "{}"}, "it holds other runs .*/a.*choose one of its own.*NAME"),
    "runs in groups": ({"group/b/run.json": "{}", "group/b/config.yaml": ""}, "it holds other runs .*group/b"),
    "a run with a run in it": ({"run.json": "{}", "metrics.jsonl": "", "a/run.json": "{}"}, "it holds other runs"),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_a_folder_with_other_things_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    files, says = OTHERS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=says) as refused:
        start(tmp_path)
    assert "delete" not in str(refused.value)
    assert {f.relative_to(tmp_path).as_posix(): f.read_text() for f in tmp_path.rglob("*") if f.is_file()} == files


def test_a_resume_that_is_refused_later_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.metrics.write_text("".join(json_line({"step": step}) for step in range(4)))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="of another model"), runs.unchanged_where_refused(run, resumes=True):
        runs.resume(tmp_path, configured("iterations=20"), step=2, command=[])
        raise ValueError("of another model")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
