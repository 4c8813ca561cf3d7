"""The command line as a user meets it: help, start without torch, and errors without tracebacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from genrl import __version__
from tests.cli.commands import ROOT, SMALL, run

COMMANDS = [
    "train",
    "resume",
    "sample",
    "collect",
    "eval",
    "compare",
    "check",
    "plan",
    "export",
    "report",
    "watch",
    "replay",
    "doctor",
    "rewards",
    "score",
    "serve",
    "config schema",
]


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
        (["check", "configs/diffusion", "configs/flow_grpo.yaml", "optimizer.lrr=1"], 2),
        (["check", "configs/vlm/grpo.yaml"], 0),
        (["check", "configs/vla/flow_sde.yaml"], None),
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


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (
            ["check", "configs/quickstart.yaml"],
            ["genrl.config.vlm", "genrl.config.vla", "genrl.vlm", "genrl.vla", "httpx"],
        ),
        (["check", "configs/vlm/grpo.yaml"], ["genrl.config.vla", "genrl.vla"]),
        (["check", "configs/vla/flow_sde.yaml"], ["genrl.config.vlm", "genrl.vlm"]),
        (
            ["doctor"],
            ["torch._dynamo", "torchvision", "triton", "diffusers", "transformers", "peft", "datasets", "wandb"],
        ),
    ],
)
def test_what_is_only_named_is_not_imported(arguments: list[str], unneeded: list[str]) -> None:
    """Schemas of other kinds of runs were half of what `check` costs, torch's compiler half of `doctor`."""
    program = (
        "import sys\nfrom genrl import cli\nsys.argv[1:] = " + repr(arguments) + "\n"
        "try:\n    cli.main()\nfinally:\n    print('SEEN', sorted(set(" + repr(unneeded) + ") & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("SEEN []\n"), done.stdout + done.stderr


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
        monkeypatch.setattr("genrl.cli.diffusion.summary", lambda config: int("not a number"))
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
            (["compare"], "give two models, A and B, or --read votes.json"),
            (["compare", "runs/one", "--prompts", "eval.txt"], "give two models, A and B"),
            (["compare", "org/model", "runs/tow"], "runs/tow: no such run or folder; did you mean runs/two?"),
            (["compare", "runs/one", "org/model", "--key", "small.yaml"], "--key is not for making a page: it reads"),
            (["compare", "runs/one", "--read", "eval.txt"], "A is not for --read: leave it out"),
            (["compare", "--read", "absent.json"], "absent.json cannot be read: No such file"),
            (["compare", "--read", "eval.txt"], "eval.txt is not JSON"),
            (["train", "small.yaml", "--nproc", "3"], "micro-batches for 2 only"),
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
