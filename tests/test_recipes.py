"""What is written into a folder of one's own holds there; and a wheel carries it."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from genrl import recipes
from genrl.cli.app import app
from genrl.cli.arguments import at_hand
from genrl.config import ConfigError, check_files, load, load_located
from genrl.config.loading import load_given

PUBLISHED = ("sd35_medium_flow_grpo", "flux1_kontext_flow_grpo", "qwen2_5_vl_7b_fsdp")


@pytest.mark.parametrize("name", ["sd15_ddpo", "flow_grpo_fast", "prompt_rl", "vlm/grpo", "qwen_image_edit_talk2move"])
def test_a_written_recipe_is_the_one_in_the_clone(name: str, tmp_path: Path, root: Path, monkeypatch: Any) -> None:
    """Its keys are equal but for where files lie, and each file that it names is in the folder."""
    recipe = recipes.find(name)
    monkeypatch.chdir(root)
    there = load(recipe.file).model_dump(mode="json")
    written = recipes.write(recipe, tmp_path)
    monkeypatch.chdir(tmp_path)
    here = load(written[0].name).model_dump(mode="json")
    assert written[0] == tmp_path / recipe.written
    for key, value in texts(here):
        if ".py:" in value or value.startswith(("prompts/", "assets/")):
            assert Path(value.partition(".py:")[0] + ".py" * (".py:" in value)).exists(), (key, value)
    where = re.compile(r"assets/(?=prompts/)|configs/[\w/]*/(?=\w+\.py:)")
    moved = {(key, where.sub("", value)) for key, value in texts(there) if key != ".output"}
    assert {(key, value) for key, value in texts(here) if key != ".output"} == moved
    assert recipes.write(recipe, tmp_path) == written, "the same content again is no error"
    written[0].write_text("iterations: 3\n")
    with pytest.raises(ValueError, match="is there already, with other content"):
        recipes.write(recipe, tmp_path)


def texts(tree: object, path: str = "") -> list[tuple[str, str]]:
    if isinstance(tree, str):
        return [(path, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [result for key, value in items for result in texts(value, f"{path}.{key}")]


def test_every_recipe_has_a_name_of_its_own_and_a_wrong_one_is_refused() -> None:
    known = recipes.recipes()
    assert len({recipe.written for recipe in known}) == len(known) > 150
    for name in ("quickstart", "configs/quickstart.yaml"):
        assert recipes.find(name).file.relative_to(recipes.root()) == Path("configs/quickstart.yaml")
    with pytest.raises(ValueError, match="did you mean .*sd15_ddpo"):
        recipes.find("sd15_dpo")


def test_paths_are_looked_up_beside_the_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is looked through first; an override means it alone."""
    folder = tmp_path / "mine"
    recipes.write(recipes.find("sd15_ddpo"), folder)
    monkeypatch.chdir(tmp_path)
    config = load("mine/sd15_ddpo.yaml")
    assert config.prompts.train == "mine/prompts/animals_train.txt"
    assert config.model.path == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/animals_train.txt").write_text("a cat\n")
    config = load("mine/sd15_ddpo.yaml", ["prompts.eval=prompts/animals_eval.txt"])
    assert config.prompts.train == "prompts/animals_train.txt"
    assert config.prompts.eval == "prompts/animals_eval.txt"
    (folder / "prompts/animals_eval.txt").unlink()
    for changes, said in (
        ([], rf"prompts/animals_eval\.txt: no such file.*\(looked in {tmp_path} and in {folder}\)"),
        (["rewards=[{name: own.py:reward}]"], rf"'own\.py' does not exist \(looked from {tmp_path}\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_files(*load_located("mine/sd15_ddpo.yaml", changes))


def test_what_comes_with_genrl_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pages write it, in a file, a change, a script or an argument; the current folder comes first."""
    monkeypatch.chdir(tmp_path)
    assets = recipes.root() / "assets"
    rest = "rewards: [{name: shapes}]\ntrainer: {algorithm: awm}\nevaluation: {every: 0}\n"
    (tmp_path / "mine.yaml").write_text("model: {path: assets/tiny-shapes}\n" + rest)
    config = load("mine.yaml", ["prompts.train=assets/prompts/things_train.txt"])
    assert config.model.path == str(assets / "tiny-shapes")
    assert config.prompts.train == str(assets / "prompts/things_train.txt")
    given, _ = load_given("mine.yaml", {"prompts": {"train": "assets/prompts/things_eval.txt"}}, "genrl.train")
    assert given.prompts.train == str(assets / "prompts/things_eval.txt")
    said = CliRunner().invoke(app, ["check", "configs/quickstart.yaml", "output=runs/x"])
    assert "valid" in said.output, said.output
    said = CliRunner().invoke(app, ["init", "sd15_ddpo", "--to", "with spaces"])
    assert "genrl check 'with spaces/sd15_ddpo.yaml', then genrl train 'with spaces/sd15_ddpo.yaml'" in said.output
    assert at_hand("assets/tiny-shapes") == str(assets / "tiny-shapes") and at_hand("assets/none") == "assets/none"
    (tmp_path / "assets/prompts").mkdir(parents=True)
    (tmp_path / "assets/prompts/things_train.txt").write_text("a red circle\n")
    assert load("mine.yaml", ["prompts.train=assets/prompts/things_train.txt"]).prompts.train.startswith("assets/")
    assert at_hand("assets/prompts/things_train.txt") == "assets/prompts/things_train.txt"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked. Built of a copy, so that no build folder is left in the clone."""
    root = Path(__file__).parents[1]
    copy, made, site = (tmp_path_factory.mktemp(name) for name in ("clone", "wheel", "site"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    for name in ("genrl", "rewards", "configs", "assets"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", made, copy]
    subprocess.run(build, check=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    with zipfile.ZipFile(next(made.glob("*.whl"))) as archive:
        archive.extractall(site)
    return site


@pytest.mark.slow
def test_a_wheel_holds_what_its_commands_name(wheel: Path, tmp_path: Path) -> None:
    def genrl(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(wheel), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "genrl", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = genrl("init")
    for name in PUBLISHED:
        assert name in listed
        for own in re.findall(r"prompts/\w+\.jsonl(?=.*; the file says)", genrl("init", name)):
            (tmp_path / own).parent.mkdir(exist_ok=True)
            (tmp_path / own).write_text(json.dumps({"prompt": f"make it {own}", "source_image": "a.png"}) + "\n")
            Image.new("RGB", (64, 64), "red").save((tmp_path / own).with_name("a.png"))
        assert "valid" in genrl("check", f"{name}.yaml")
    genrl("init", "vlm/quickstart")
    assert "valid" in genrl("check", "vlm_quickstart.yaml")
    small = ["sampling.group_size=4", "sampling.batch_size=8", "economy.keep=2", "evaluation.every=0"]
    assert "valid" in genrl("check", "configs/flow_grpo.yaml")
    genrl("demo", "iterations=1", *small, "output=runs/demo")
    assert (tmp_path / "runs/demo/lora").is_dir()
    assert str(wheel) in (tmp_path / "runs/demo/config.yaml").read_text(), "the embedded model is the wheel's"
