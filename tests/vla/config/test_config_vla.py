"""Configurations of a policy's run: those that are shipped load, and what cannot work is refused with advice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file

from genrl.config import ConfigError, check_files, dump, load, load_located
from genrl.vla.config import schema as sections
from genrl.vla.config.schema import VLAConfig
from genrl.vla.methods.ppo import settings as methods
from tests.config.schemas import schema_validator

ROOT = Path(__file__).resolve().parents[3]
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


def only(error: ConfigError) -> tuple[str, str]:
    """The key and the text of its one problem."""
    assert len(error.problems) == 1, str(error)
    return error.problems[0].path, error.problems[0].text


class TestShipped:
    def test_the_schema_tells_the_kinds_apart(self) -> None:
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


def ppo(settings: str, *more: str) -> str:
    return ", ".join([f"trainer: {{algorithm: ppo, {settings}}}", *more])


def new(settings: str, *more: str) -> str:
    return ", ".join([f"policy: {{new: {{{settings}}}}}", *more])


def flow(settings: str) -> str:
    return f"sampler: {{kind: flow_sde, {settings}}}"


class TestDefaults:
    def test_python_and_yaml_are_one(self, tmp_path: Path) -> None:
        config = load(write(tmp_path, TRAINED))
        made = VLAConfig(
            policy=sections.Policy(path="some/policy"),
            environment=sections.Environment(name="minitable"),
            trainer=methods.PPO(),
            output="runs/a",
        )
        assert config == made and config.sampler == sections.FlowSDE()

    def test_the_encoder_of_a_loaded_policy_is_frozen(self) -> None:
        """Of a new one there is nothing yet that would be worth keeping."""
        asked = ({"path": "a"}, {"path": "a", "freeze": "nothing"}, {"new": {}})
        assert [sections.Policy.model_validate(policy).frozen for policy in asked] == [True, False, False]

    def test_every_rule_is_applied_in_python_too(self) -> None:
        with pytest.raises(ValidationError, match="write one of them"):
            VLAConfig.model_validate(tree(NEW, policy={}))
        VLAConfig.model_validate(tree(NEW))

    @pytest.mark.parametrize("kind", ["flow_sde", "flow_cps", "flow_noise", "reinflow", "diffusion"])
    def test_every_kind_of_sampler_by_its_name_alone(self, kind: str, tmp_path: Path) -> None:
        config = load(write(tmp_path, TRAINED, sampler={"kind": kind}))
        assert isinstance(config, VLAConfig) and config.sampler.kind == kind
        (tmp_path / "b.yaml").write_text(dump(config))
        assert load(tmp_path / "b.yaml").sampler == config.sampler  # type: ignore[union-attr]


GROUPS = "environment: {name: minitable, num_envs: 16, group_size: 4}"
RULES: list[tuple[dict[str, Any], str, str, str]] = [
    # a valid base, the sections that are changed, keys of the message, part of its text
    (TRAINED, "policy: {}", "policy.path (default), policy.new (default)", "write one of them"),
    (NEW, "policy: {new: {}, path: a}", "policy.path, policy.new", "write one of them"),
    (TRAINED, "policy: {new: {}}", "policy.new", "train it by sft and give its folder"),
    (TRAINED, "policy: {new: {}}, trainer: {algorithm: grpo}, " + GROUPS, "policy.new", "succeeds now and then"),
    (NEW, "demonstrations: null", "demonstrations (default)", "sft imitates"),
    (NEW, "demonstrations: {}", "demonstrations", "sft imitates"),
    (NEW, "demonstrations: {expert: 3, dataset: a}", "demonstrations", "and not both"),
    (TRAINED, GROUPS.replace("16", "10"), "environment.num_envs, environment.group_size", "a multiple"),
    (TRAINED, "trainer: {algorithm: grpo}", "environment.group_size (default)", "write 2 or more (8 is usual)"),
    (TRAINED, ppo("success_filter: [0.9, 0.1]", GROUPS), "trainer.success_filter", "found [0.9, 0.1]"),
    (
        TRAINED,
        ppo("success_filter: [0.1, 0.9]"),
        "trainer.success_filter, environment.group_size (default)",
        "2 or more",
    ),
    (
        *(TRAINED, ppo("success_filter: [0.1, 0.9], episodes: all", GROUPS)),
        *("trainer.success_filter, trainer.episodes", "write episodes: first"),
    ),
    (TRAINED, ppo("weighting: episodes, episodes: all"), "trainer.weighting, trainer.episodes", "episodes: first"),
    (TRAINED, ppo("values: action, discount: smdp"), "trainer.level (default), trainer.values", "level: action, or"),
    (TRAINED, ppo("values: action, level: action"), "trainer.discount (default), trainer.values", "discount: smdp"),
    (TRAINED, "sampler: {kind: flow_noise, std: [0.7, 0.6]}", "sampler.std", "must be the smaller"),
    (
        *(TRAINED, "sampler: {kind: diffusion, steps: 5}"),
        *("sampler.ft_denoising_steps (default), sampler.steps", "10 of 5 steps"),
    ),
    (NEW, new("type: diffusion_mlp"), "policy.new.type, sampler.kind (default)", "write sampler.kind: diffusion"),
    (NEW, "sampler: {kind: diffusion}", "policy.new.type (default), sampler.kind", "write sampler.kind: flow_sde"),
    (NEW, new("type: tiny_flow_vlo"), "policy.new.type", "did you mean tiny_flow_vla? they are: act, diffusion_mlp, "),
    (NEW, new("type: act"), "policy.new.type, sampler.kind (default)", "actions; write sampler.kind: regression"),
    (NEW, "sampler: {kind: regression}", "policy.new.type (default), sampler.kind", "predicts velocity; write sampler"),
    (TRAINED, "sampler: {kind: regression}", "trainer.algorithm, sampler.kind", "has no likelihood; take sft"),
    (NEW, new("type: pi0"), "policy.new.type", "write its folder as"),
    (TRAINED, ppo("entropy_weight: 0.01"), "trainer.entropy_weight, sampler.kind (default)", "write 0"),
    (TRAINED, ppo("element_clip: [2.0, -5.0]"), "trainer.element_clip", "found [2.0, -5.0]"),
    (
        *(TRAINED, ppo("clip_base: 0.5", "sampler: {kind: diffusion}")),
        *("trainer.clip_base, trainer.clip_range (default)", "base is the smaller"),
    ),
    (TRAINED, ppo("clip_base: 0.1"), "trainer.clip_base, sampler.kind (default)", "DPPO's chain"),
    (TRAINED, ppo("denoising_gamma: 0.9"), "trainer.denoising_gamma, sampler.kind (default)", "DPPO's chain"),
    (
        *(TRAINED, "distributed: {fsdp: true}, environment: {name: minitable, workers: ray}"),
        *("environment.workers, distributed.fsdp", "write ray_simulators"),
    ),
    (TRAINED, ppo("fit_batch: true", "distributed: {fsdp: true}"), "trainer.fit_batch, distributed.fsdp", "by hand"),
]


@pytest.mark.parametrize(("base", "changes", "keys", "says"), RULES)
def test_what_cannot_work_is_refused(base: dict[str, Any], changes: str, keys: str, says: str, tmp_path: Path) -> None:
    key, text = only(refused(tmp_path, base, **sections_of(changes)))
    assert key == keys and says in text


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (NEW, ""),
        (TRAINED, ""),
        (NEW, "policy: {path: a}"),
        (NEW, new("type: 'mine.py:Mine', args: {width: 3}")),
        (NEW, new("type: 'a.py:B'", "sampler: {kind: diffusion}")),
        (TRAINED, ppo("entropy_weight: 0.1", "sampler: {kind: flow_noise}")),
        (TRAINED, ppo("clip_base: 0.1, denoising_gamma: 0.9", "sampler: {kind: diffusion}")),
        (TRAINED, "sampler: {kind: diffusion, steps: 5, ft_denoising_steps: 5}"),
        (TRAINED, "trainer: {algorithm: grpo, success_filter: [0.1, 0.9]}, " + GROUPS),
        (TRAINED, "sampler: {kind: reinflow, std: [0.1, 0.1]}"),
    ],
)
def test_their_neighbours_are_accepted(base: dict[str, Any], changes: str, tmp_path: Path) -> None:
    assert isinstance(load(write(tmp_path, base, **sections_of(changes))), VLAConfig)


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ("evalution: {}", "evalution", "unknown key; did you mean evaluation?"),
        ("environment: {name: minitable, num_env: 3}", "environment.num_env", "environment.num_envs?"),
        (ppo("gama: 0.9"), "trainer.gama", "did you mean trainer.gamma?"),
        (flow("noise_levl: 1.0"), "sampler.noise_levl", "sampler.noise_level?"),
        (flow("std: [0.1, 0.2]"), "sampler.std", "it belongs to another sampler.kind than 'flow_sde'"),
        ("trainer: {algorithm: grpo, gamma: 0.9}, " + GROUPS, "trainer.gamma", "another trainer.algorithm than 'grpo'"),
        ("model: {path: org/model}", "model", "unknown key"),
        ("learning_rate: 0.1", "learning_rate", "did you mean optimizer.lr?"),
        ("trainer: {algorithm: pppo}", "trainer.algorithm", "unknown method 'pppo'; did you mean ppo?"),
        ("trainer: {algorithm: flow_grpo}", "trainer.algorithm", "grpo, ppo, "),
        ("trainer: {gamma: 0.9}", "trainer.algorithm", "missing"),
        ("sampler: {kind: flow_sed}", "sampler.kind", "did you mean flow_sde?"),
        ("sampler: {steps: 4}", "sampler.kind", "missing"),
        (flow("selection: random"), "sampler.selection", "random_per_env"),
        (ppo("gamma: 1.5"), "trainer.gamma", "found 1.5 (a number)"),
        ("sampler: {kind: flow_cps, noise_level: 1.2}", "sampler.noise_level", "found 1.2"),
        (ppo("dual_clip: 1.0"), "trainer.dual_clip", "above 1"),
        ("environment: {name: minitable, workers: rya}", "environment.workers", "ray"),
        ("environment: null", "environment", "missing"),
        ("environment: {name: minitable, tasks: []}", "environment.tasks", "a list"),
        # names of the other kind of run are not suggested
        ("group_size: 8", "group_size", "environment.group_size"),
    ],
)
def test_keys_and_values_are_refused_with_the_nearest(changes: str, key: str, says: str, tmp_path: Path) -> None:
    found, text = only(refused(tmp_path, TRAINED, **sections_of(changes)))
    assert found == key and says in text


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    changes = ppo("entropy_weight: 0.1, clip_base: 0.1", "optimizer: {name: prodigy}")
    error = refused(tmp_path, TRAINED, **sections_of(changes))
    assert len(error.problems) == 3


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


def test_overrides_and_base_files(tmp_path: Path) -> None:
    write(tmp_path, TRAINED)
    (tmp_path / "b.yaml").write_text("include: a.yaml\nsampler: {kind: diffusion}\ntrainer: {gamma: 0.5}\n")
    config = load(tmp_path / "b.yaml", ["environment.num_envs=8", "trainer.clip_range=0.01"])
    assert isinstance(config, VLAConfig) and isinstance(config.trainer, methods.PPO)
    assert (config.trainer.gamma, config.trainer.clip_range, config.environment.num_envs) == (0.5, 0.01, 8)
    error = refused(tmp_path, TRAINED, ["sampler={kind: flow_sde, std: [0.1, 1.0]}"])
    assert "belongs to another sampler.kind" in only(error)[1] and "override" in str(error)


def policy_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


class TestFiles:
    """What `check_files` finds on the disk."""

    def problems(self, folder: Path, base: dict[str, Any], **changes: Any) -> list[tuple[str, str]]:
        config, origins = load_located(write(folder, base, **changes))
        try:
            check_files(config, origins)
        except ConfigError as error:
            assert all(f"{folder / 'a.yaml'}:" in line for line in str(error).splitlines()[1:])
            return [(problem.path, problem.text) for problem in error.problems]
        return []

    def test_a_folder_of_a_policy_or_of_a_run(self, tmp_path: Path) -> None:
        good = policy_folder(tmp_path / "good", output_features={})
        policy_folder(tmp_path / "run" / "policy", output_features={})
        for path in (good, tmp_path / "run"):
            assert self.problems(tmp_path, TRAINED, policy={"path": str(path)}, trackers=[]) == []

    def test_weights_that_cannot_be_loaded(self, tmp_path: Path) -> None:
        """Of a robot policy, for the true reason."""
        folder = policy_folder(tmp_path / "policy", output_features={})
        weights, whole = folder / "model.safetensors", (folder / "model.safetensors").read_bytes()
        for damage, said in (
            (whole[:-4], "model.safetensors is cut: it has"),
            (b"version https://git-lfs.github.com/spec/v1\n", "model.safetensors is a Git LFS pointer"),
            (b"", "model.safetensors is empty"),
            (None, "holds no weights: there is no model.safetensors in it"),
        ):
            weights.unlink() if damage is None else weights.write_bytes(damage)
            found = self.problems(tmp_path, TRAINED, policy={"path": str(folder)}, trackers=[])
            assert [key for key, _ in found] == ["policy.path"] and said in found[0][1]

    def test_a_folder_of_a_policy_without_likelihood(self, tmp_path: Path) -> None:
        """Its own sampler, and training by imitation alone."""
        path = policy_folder(tmp_path / "good", output_features={}, type="act")
        one = {"policy": {"path": str(path)}, "trackers": []}
        [(key, text)] = self.problems(tmp_path, TRAINED, **one)
        assert key == "trainer.algorithm" and "is of type act: ppo cannot train" in text
        assert "no likelihood; take sft" in text
        [(key, text)] = self.problems(tmp_path, NEW, **one)
        assert key == "sampler.kind" and text.endswith("predicts actions; write regression")
        one["sampler"] = {"kind": "regression"}
        assert self.problems(tmp_path, NEW, **one) == []

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("gooood", "did you mean {folder}/good?"),
            ("elsewhere/x", "download it first, or train one by sft"),
            ("empty", "neither a policy's folder nor the run of one"),
            ("pipeline", "does not describe a policy: it has no output_features"),
        ],
    )
    def test_a_folder_that_is_none(self, name: str, says: str, tmp_path: Path) -> None:
        policy_folder(tmp_path / "good", output_features={})
        policy_folder(tmp_path / "pipeline", architectures=["x"])
        (tmp_path / "empty").mkdir()
        [(key, text)] = self.problems(tmp_path, TRAINED, policy={"path": str(tmp_path / name)}, trackers=[])
        assert key == "policy.path" and says.format(folder=tmp_path) in text

    def test_a_data_set_that_is_none(self, tmp_path: Path) -> None:
        [(key, text)] = self.problems(tmp_path, NEW, demonstrations={"dataset": str(tmp_path)}, trackers=[])
        assert key == "demonstrations.dataset" and "meta/info.json" in text
        (tmp_path / "meta").mkdir()
        (tmp_path / "meta" / "info.json").write_text("{}")
        assert self.problems(tmp_path, NEW, demonstrations={"dataset": str(tmp_path)}, trackers=[]) == []

    @pytest.mark.parametrize(
        ("changes", "key", "says"),
        [
            ("environment: {name: minitabel}", "environment.name", "did you mean minitable?"),
            ("environment: {name: robosuite}", "environment.name", "there are fetch, libero, maniskill, metaworld, "),
            ("environment: {name: 'none.py:make'}", "environment.name", "there is no file none.py"),
            ("environment: {name: docs/mine.py}", "environment.name", "docs/mine.py:make"),
            (
                "environment: {name: libero, tasks: [libero_spatial/10]}",
                "environment.tasks",
                "no task 'libero_spatial/10'",
            ),
            ("environment: {name: libero, args: {protocol: openpy}}", "environment.args", "did you mean openpi?"),
            (new("type: 'none.py:Mine'"), "policy.new.type", "no file none.py"),
            (new("type: none.py"), "policy.new.type", "none.py:Name"),
        ],
    )
    def test_names_that_lead_nowhere(
        self, changes: str, key: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("genrl.vla.simulators.libero.package.missing", lambda assets: [])  # as if all were there
        [(found, text)] = self.problems(tmp_path, NEW, **sections_of(changes), trackers=[])
        assert found == key and says in text

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
        found = dict(self.problems(tmp_path, NEW, **changes))
        assert "pip install 'metaworld" in found["environment.name"]
        assert "pip install 'ray" in found["environment.workers"]
        assert "pip install wandb" in found["trackers.0"]

    def test_all_of_them_at_once_and_the_output_in_use(self, tmp_path: Path) -> None:
        changes = {"policy": {"path": str(tmp_path / "none")}, "environment": {"name": "minitabl"}, "trackers": []}
        assert len(self.problems(tmp_path, TRAINED, **changes)) == 2
        path = write(tmp_path, NEW, output=str(tmp_path), trackers=[])
        assert any("is in use" in note for note in check_files(load(path)))
