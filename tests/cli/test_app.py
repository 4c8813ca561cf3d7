"""The command line as a user meets it: help, start without torch, and errors without tracebacks."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

from genrl import __version__, recipes
from tests.cli.commands import ROOT, SMALL, run, words, wrong_uses

COMMANDS = ["demo", "init", "train", "resume", "sample", "collect", "eval", "compare", "check", "plan", "export"]
COMMANDS += ["report", "watch", "replay", "doctor", "rewards", "score", "serve", "config schema"]


class TestHelp:
    def test_every_command_has_an_example_with_options_that_exist(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "300")
        listed = run("--help")
        written = {recipe.written for recipe in recipes.recipes()}
        for command in COMMANDS:
            text = run(*command.split(), "--help")
            example = text.split("Example", 1)[1].splitlines()[0]
            assert f"genrl {command}" in example and command.split()[0] in listed
            for name in re.findall(r"[\w/.]+\.yaml|docs/\S+|assets/[\w-]+", text):
                assert name in {*written, "mine.yaml", "org/name/config.yaml", "assets/tiny-vla", "assets/tiny-vlm"}
            for word in example.split("genrl ", 1)[1].split():
                assert not word.startswith("--") or word in text.split("Options", 1)[1], (command, word)
        assert run("--version") == f"genrl {__version__}\n"
        assert "Usage" in run(code=2)


HEAVY = ["torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "datasets", "PIL"]
COMPILERS = ["torch._dynamo", "torchvision", "triton", "diffusers", "transformers", "peft", "datasets", "wandb"]
VLM, VLA = ["genrl.vlm.config.schema", "genrl.vlm"], ["genrl.vla.config.schema", "genrl.vla"]
LIGHT: list[tuple[list[str], int | None, list[str]]] = [
    (["--help"], 0, HEAVY),
    (["train", "--help"], 0, HEAVY),
    (["check", "configs/quickstart.yaml"], None, [*HEAVY, *VLM, *VLA, "httpx"]),  # the model may not be built yet
    (["check", "configs/diffusion/sdxl_flow_grpo.yaml", "--explain"], 0, HEAVY),
    (["check", "configs/diffusion/ddpo.yaml", "configs/flow_grpo.yaml", "optimizer.lrr=1"], 2, HEAVY),
    (["check", "configs/vlm/grpo.yaml"], 0, [*HEAVY, *VLA]),
    (["check", "configs/vla/flow_sde.yaml"], None, [*HEAVY, *VLM]),
    (["plan", "configs/flow_grpo.yaml", "trainer.tree={ways: 12}"], 0, HEAVY),
    (["config", "schema"], 0, HEAVY),
    (["rewards"], 0, HEAVY),
    (["train", "configs/quickstart.yaml", "optimizer.lrr=1"], 2, HEAVY),
    (["doctor"], None, COMPILERS),
]
"""Arguments, exit code (None: any), and what they do not import: torch; schemas of other kinds of runs, which were half
of what `check` costs; torch's compiler, which was half of `doctor`."""
IMPORTS = """
import json, os, sys
from genrl import cli
assert not {"pydantic", "yaml", "genrl.config"} & set(sys.modules)  # for --help
for number, (arguments, code, unneeded) in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if not child:
        sys.argv[1:], ended = arguments, 0
        try:
            cli.main()
        except SystemExit as end:
            ended = end.code
        finally:
            print(f"\\nENDED {number}", ended, sorted(set(unneeded) & set(sys.modules)), flush=True)
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each command is run in a fork")
def test_commands_import_no_more_than_they_need() -> None:
    """In a fresh interpreter and its forks, so that what is imported is seen."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, input=json.dumps(LIGHT), cwd=ROOT, capture_output=True, text=True)
    ended = re.findall(r"^ENDED (\d+) (\S+) (.*)$", done.stdout, re.MULTILINE)
    assert [int(number) for number, _, _ in ended] == list(range(len(LIGHT))), done.stderr
    for (arguments, code, _), (_, result, seen) in zip(LIGHT, ended, strict=True):
        assert seen == "[]" and (code is None or result == str(code)), (arguments, result, seen)
    assert "Traceback" not in done.stderr


class TestErrors:
    def test_clean_text_and_a_traceback_on_demand(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = run("check", "small.yaml", "optimizer.lrr=1", "seed=x", code=2)
        assert "2 problems in the configuration; nothing was loaded" in text
        assert "did you mean optimizer.lr?" in text and "Traceback" not in text
        (folder / "small.yaml").write_text(SMALL + '"\\e[31mevil": 1\n')
        text = run("check", "small.yaml", code=2)
        assert "\x1b" not in text and "\\x1b[31mevil" in text
        (folder / "small.yaml").write_text(SMALL)
        (folder / "train.txt").write_bytes(b"fine\n\x1b[2J\n")
        text = run("check", "small.yaml", code=2)
        assert "small.yaml:2: prompts.train: train.txt: 1 of 2 rows are dirty" in text and "\x1b" not in text
        monkeypatch.setenv("GENRL_DEBUG", "1")
        with pytest.raises(ValueError, match="did you mean optimizer.lr"):
            run("check", "small.yaml", "optimizer.lrr=1")

    def test_a_full_disk_is_no_defect(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for error, says in (
            (OSError(errno.ENOSPC, "", "a.png"), "nothing can be written to a.png: No space left on device. Make room"),
            (SafetensorError("I/O error: File too large (os error 27)"), "nothing can be written: File too large"),
            (OSError(errno.EROFS, "", "a.png"), "Read-only file system"),
            (FileExistsError(errno.EEXIST, "", "x.txt"), "x.txt: File exists; name another file or folder"),
        ):
            monkeypatch.setattr("genrl.cli.diffusion.summary", Mock(side_effect=error))
            text = run("check", "small.yaml", code=1)
            assert says in text and "Traceback" not in text
        absent = Mock(side_effect=FileNotFoundError(errno.ENOENT, "", "/absent/file"))
        monkeypatch.setattr("genrl.cli.diffusion.summary", absent)
        with pytest.raises(FileNotFoundError):
            run("check", "small.yaml")

    @wrong_uses("app")
    def test_wrong_use(self, line: str, says: str, folder: Path) -> None:
        for name in ("one", "two"):
            (folder / "runs" / name).mkdir(parents=True)
            (folder / "runs" / name / "config.yaml").write_text(SMALL)
        for name in ("empty", "more"):
            (folder / name).mkdir()
        (folder / "more" / "a.yaml").write_text(SMALL)
        assert says in words(run(*line.split(), code=2))
