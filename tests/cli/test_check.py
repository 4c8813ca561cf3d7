"""`genrl check` of one file and of many, and the schema for editors."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from genrl import recipes
from genrl.cli import diffusion
from genrl.cli.sample import lines
from genrl.config import load
from genrl.config.folders import from_hub, hub_errors, read_header
from genrl.diffusion.config.estimate import read_components
from genrl.diffusion.config.schema import Config
from tests.cli.commands import FIXTURES, MODEL, ROOT, SMALL, run, words


class TestCheck:
    def test_plan_memory_cards_and_what_to_change(self, folder: Path) -> None:
        text = run("check", "small.yaml")
        for part in ("2 prompts x 2 each", "4 samples x 2 steps", "SD3Transformer2DModel", "optimiser state", "sum"):
            assert part in text
        assert re.search(r"12 GB .* yes", run("check", "small.yaml"))
        result = run("check", "small.yaml", "--memory", "0.015GB")
        assert "as it is" in result and "model.gradient_checkpointing=true" in result and "it fits with the" in result
        assert "model.quantize" not in result  # the changes before it are enough
        assert "it does not fit with all of these" in run("check", "small.yaml", "--memory", "0.001 GB")
        assert "write for example 24GB" in run("check", "small.yaml", "--memory", "big", code=2)

    @pytest.mark.parametrize(
        ("name", "lacks", "says"),
        [
            ("flux1_kontext_flow_grpo", "edits_train.jsonl: no such file", r"40 GB │ yes"),
            ("sdxl_dpo_offline", "pickapic_eval.txt", r"24 GB │ with model\.lora\.rank=64 model\.dtype=bfloat16"),
            ("geometry3k", "answers.jsonl: no such file", r"LoRA +│ 13 GB +│ 16 GB"),
            ("janus_pro_7b_grpo", "t2i_train.jsonl: no such file", r"LoRA +│ 28.4 GB +│ 40 GB"),
            ("miniwob", "write environment.timeout_s: 60", r"LoRA +│ 51.1 GB +│ 80 GB"),
        ],
    )
    def test_what_a_run_costs_is_said_before_its_data_are_there(
        self, name: str, lacks: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        changes = {"geometry3k": ["task.train=answers.jsonl"], "miniwob": ["environment.timeout_s=null"]}
        text = run("check", str(recipes.find(name).file), *changes.get(name, []), code=2)
        before, lacking, _ = text.partition(lacks)
        assert re.search(says, before) and lacking and "valid" not in text

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

    def test_a_file_named_twice_is_checked_once_and_changes_are_of_all_files(self, files: Path) -> None:
        assert run("check", "more/b.yml", "more").splitlines()[-1] == "2 files: 2 valid, 0 wrong"
        (files / "lr=1.yaml").write_text((files / "more" / "b.yml").read_text())
        lines = run("check", "lr=1.yaml", "more/b.yml", "optimizer.lr=0.1").splitlines()
        assert lines[0].startswith("valid  lr=1.yaml") and lines[-1] == "2 files: 2 valid, 0 wrong"
        text = run("check", "small.yaml", "more", "optimizer.lrr=1", code=2)
        assert text.count("did you mean optimizer.lr?") == 3 and "3 files: 0 valid, 3 wrong" in text

    def test_a_defect_keeps_its_traceback(self, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of one file, too."""
        monkeypatch.setattr("genrl.cli.diffusion.summary", lambda config, **_: int("not a number"))
        for which in ("more", "small.yaml"):
            with pytest.raises(ValueError, match="invalid literal"):
                run("check", which)


# -- `genrl plan`: the tree of a configuration as text, its calls by hand, and no torch
TREE_RPO = {"algorithm": "dynamic_tree_rpo", "tree": {"ways": 8}}


def config(trainer: dict[str, Any], iterations: int = 10, **sampling: Any) -> Config:
    tree = {"model": {"path": "org/model"}, "prompts": {"train": "a.txt"}, "rewards": [{"name": "shapes"}]}
    tree |= {"trainer": {"algorithm": "flow_grpo", **trainer}, "evaluation": {"every": 0}, "iterations": iterations}
    sizes = {"num_inference_steps": 10, "prompts_per_iteration": 4, "guidance_scale": 1.0, **sampling}
    return Config.model_validate(tree | {"sampling": sizes})


def test_trees_of_the_papers() -> None:
    """202, 176, ... 46 calls by place, 177 of 270 on average: TreeGRPO's accounting (arXiv 2512.08153)."""
    tree = {"window": {"size": 3, "schedule": "geometric"}, "tree": {"ways": 3, "at": "window"}}
    assert "\n".join(lines(config(tree, group_size=27))) == (FIXTURES / "tree_grpo.txt").read_text().strip()
    # BranchGRPO, FLUX, 20 steps, splits at 0, 3, 6, 9: 203 calls for 16 leaves, whatever is trained
    branches = {"tree": {"ways": 2, "at": [0, 3, 6, 9], "spread": 4.0}}
    text = "\n".join(lines(config(branches, group_size=16, num_inference_steps=20)))
    assert "1 root, 16 leaves, 219 nodes, 218 edges" in text and "correlation 0.0588" in text
    assert "model calls in sampling: 812, 12.69 per image; independent rollouts: 1,280, ratio 0.634" in text


def test_words() -> None:
    for trainer, says in (
        ({"window": {"size": 2}}, "steps 0, 1 trained, in 12.5% of the iterations (8 shapes)"),
        ({"window": {"size": 2}, "tail_ratio": 0.4}, "the last 4 steps in place of 8 of the schedule's"),
        ({**TREE_RPO, "window": {"size": 2}}, "layer_tuning evaluates the best path"),
        ({"tree": {"ways": 2, "at": [0], "prune": {"width": "best_sibling"}}}, "training calls are at most these"),
        ({"tree": {"ways": 2, "at": [0], "prune": {"depths": [4], "slide_every": 2}}}, "steps 0, 1, 2, 4, 5, 6, 7, "),
        ({"kl_weight": 0.1}, "model calls in training: 576, 18.00 per image; 288 of them with gradient"),
    ):
        text = "\n".join(lines(config(trainer)))
        assert says in text, text
    assert list(lines(config({}, guidance_scale=4.5)))[-1] == "a step with guidance counts as two calls"


def test_the_command_and_the_schema_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert "per prompt: 1 root, 12 leaves" in run("plan", "configs/flow_grpo.yaml", "trainer.tree={ways: 12}")
    wrong = run("plan", "configs/flow_grpo.yaml", "trainer.tree={ways: 5}", code=2)
    assert "12 samples are not whole trees of 5 leaves; use 10 or 15" in wrong
    for kind, what in (("vla/flow_sde", "a policy"), ("vlm/grpo", "a vision-language model")):
        assert f"trains {what}" in words(run("plan", f"configs/{kind}.yaml", code=2))
    schema = json.loads(run("config", "schema"))
    assert schema["$defs"]["Config"]["properties"]["optimizer"] and schema["title"] == "genrl configuration"


# -- How large a model on the hub is, from JSON files and headers of weights, by a client without a network
class Hub:
    """A repository of files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []

    def model_info(self, source: str, *, revision: str | None, timeout: float) -> Any:
        files = sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        return Of(siblings=[Of(rfilename=name) for name in files])

    def hf_hub_download(self, source: str, name: str, *, revision: str | None, local_dir: Path) -> str:
        self.asked.append(name)
        (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(self.folder / name, local_dir / name)

    def parse_safetensors_file_metadata(self, source: str, name: str, *, revision: str | None) -> Any:
        entries = read_header(self.folder / name)
        return Of(tensors={key: Of(shape=list(s), dtype=d, data_offsets=(0, 0)) for key, s, d in entries})


def test_a_pipeline_is_the_one_of_its_folder_and_a_header_alone_is_a_file_that_is_cut(tmp_path: Path) -> None:
    hub = Hub(MODEL)
    result = read_components(from_hub("org/model", None, tmp_path, hub))
    assert result == read_components(MODEL) and sum(part.num_parameters for part in result) > 10**6
    assert "model_index.json" in hub.asked and not [name for name in hub.asked if not name.endswith(".json")]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 200_000
    file = next(tmp_path.rglob("*.safetensors"))
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert json.loads(file.read_bytes()[8:]) and file.stat().st_size == 8 + length


def test_check_asks_it_once_and_estimates(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    hub = Hub(MODEL)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    diffusion._of_hub.cache_clear()
    text = run("check", "small.yaml", "model.path=org/model", "--memory", "24GB")
    diffusion._of_hub.cache_clear()
    assert "SD3Transformer2DModel" in text and "it fits as it is" in text and hub.asked.count("model_index.json") == 1
    assert "not checked: weights and licence of org/model" in text and "memory" not in text.partition("not checked")[2]
    config = load("small.yaml", ["model.path=org/model"])
    assert isinstance(config, Config) and diffusion.components_of(config) == ()  # who lists recipes does not ask


def test_a_hub_that_is_not_reached_is_said(tmp_path: Path) -> None:
    """By the error of any HTTP library that huggingface_hub is made with."""
    of_library = next(kind for kind in HfHubHTTPError.__bases__ if kind is not OSError)

    def fail(*_: Any, **__: Any) -> None:
        raise of_library("no such host\nmore")

    with pytest.raises(OSError, match="does not say how large it is: no such host$"):
        from_hub("org/model", None, tmp_path, Of(model_info=fail))
    assert issubclass(HfHubHTTPError, hub_errors()) and OSError in hub_errors()
