"""Configurations of a policy's run: those that are shipped load, and what cannot work is refused with advice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from genrl.config import ConfigError, check_files, load, load_located
from genrl.vla.config.schema import VLAConfig
from tests.config.schemas import schema_validator

NEW = {"policy": {"new": {}}, "demonstrations": {"expert": 8}, "trainer": {"algorithm": "sft"}}
TRAINED: dict[str, Any] = {"policy": {"path": "some/policy"}, "trainer": {"algorithm": "ppo"}}


def tree(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The sections of a valid file, with some replaced (None: left out)."""
    whole = {"environment": {"name": "minitable"}, **base, **changes}
    return {name: section for name, section in whole.items() if section is not None}


def write(folder: Path, base: dict[str, Any], **changes: Any) -> Path:
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(tree(base, **changes), sort_keys=False))
    return path


def refused(folder: Path, base: dict[str, Any], overrides: list[str] | None = None, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, base, **changes), overrides or [])
    return caught.value


def test_the_schema_tells_the_kinds_apart() -> None:
    validator = schema_validator()
    assert validator.is_valid(tree(NEW)) and validator.is_valid(tree(TRAINED))
    assert not validator.is_valid(tree(TRAINED, model={"path": "org/model"}))
    assert not validator.is_valid(tree(TRAINED, sampler={"kind": "flow_sde", "std": [0.1, 0.2]}))
    assert not validator.is_valid(tree(TRAINED, policy=None))  # of a pipeline then, which has no environment
    asker = {"vlm": {"path": "some/model"}, "task": {"name": "shapes"}, "rewards": [{"name": "exact"}]}
    assert validator.is_valid(asker) and not validator.is_valid({**asker, "sampler": {"kind": "flow_sde"}})


def sections_of(text: str) -> dict[str, Any]:
    """Of a row below: YAML in one line."""
    return yaml.safe_load("{" + text + "}")


CASES = yaml.safe_load((Path(__file__).parents[2] / "fixtures" / "config" / "impossible_policies.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["yaml"])
def test_what_cannot_work_is_refused(case: dict[str, str], tmp_path: Path) -> None:
    """And their neighbours, which name no key, are accepted."""
    base, changes = {"new": NEW, "trained": TRAINED}[case["base"]], sections_of(case["yaml"])
    if "key" not in case:
        assert isinstance(load(write(tmp_path, base, **changes)), VLAConfig)
        return
    (problem,) = refused(tmp_path, base, **changes).problems
    assert problem.path == case["key"] and case["says"] in problem.text


def test_a_file_with_both_is_a_policys(tmp_path: Path) -> None:
    """Only what is out of place in a policy's run is named: not all the keys that the other kind would need."""
    error = refused(tmp_path, TRAINED, model={"path": "org/model"}, rewards=[{"name": "shapes"}])
    assert [problem.path for problem in error.problems] == ["model", "rewards"]
    pipeline = tmp_path / "b.yaml"
    pipeline.write_text("model: {path: org/model}\nprompts: {train: a.txt}\nrewards: [{name: shapes}]\n")
    with pytest.raises(ConfigError) as caught:
        load(pipeline, ["policy.path=a"])
    assert {"model", "prompts", "rewards"} <= {problem.path for problem in caught.value.problems}
    with pytest.raises(ConfigError, match=r"trainer"):
        load(pipeline)  # still a pipeline's, which lacks its trainer


def policy_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


class TestFiles:
    def problems(self, folder: Path, base: dict[str, Any], **changes: Any) -> list[tuple[str, str]]:
        config, origins = load_located(write(folder, base, **changes))
        try:
            check_files(config, origins)
        except ConfigError as error:
            assert all(f"{folder / 'a.yaml'}:" in line for line in str(error).splitlines()[1:])
            return [(problem.path, problem.text) for problem in error.problems]
        return []

    def test_weights_that_cannot_be_loaded(self, tmp_path: Path) -> None:
        folder = policy_folder(tmp_path / "policy", output_features={})
        weights, whole = folder / "model.safetensors", (folder / "model.safetensors").read_bytes()
        for damage, said in (
            (whole[:-4], "model.safetensors is cut: it has"),
            (b"version https://git-lfs.github.com/spec/v1\n", "model.safetensors is a Git LFS pointer"),
            (b"", "model.safetensors is empty"),
            (None, "holds no weights: there is no model.safetensors in it"),
        ):
            weights.unlink() if damage is None else weights.write_bytes(damage)
            result = self.problems(tmp_path, TRAINED, policy={"path": str(folder)}, trackers=[])
            assert [key for key, _ in result] == ["policy.path"] and said in result[0][1]

    def test_a_folder_of_a_policy_without_likelihood(self, tmp_path: Path) -> None:
        path = policy_folder(tmp_path / "good", output_features={}, type="act")
        one = {"policy": {"path": str(path)}, "trackers": []}
        [(key, text)] = self.problems(tmp_path, TRAINED, **one)
        assert key == "trainer.algorithm" and "is of type act: ppo cannot train" in text
        assert "no likelihood; take sft" in text
        [(key, text)] = self.problems(tmp_path, NEW, **one)
        assert key == "sampler.kind" and text.endswith("predicts actions; write regression")
        one["sampler"] = {"kind": "regression"}
        assert self.problems(tmp_path, NEW, **one) == []

    def test_a_folder_is_a_policys_a_runs_or_none(self, tmp_path: Path) -> None:
        for name in ("good", "run/policy"):
            policy_folder(tmp_path / name, output_features={})
        policy_folder(tmp_path / "pipeline", architectures=["x"])
        (tmp_path / "empty").mkdir()
        for name, says in {
            "good": "",
            "run": "",
            "gooood": f"did you mean {tmp_path}/good?",
            "elsewhere/x": "download it first, or train one by sft",
            "empty": "neither a policy's folder nor the run of one",
            "pipeline": "does not describe a policy: it has no output_features",
        }.items():
            named = self.problems(tmp_path, TRAINED, policy={"path": str(tmp_path / name)}, trackers=[])
            assert [key for key, _ in named] == ["policy.path"] * bool(says) and all(says in text for _, text in named)

    def test_a_data_set_that_is_none(self, tmp_path: Path) -> None:
        [(key, text)] = self.problems(tmp_path, NEW, demonstrations={"dataset": str(tmp_path)}, trackers=[])
        assert key == "demonstrations.dataset" and "meta/info.json" in text
        (tmp_path / "meta").mkdir()
        (tmp_path / "meta" / "info.json").write_text("{}")
        assert self.problems(tmp_path, NEW, demonstrations={"dataset": str(tmp_path)}, trackers=[]) == []

    def test_names_that_lead_nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("genrl.vla.simulators.libero.package.missing", lambda assets: [])  # as if all were there
        for changes, key, says in (
            ("environment: {name: minitabel}", "environment.name", "did you mean minitable?"),
            ("environment: {name: robosuite}", "environment.name", "there are fetch, libero, maniskill, metaworld, "),
            ("environment: {name: 'none.py:make'}", "environment.name", "there is no file none.py"),
            ("environment: {name: docs/mine.py}", "environment.name", "docs/mine.py:make"),
            ("environment: {name: libero, tasks: [libero_goal/10]}", "environment.tasks", "no task 'libero_goal/10'"),
            ("environment: {name: libero, args: {protocol: openpy}}", "environment.args", "did you mean openpi?"),
            ("policy: {new: {type: 'none.py:Mine'}}", "policy.new.type", "no file none.py"),
            ("policy: {new: {type: none.py}}", "policy.new.type", "none.py:Name"),
        ):
            [(result, text)] = self.problems(tmp_path, NEW, **sections_of(changes), trackers=[])
            assert result == key and says in text

    def test_code_of_ones_own_is_said_to_run(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("class Mine: ...\ndef make(): ...\n")
        name = f"{tmp_path / 'mine.py'}:"
        saved = str(policy_folder(tmp_path / "saved", output_features={}, type=f"{name}Mine"))
        for base, key, section in (
            (NEW, "policy.new.type", {"policy": {"new": {"type": f"{name}Mine"}}}),
            (TRAINED, "policy.path", {"policy": {"path": saved}}),
            (NEW, "environment.name", {"environment": {"name": f"{name}make"}}),
        ):
            notes = check_files(load(write(tmp_path, base, **section, trackers=[])))
            assert notes == [f"{key}: training runs the code of {tmp_path / 'mine.py'}"]

    def test_packages_that_are_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        changes = {"environment": {"name": "metaworld", "workers": "ray"}, "trackers": ["wandb"]}
        result = dict(self.problems(tmp_path, NEW, **changes))
        assert "pip install 'metaworld" in result["environment.name"]
        assert "pip install 'ray" in result["environment.workers"]
        assert "pip install wandb" in result["trackers.0"]
        path = write(tmp_path, NEW, output=str(tmp_path), trackers=[])
        assert any("is in use" in note for note in check_files(load(path)))
