"""The command line as a user meets it: help, errors without tracebacks, and a whole small run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genrl import __version__
from genrl.cli import app as cli

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "tiny-t2i"
COMMANDS = [
    "train",
    "resume",
    "sample",
    "eval",
    "check",
    "plan",
    "export",
    "report",
    "replay",
    "doctor",
    "rewards",
    "score",
    "serve",
    "config schema",
]

SMALL = f"""\
model: {{path: {MODEL}, lora: {{rank: 2}}}}
prompts: {{train: train.txt, eval: eval.txt}}
rewards:
  - name: ./mine.py:brightness
sampling:
  num_inference_steps: 2
  guidance_scale: 1.0
  prompts_per_iteration: 2
  group_size: 2
  batch_size: 2
  pipeline_args: {{max_sequence_length: 2}}
trainer: {{algorithm: diffusion_nft}}
evaluation: {{every: 1, num_prompts: 2, grid_prompts: 2}}
checkpoint: {{every: 1}}
trackers: []
iterations: 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a small configuration, its prompts and its reward."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "GENRL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "train.txt").write_text("a red circle\na blue star\nthree stars\n")
    (tmp_path / "eval.txt").write_text("a green square\ntwo circles\n")
    (tmp_path / "mine.py").write_text("def brightness(images):\n    return images.mean(dim=(1, 2, 3))\n")
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    """What the command prints on both streams; its exit code must be `code`."""
    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_has_an_example(self, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "120")
        text = run(*command.split(), "--help")
        assert f"genrl {command}" in text.split("Example", 1)[1]

    def test_examples_use_options_that_exist(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "300")
        for command in COMMANDS:
            text = run(*command.split(), "--help")
            example = text.split("Example", 1)[1].splitlines()[0].split("genrl ", 1)[1]
            for word in example.split():
                assert not word.startswith("--") or word in text.split("Options", 1)[1], (command, word)

    def test_all_commands_are_listed(self) -> None:
        text = run("--help")
        assert all(command.split()[0] in text for command in COMMANDS)

    def test_version(self) -> None:
        assert run("--version") == f"genrl {__version__}\n"

    def test_no_arguments_shows_help(self) -> None:
        assert "Usage" in run(code=2)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["check", "configs/quickstart.yaml"], None),  # the model may not be built yet
        (["check", "configs/diffusion/sdxl_flow_grpo.yaml", "--explain"], 0),
        (["plan", "configs/flow_grpo.yaml", "trainer.tree={ways: 12}"], 0),
        (["config", "schema"], 0),
        (["rewards"], 0),
        (["check", "configs/quickstart.yaml", "optimizer.lrr=1"], 2),
        (["train", "configs/quickstart.yaml", "optimizer.lrr=1"], 2),
    ],
)
def test_without_torch(arguments: list[str], code: int | None) -> None:
    """In a fresh interpreter, so that what is imported is seen."""
    program = (
        "import sys\nfrom genrl import cli\nsys.argv[1:] = " + repr(arguments) + "\n"
        "try:\n    cli.main()\nfinally:\n"
        "    heavy = {'torch', 'diffusers', 'transformers', 'accelerate', 'peft', 'numpy', 'datasets', 'PIL'}\n"
        "    print('HEAVY', sorted(heavy & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert code is None or done.returncode == code, done.stderr
    assert done.stdout.endswith("HEAVY []\n"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_help_does_not_read_configurations() -> None:
    program = (
        "import sys\nfrom genrl import cli\nprint(sorted({'pydantic', 'yaml', 'genrl.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class TestErrors:
    def test_clean_text_and_exit_code(self, folder: Path) -> None:
        text = run("check", "small.yaml", "optimizer.lrr=1", "seed=x", code=2)
        assert "2 problems in the configuration; nothing was loaded" in text
        assert "did you mean optimizer.lr?" in text and "Traceback" not in text

    def test_traceback_on_demand(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GENRL_DEBUG", "1")
        with pytest.raises(ValueError, match="did you mean optimizer.lr"):
            run("check", "small.yaml", "optimizer.lrr=1")

    def test_defects_keep_their_traceback(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("genrl.cli.tables.print_check", lambda *_: int("not a number"))
        with pytest.raises(ValueError, match="invalid literal"):
            run("check", "small.yaml")

    def test_no_terminal_codes_from_files(self, folder: Path) -> None:
        (folder / "small.yaml").write_text(SMALL + '"\\e[31mevil": 1\n')
        text = run("check", "small.yaml", code=2)
        assert "\x1b" not in text and "\\x1b[31mevil" in text

    def test_dirty_prompts(self, folder: Path) -> None:
        (folder / "train.txt").write_bytes(b"fine\n\x1b[2J\n")
        text = run("check", "small.yaml", code=2)
        assert "small.yaml:2: prompts.train: train.txt: 1 of 2 rows are dirty" in text and "\x1b" not in text

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["resume", "absent"], "is not a run folder"),
            (["export", "absent", "--out", "x"], "is not a run folder"),
            (["report", "absent"], "is not a run folder"),
            (["replay", "absent"], "absent is no dump: it has no dump.json"),
            (["resume", "runs"], "runs is not a run folder: it has no config.yaml; runs in runs: runs/one, runs/two"),
            (
                ["resume", "runs/tow"],
                "runs/tow is not a run folder: it has no config.yaml; runs in runs: runs/one, runs",
            ),
            (["report", "runs/one/config.yaml"], "runs/one/config.yaml is a file: give the run folder, runs/one"),
            (["train", "small.yaml", "--resume", "eval.txt"], "eval.txt is not a run folder"),
            (["export", "runs/one", "--out", "eval.txt"], "is a file"),
            (["sample", "org/model", "--prompt", "a", "--out", "eval.txt"], "is a file"),
            (["sample", "org/model", "--prompt", "a", "--dtype", "float8"], "is not one of 'float32', 'bfloat16', 'fl"),
            (["eval", "org/model", "--prompts", "eval.txt", "--reward", "ocr", "--out", "."], "is a directory"),
            (["eval", "org/model", "--prompts", "eval.txt", "--reward", "shapse"], "Did you mean 'shapes'?"),
            (["sample", "runs/tow", "--prompt", "a"], "runs/tow: no such run or folder; did you mean runs/two?"),
            (["eval", "./runs/xyz"], "no such run or folder; runs in runs: runs/one, runs/two"),
            (["sample", "runs/one", "--prompt", "a"], "runs/one holds no checkpoint yet"),
            (["export", "runs/one", "--out", "x"], "runs/one has no checkpoint; checkpoints there: none"),
            (["sample", "org/model"], "--prompt"),
            (["sample", "org/model", "num_frames", "--prompt", "a"], "is not key=value"),
            (["sample", "org/model", "x=[", "--prompt", "a"], "is not YAML"),
            (["eval", "org/model", "--reward", "shapes"], "--prompts"),
            (["eval", "org/model", "--prompts", "eval.txt"], "--reward"),
            (["train", "small.yaml", "--nproc", "3"], "start 2 processes"),
            (["train", "small.yaml", "--nproc", "0"], "--nproc"),
            (["train", "absent.yaml"], "no such file"),
            (["check"], "Missing argument"),
            (["tarin", "small.yaml"], "train"),
        ],
    )
    def test_wrong_use(self, arguments: list[str], says: str, folder: Path) -> None:
        for name in ("one", "two"):
            (folder / "runs" / name).mkdir(parents=True)
            (folder / "runs" / name / "config.yaml").write_text(SMALL)
        assert says in " ".join(run(*arguments, code=2).replace("│", " ").split())


class TestCheck:
    def test_plan_and_memory(self, folder: Path) -> None:
        if not MODEL.is_dir():
            pytest.skip("assets/tiny-t2i is not built")
        text = run("check", "small.yaml")
        for part in ("2 prompts x 2 each", "4 samples x 2 steps", "SD3Transformer2DModel", "AdamW", "sum"):
            assert part in text

    def test_hub_id_that_is_not_here(self, folder: Path) -> None:
        text = run("check", "small.yaml", "model.path=org/model")
        assert "memory: not estimated, because org/model is not on this machine" in text

    def test_explain_lists_every_key_with_its_meaning(self, folder: Path) -> None:
        text = run("check", "small.yaml", "model.path=org/model", "--explain")
        assert "sampling.group_size: 2   (default 8)" in text
        assert "Learning rate (Flow-GRPO and DiffusionNFT" in text and "rewards.0.weight: 1\n" in text
        assert "trainer.beta: 1" in text and "trainer.clip_range" not in text

    def test_markup_in_prompts_is_text(self, folder: Path) -> None:
        assert "[red]" in run("check", "small.yaml", "model.path=org/model", "output='[red]'", "--explain")


def test_schema_is_json() -> None:
    schema = json.loads(run("config", "schema"))
    assert schema["$defs"]["Config"]["properties"]["optimizer"] and schema["title"] == "genrl configuration"


def test_rewards_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run("rewards")
    assert all(name in text for name in ("shapes", "ocr", "clipscore", "pickscore", "tag_format"))


def test_reward_names_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    import rewards

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("rewards.listing", lambda: [rewards.Listed("a" * 70, "built-in", "images", "0 to 1", "?")])
    monkeypatch.setattr("rewards.scorers.texts.completions.listing_texts", list)
    text = run("rewards")
    assert "…" not in text and sum(line.split("│")[1].count("a") for line in text.splitlines() if "│" in line) == 70


class TestLaunch:
    """`--nproc`: torchrun of the same command, without the option."""

    @pytest.fixture
    def executed(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        commands: list[str] = []

        class Replaced(Exception):
            pass

        def execv(path: str, arguments: list[str]) -> None:
            commands.extend(arguments)
            raise Replaced

        monkeypatch.setattr(cli.os, "execv", execv)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        self.replaced = Replaced
        return commands

    @pytest.mark.parametrize("option", [["--nproc", "2"], ["--nproc=2"]])
    def test_command(
        self, option: list[str], executed: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = ["train", "small.yaml", *option, "model.path=org/model", "seed=2"]
        monkeypatch.setattr(sys, "argv", ["genrl", *arguments])
        with pytest.raises(self.replaced):
            run(*arguments)
        assert executed[1:] == [
            *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "genrl"),
            *("train", "small.yaml", "model.path=org/model", "seed=2"),
        ]
        assert int(os.environ["OMP_NUM_THREADS"]) >= 1

    def test_inside_a_launcher_it_just_runs(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        assert "already is one of several" in " ".join(
            run("train", "small.yaml", "model.path=org/model", "--nproc", "2", code=2).split()
        )


@pytest.mark.slow
def test_doctor(folder: Path) -> None:
    found = json.loads(run("doctor", "--json"))
    assert found["packages"]["torch"] and found["torch"]["device"] in ("cpu", "cuda", "mps")
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


@pytest.mark.slow
def test_a_whole_run(folder: Path) -> None:
    """train, resume, sample, eval, report, export on the embedded model, in one process."""
    if not MODEL.is_dir():
        pytest.skip("assets/tiny-t2i is not built")
    from genrl.config import load
    from genrl.config.estimate import plan, read_components

    run("train", "small.yaml", "iterations=2")
    first = folder / "runs" / "small"
    (folder / "one.txt").write_text("a blue star")
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    expected = plan(load("small.yaml"), read_components(MODEL))
    # The second iteration: in the first the pipeline is probed, and the old policy still is the present one.
    assert rows[-1]["model_calls/sample"] == expected.sample_calls
    assert rows[-1]["model_calls/train"] == expected.train_calls
    assert load(first / "config.yaml") == load("small.yaml", ["iterations=2"])

    assert "is not empty" in run("train", "small.yaml", code=2)
    more = "runs/small has done all of its 2 iterations; for more of them: genrl resume runs/small iterations=102"
    assert more in run("resume", "runs/small")
    assert "has done all" not in run("resume", "runs/small", "iterations=3")
    assert load(first / "config.yaml").iterations == 3

    assert "2 pictures" in run("sample", "runs/small", "--prompt", "a star", "--prompts", "one.txt", "--out", "drawn")
    assert {path.name for path in (folder / "drawn").iterdir()} >= {"00000.png", "00001.png", "grid.png"}

    # The newest checkpoint's adapter, not that of an earlier end of the run; nor of a save that was cut short.
    shutil.copytree(first / "checkpoints" / "step-000003", first / "checkpoints" / "step-000004.tmp-1")
    text = run("eval", "runs/small", "--out", "new/scores.json", "--num-prompts", "1", "--batch-size", "1")
    scores = json.loads((folder / "new" / "scores.json").read_text())
    assert "eval/brightness_mean" in text and scores["num_prompts"] == 1
    assert scores["lora"] == "runs/small/checkpoints/step-000003/lora"

    assert "report.html" in run("report", "runs/small")
    run("export", "runs/small", "--out", "lora")
    assert (folder / "lora" / "README.md").is_file() and list((folder / "lora").glob("*.safetensors"))


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    """`genrl train --nproc 2` as it is typed."""
    if not MODEL.is_dir():
        pytest.skip("assets/tiny-t2i is not built")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "genrl", "train", "small.yaml", "--nproc", "2", "output=two"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((folder / "two" / "run.json").read_text())["processes"] == 2
