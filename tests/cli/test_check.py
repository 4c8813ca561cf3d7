"""`genrl check` of one file and of many, and the schema for editors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import MODEL, ROOT, SMALL, run, words


class TestCheck:
    def test_plan_and_memory(self, folder: Path) -> None:
        if not MODEL.is_dir():
            pytest.skip("assets/tiny-t2i is not built")
        text = run("check", "small.yaml")
        for part in ("2 prompts x 2 each", "4 samples x 2 steps", "SD3Transformer2DModel", "optimiser state", "sum"):
            assert part in text

    def test_cards_and_what_to_change(self, folder: Path) -> None:
        """On which cards a run fits, and which keys to change, in their order."""
        if not MODEL.is_dir():
            pytest.skip("assets/tiny-t2i is not built")
        assert re.search(r"12 GB .* yes", run("check", "small.yaml"))
        found = run("check", "small.yaml", "--memory", "0.015GB")
        assert "as it is" in found and "model.gradient_checkpointing=true" in found and "it fits with the" in found
        assert "model.quantize" not in found  # the changes before it are enough
        assert "it does not fit with all of these" in run("check", "small.yaml", "--memory", "0.001 GB")
        assert "write for example 24GB" in run("check", "small.yaml", "--memory", "big", code=2)

    def test_a_hub_id_that_is_not_here_and_every_key_with_its_meaning(self, folder: Path) -> None:
        """Markup in what is said stays text."""
        text = run("check", "small.yaml", "model.path=org/model", "output='[red]'", "--explain")
        assert "memory: not estimated, because org/model is not on this machine" in text and "[red]" in text
        assert "sampling.group_size: 2   (default 8)" in text
        assert "Learning rate (Flow-GRPO and DiffusionNFT" in text and "rewards.0.weight: 1\n" in text
        assert "trainer.beta: 1" in text and "trainer.clip_range" not in text


class TestCheckOfMany:
    """Files and folders in one process: a line for each valid file, all problems of the others, a total."""

    @pytest.fixture
    def files(self, folder: Path) -> Path:
        (folder / "more" / "deep").mkdir(parents=True)
        (folder / "more" / ".hidden").mkdir()
        (folder / "more" / "notes.txt").write_text("no configuration")
        for name in ("more/b.yml", "more/deep/c.yaml", "more/.hidden/d.yaml"):
            (folder / name).write_text(SMALL.replace(str(MODEL), "org/model"))
        return folder

    def test_all_are_reported(self, files: Path) -> None:
        (files / "more" / "a.yaml").write_text("seed: x\nimages: 3\n")
        lines = run("check", "small.yaml", "more", "gone.yaml", "model.path=org/model", code=2).splitlines()
        assert lines[0] == "valid  small.yaml, 2 remarks"
        assert lines[1] == "wrong  more/a.yaml" and "problems in the configuration" in lines[2]
        problems = [line.strip() for line in lines[3:-4]]
        assert any(line.startswith("more/a.yaml:1: seed:") for line in problems)
        assert any(line.startswith("more/a.yaml:2: images:") for line in problems)
        names = [line.split()[1].rstrip(",") for line in lines if line.startswith(("valid", "wrong"))]
        assert names == ["small.yaml", "more/a.yaml", "more/b.yml", "more/deep/c.yaml", "gone.yaml"]
        assert "gone.yaml: no such file" in lines[-2] and lines[-1] == "5 files: 3 valid, 2 wrong"

    def test_a_file_named_twice_is_checked_once(self, files: Path) -> None:
        assert run("check", "more/b.yml", "more").splitlines()[-1] == "2 files: 2 valid, 0 wrong"

    def test_a_file_with_an_equals_sign_is_a_file(self, files: Path) -> None:
        (files / "lr=1.yaml").write_text((files / "more" / "b.yml").read_text())
        lines = run("check", "lr=1.yaml", "more/b.yml", "optimizer.lr=0.1").splitlines()
        assert lines[0].startswith("valid  lr=1.yaml") and lines[-1] == "2 files: 2 valid, 0 wrong"

    def test_changes_are_of_all_files(self, files: Path) -> None:
        text = run("check", "small.yaml", "more", "optimizer.lrr=1", code=2)
        assert text.count("did you mean optimizer.lr?") == 3 and "3 files: 0 valid, 3 wrong" in text

    def test_runs_of_every_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        files = ["configs/flow_grpo.yaml", "configs/vla/flow_sde.yaml", "configs/vlm/poad.yaml"]
        *lines, total = run("check", *files).splitlines()
        assert total == "3 files: 3 valid, 0 wrong" and [line.split()[1].rstrip(",") for line in lines] == files

    def test_a_defect_keeps_its_traceback(self, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("genrl.cli.diffusion.summary", lambda config, ask: int("not a number"))
        with pytest.raises(ValueError, match="invalid literal"):
            run("check", "more")

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["optimizer.lr=1"], "no file or folder is among these arguments"),
            (["small.yaml", "optimizer.lr"], "optimizer.lr: no such file or folder; a change is written key=value"),
            (["small.yaml", "empty"], "empty: no .yaml or .yml file in this folder"),
            (["small.yaml", "more", "--explain"], "give one file: it lists the keys of one configuration"),
        ],
    )
    def test_wrong_use(self, arguments: list[str], says: str, files: Path) -> None:
        (files / "empty").mkdir()
        assert says in words(run("check", *arguments, code=2))


def test_schema_is_json() -> None:
    schema = json.loads(run("config", "schema"))
    assert schema["$defs"]["Config"]["properties"]["optimizer"] and schema["title"] == "genrl configuration"
