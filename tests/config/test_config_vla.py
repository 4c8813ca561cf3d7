"""Configurations of a policy's run: those that are shipped load, and what cannot work is refused with advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from genrl.config import Config, ConfigError, VLAConfig, check_files, dump, load, load_located
from genrl.config import vla as sections
from genrl.config.json_schemas import all_keys
from genrl.config.vla_rules import refuse_impossible
from genrl.vla.methods.ppo import settings as methods
from tests.config.schemas import schema_validator

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "vla").glob("*.yaml"))
NEW = {"policy": {"new": {}}, "demonstrations": {"expert": 8}, "trainer": {"algorithm": "sft"}}
TRAINED: dict[str, Any] = {"policy": {"path": "some/policy"}, "trainer": {"algorithm": "ppo"}}
DPPO = {"kind": "diffusion"}


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
    def test_there_are_some(self) -> None:
        assert {"sft", "flow_sde", "sft_diffusion"} <= {path.stem for path in CONFIGS}

    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
    def test_loads_and_comes_back(self, path: Path, tmp_path: Path) -> None:
        config = load(path)
        assert isinstance(config, VLAConfig) and config.output == str(
            Path("runs", *path.with_suffix("").parts[path.parts.index("configs") + 1 :])
        )
        (tmp_path / "again.yaml").write_text(dump(config))
        assert load(tmp_path / "again.yaml") == config

    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
    def test_the_schema_accepts_it_and_what_is_dumped(self, path: Path) -> None:
        validator = schema_validator()
        for text in (path.read_text(), dump(load(path))):
            data = json.loads(json.dumps(yaml.load(text, Loader=yaml.CSafeLoader)))
            if "include" in data:
                continue  # a part of a configuration: what is missing is in its base
            found = [error.message for error in validator.iter_errors(_numbers(data))]
            assert found == []

    def test_the_schema_tells_the_kinds_apart(self) -> None:
        validator = schema_validator()
        assert validator.is_valid(tree(NEW)) and validator.is_valid(tree(TRAINED))
        assert not validator.is_valid(tree(TRAINED, model={"path": "org/model"}))
        assert not validator.is_valid(tree(TRAINED, sampler={"kind": "flow_sde", "low": 0.1}))
        assert not validator.is_valid(tree(TRAINED, policy=None))  # of a pipeline then, which has no environment

    def test_every_number_of_a_default_dump_is_a_key(self) -> None:
        """Nothing is dumped that could not be written."""

        def leaves(node: Any, path: str) -> list[str]:
            if isinstance(node, dict) and node:
                return [leaf for key, value in node.items() for leaf in leaves(value, f"{path}.{key}".lstrip("."))]
            return [path]

        known = set(all_keys("VLAConfig"))
        assert set(leaves(VLAConfig.model_validate(tree(NEW)).model_dump(mode="json"), "")) <= known


def _numbers(data: Any) -> Any:
    """YAML 1.1 reads 1e-4 as a text, the loader as the number that is meant."""
    if isinstance(data, dict):
        return {key: _numbers(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_numbers(value) for value in data]
    try:
        return float(data) if isinstance(data, str) and "e-" in data else data
    except ValueError:
        return data


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

    def test_frozen(self) -> None:
        config = VLAConfig.model_validate(tree(TRAINED))
        with pytest.raises(ValidationError, match="frozen"):
            config.seed = 1  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("policy", "frozen"),
        [
            ({"path": "a"}, True),
            ({"path": "a", "freeze": "nothing"}, False),
            ({"new": {}}, False),  # there is nothing yet that would be worth keeping
        ],
    )
    def test_the_encoder_of_a_loaded_policy_is_frozen(self, policy: dict[str, Any], frozen: bool) -> None:
        assert sections.Policy.model_validate(policy).frozen is frozen

    def test_every_rule_is_applied_in_python_too(self) -> None:
        with pytest.raises(ValidationError, match="write one of them"):
            VLAConfig.model_validate(tree(NEW, policy={}))
        refuse_impossible(VLAConfig.model_validate(tree(NEW)))

    @pytest.mark.parametrize("kind", ["flow_sde", "flow_cps", "flow_noise", "reinflow", "diffusion"])
    def test_every_kind_of_sampler_by_its_name_alone(self, kind: str, tmp_path: Path) -> None:
        config = load(write(tmp_path, TRAINED, sampler={"kind": kind}))
        assert isinstance(config, VLAConfig) and config.sampler.kind == kind
        (tmp_path / "b.yaml").write_text(dump(config))
        assert load(tmp_path / "b.yaml").sampler == config.sampler  # type: ignore[union-attr]


PPO, GRPO = TRAINED["trainer"], {"algorithm": "grpo"}
GROUPS = {"name": "minitable", "num_envs": 16, "group_size": 4}
RULES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    # name, valid base, what is changed, keys of the message, part of its text
    ("no policy", TRAINED, {"policy": {}}, "policy.path (default), policy.new (default)", "write one of them"),
    ("two policies", NEW, {"policy": {"new": {}, "path": "a"}}, "policy.path, policy.new", "write one of them"),
    ("ppo of a new one", TRAINED, {"policy": {"new": {}}}, "policy.new", "train it by sft and give its folder"),
    (
        "grpo of a new one",
        TRAINED,
        {"policy": {"new": {}}, "trainer": GRPO, "environment": GROUPS},
        "policy.new",
        "grpo needs a policy that succeeds now and then",
    ),
    (
        "names of a new one",
        NEW,
        {"policy": {"new": {}, "rename": {"observation.image": "a"}}},
        "policy.rename, policy.path (default)",
        "is of a published policy",
    ),
    (
        "too much noise",
        TRAINED,
        {"sampler": {"kind": "flow_cps", "noise_level": 1.2}},
        "sampler.noise_level",
        "at 1; 1.2",
    ),
    (
        "too much later",
        TRAINED,
        {"sampler": {"kind": "flow_cps", "anneal": [2, 9]}},
        "sampler.anneal",
        "at 1; 2 is more",
    ),
    ("nothing to imitate", NEW, {"demonstrations": None}, "demonstrations (default)", "sft imitates"),
    ("no source", NEW, {"demonstrations": {}}, "demonstrations", "sft imitates"),
    ("two sources", NEW, {"demonstrations": {"expert": 3, "dataset": "a"}}, "demonstrations", "and not both"),
    ("ppo with demonstrations", TRAINED, {"demonstrations": {"expert": 3}}, "demonstrations", "ppo does not imitate"),
    (
        "a part of a group",
        TRAINED,
        {"environment": {"name": "minitable", "num_envs": 10, "group_size": 4}},
        "environment.num_envs, environment.group_size",
        "a multiple",
    ),
    ("grpo alone", TRAINED, {"trainer": GRPO}, "environment.group_size (default)", "write 2 or more (8 is usual)"),
    (
        "filter backwards",
        TRAINED,
        {"trainer": {**PPO, "success_filter": [0.9, 0.1]}, "environment": GROUPS},
        "trainer.success_filter",
        "found [0.9, 0.1]",
    ),
    (
        "filter without groups",
        TRAINED,
        {"trainer": {**PPO, "success_filter": [0.1, 0.9]}},
        "trainer.success_filter, environment.group_size (default)",
        "write 2 or more",
    ),
    (
        "filter of all episodes",
        TRAINED,
        {"trainer": {**PPO, "success_filter": [0.1, 0.9], "episodes": "all"}, "environment": GROUPS},
        "trainer.success_filter, trainer.episodes",
        "write episodes: first",
    ),
    (
        "weighting of all episodes",
        TRAINED,
        {"trainer": {**PPO, "weighting": "episodes", "episodes": "all"}},
        "trainer.weighting, trainer.episodes",
        "write episodes: first",
    ),
    (
        "advantages of actions, a ratio of the chunk",
        TRAINED,
        {"trainer": {**PPO, "values": "action", "discount": "smdp"}},
        "trainer.level (default), trainer.values",
        "write level: action, or element",
    ),
    (
        "advantages of actions, gamma of chunks",
        TRAINED,
        {"trainer": {**PPO, "values": "action", "level": "action"}},
        "trainer.discount (default), trainer.values",
        "write discount: smdp",
    ),
    (
        "noise bounds",
        TRAINED,
        {"sampler": {"kind": "flow_noise", "low": 0.7}},
        "sampler.low, sampler.high (default)",
        "low must be the smaller",
    ),
    (
        "noise bounds of ReinFlow",
        TRAINED,
        {"sampler": {"kind": "reinflow", "high": 0.01}},
        "sampler.low (default), sampler.high",
        "low must be the smaller",
    ),
    (
        "too many last steps",
        TRAINED,
        {"sampler": {"selection": "last", "count": 4, "skip_last": True, "kind": "flow_sde"}},
        "sampler.count, sampler.steps (default)",
        "4 of 3 steps",
    ),
    (
        "too many last steps of CPS",
        TRAINED,
        {"sampler": {"kind": "flow_cps", "selection": "last", "count": 4}},
        "sampler.count, sampler.steps (default)",
        "4 of 3 steps",
    ),
    (
        "a count of random steps",
        TRAINED,
        {"sampler": {"kind": "flow_sde", "count": 2}},
        "sampler.count, sampler.selection (default)",
        "write selection: last",
    ),
    (
        "more trained than there are",
        TRAINED,
        {"sampler": {**DPPO, "steps": 5}},
        "sampler.ft_denoising_steps (default), sampler.steps",
        "10 of 5 steps",
    ),
    (
        "a diffusion policy with a flow's sampler",
        NEW,
        {"policy": {"new": {"type": "diffusion_mlp"}}},
        "policy.new.type, sampler.kind (default)",
        "write sampler.kind: diffusion",
    ),
    (
        "a flow policy with a diffusion's sampler",
        NEW,
        {"sampler": DPPO},
        "policy.new.type (default), sampler.kind",
        "write sampler.kind: flow_sde",
    ),
    (
        "a policy that is unknown",
        NEW,
        {"policy": {"new": {"type": "tiny_flow_vlo"}}},
        "policy.new.type",
        "found 'tiny_flow_vlo'; did you mean tiny_flow_vla? they are: act, diffusion_mlp, tiny_flow_vla; or name a",
    ),
    (
        "a policy that says its chunk, with a flow's sampler",
        NEW,
        {"policy": {"new": {"type": "act"}}},
        "policy.new.type, sampler.kind (default)",
        "act predicts actions; write sampler.kind: regression",
    ),
    (
        "points without an encoder of them",
        NEW,
        {"policy": {"new": {"type": "act", "points": 8}}, "sampler": {"kind": "regression"}},
        "policy.new.points, policy.new.type",
        "act has no encoder of points; write 0",
    ),
    (
        "a flow policy that says its chunk",
        NEW,
        {"sampler": {"kind": "regression"}},
        "policy.new.type (default), sampler.kind",
        "tiny_flow_vla predicts velocity; write sampler.kind: flow_sde",
    ),
    (
        "reinforcement without likelihood",
        TRAINED,
        {"sampler": {"kind": "regression"}},
        "trainer.algorithm, sampler.kind",
        "cannot train a policy that predicts actions: a policy that computes its actions has no likelihood; take sft",
    ),
    ("a published policy, new", NEW, {"policy": {"new": {"type": "pi0"}}}, "policy.new.type", "write its folder as"),
    (
        "settings of a policy that has none",
        NEW,
        {"policy": {"new": {"args": {"width": 3}}}},
        "policy.new.args, policy.new.type (default)",
        "tiny_flow_vla has none",
    ),
    (
        "more levels than it learns",
        NEW,
        {"policy": {"new": {"type": "diffusion_mlp", "train_steps": 10}}, "sampler": DPPO},
        "sampler.steps (default), policy.new.train_steps",
        "there are 10 noise levels only",
    ),
    (
        "entropy that is fixed",
        TRAINED,
        {"trainer": {**PPO, "entropy_weight": 0.01}},
        "trainer.entropy_weight, sampler.kind (default)",
        "write 0",
    ),
    (
        "element clip backwards",
        TRAINED,
        {"trainer": {**PPO, "element_clip": [2.0, -5.0]}},
        "trainer.element_clip",
        "found [2.0, -5.0]",
    ),
    (
        "ratio clip backwards",
        TRAINED,
        {"trainer": {**PPO, "log_prob_clip": [1.0, 1.0]}},
        "trainer.log_prob_clip",
        "must rise",
    ),
    (
        "clip base above the clip",
        TRAINED,
        {"trainer": {**PPO, "clip_base": 0.5}, "sampler": DPPO},
        "trainer.clip_base, trainer.clip_range (default)",
        "base is the smaller",
    ),
    (
        "clip base of a flow",
        TRAINED,
        {"trainer": {**PPO, "clip_base": 0.1}},
        "trainer.clip_base, sampler.kind (default)",
        "DPPO's chain",
    ),
    (
        "denoising discount of a flow",
        TRAINED,
        {"trainer": {**PPO, "denoising_gamma": 0.9}},
        "trainer.denoising_gamma, sampler.kind (default)",
        "DPPO's chain",
    ),
    (
        "a pass above its minibatch",
        TRAINED,
        {"trainer": {**PPO, "microbatch": 600}},
        "trainer.microbatch, trainer.minibatch (default)",
        "write null, or fewer",
    ),
    (
        "shards and actors with copies",
        TRAINED,
        {"distributed": {"fsdp": True}, "environment": {"name": "minitable", "workers": "ray"}},
        "environment.workers, distributed.fsdp",
        "write ray_simulators",
    ),
    (
        "memory of workers that are none",
        TRAINED,
        {"environment": {"name": "minitable", "worker_gb": 4}},
        "environment.worker_gb, environment.workers (default)",
        "write environment.workers: 1 or more",
    ),
    (
        "shards of nothing",
        TRAINED,
        {"distributed": {"shard": "node"}},
        "distributed.shard, distributed.fsdp (default)",
        "fsdp: true",
    ),
    (
        "shards and smaller passes",
        TRAINED,
        {"distributed": {"fsdp": True}, "trainer": {**PPO, "fit_batch": True}},
        "trainer.fit_batch, distributed.fsdp",
        "find microbatch by hand",
    ),
    (
        "adapters of a small policy",
        NEW,
        {"policy": {"new": {"image_size": 0}, "lora": {"rank": 4}}},
        "policy.lora, policy.new",
        "leave it out",
    ),
    (
        "layers of a policy that predicts noise",
        TRAINED,
        {"sampler": DPPO, "policy": {"path": "a", "gradient_checkpointing": True}},
        "policy.gradient_checkpointing, sampler.kind",
        "is for pi0, pi0.5, SmolVLA, GR00T and OpenVLA; leave it out",
    ),
]


@pytest.mark.parametrize(("base", "changes", "keys", "says"), [rule[1:] for rule in RULES], ids=[r[0] for r in RULES])
def test_what_cannot_work_is_refused(
    base: dict[str, Any], changes: dict[str, Any], keys: str, says: str, tmp_path: Path
) -> None:
    load(write(tmp_path, base))  # the rest of the file is not to blame
    key, text = only(refused(tmp_path, base, **changes))
    assert key == keys and says in text


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    trainer = {**PPO, "entropy_weight": 0.1, "microbatch": 600}
    error = refused(tmp_path, TRAINED, trainer=trainer, distributed={"shard": "node"})
    assert len(error.problems) == 3


ALMOST: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sft of a loaded policy", NEW, {"policy": {"path": "a"}}),
    ("a policy of one's own", NEW, {"policy": {"new": {"type": "mine.py:Mine", "args": {"width": 3}}}}),
    ("a policy of one's own that predicts noise", NEW, {"policy": {"new": {"type": "a.py:B"}}, "sampler": DPPO}),
    (
        "entropy of a learned noise",
        TRAINED,
        {"sampler": {"kind": "flow_noise"}, "trainer": {**PPO, "entropy_weight": 0.1}},
    ),
    ("all the last steps", TRAINED, {"sampler": {"kind": "flow_sde", "selection": "last", "count": 4}}),
    ("a clip base of DPPO", TRAINED, {"sampler": DPPO, "trainer": {**PPO, "clip_base": 0.1, "denoising_gamma": 0.9}}),
    ("all of five steps", TRAINED, {"sampler": {**DPPO, "steps": 5, "ft_denoising_steps": 5}}),
    ("grpo with a filter", TRAINED, {"trainer": {**GRPO, "success_filter": [0.1, 0.9]}, "environment": GROUPS}),
    ("equal bounds of a noise", TRAINED, {"sampler": {"kind": "reinflow", "low": 0.1, "high": 0.1}}),
    ("a pass as large as its minibatch", TRAINED, {"trainer": {**PPO, "microbatch": 64, "minibatch": 64}}),
]


@pytest.mark.parametrize(("base", "changes"), [row[1:] for row in ALMOST], ids=[row[0] for row in ALMOST])
def test_their_neighbours_are_accepted(base: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(load(write(tmp_path, base, **changes)), VLAConfig)


SPELLING: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    ("top level", {"evalution": {}}, "evalution", ("unknown key; did you mean evaluation?",)),
    (
        "section",
        {"environment": {"name": "minitable", "num_env": 3}},
        "environment.num_env",
        ("environment.num_envs?",),
    ),
    ("trainer", {"trainer": {**PPO, "gama": 0.9}}, "trainer.gama", ("did you mean trainer.gamma?",)),
    ("sampler", {"sampler": {"kind": "flow_sde", "noise_levl": 1.0}}, "sampler.noise_levl", ("sampler.noise_level?",)),
    ("policy", {"policy": {"path": "a", "frezze": "encoder"}}, "policy.frezze", ("did you mean policy.freeze?",)),
    (
        "another sampler's key",
        {"sampler": {"kind": "flow_sde", "low": 0.1}},
        "sampler.low",
        ("it belongs to another sampler.kind than 'flow_sde'", "keys of sampler: ", "noise_level"),
    ),
    (
        "another sampler's key, for diffusion",
        {"sampler": {**DPPO, "noise_level": 0.1}},
        "sampler.noise_level",
        ("it belongs to another sampler.kind than 'diffusion'", "ft_denoising_steps"),
    ),
    (
        "another trainer's key",
        {"trainer": {**GRPO, "gamma": 0.9}, "environment": GROUPS},
        "trainer.gamma",
        ("it belongs to another trainer.algorithm than 'grpo'",),
    ),
    ("a pipeline's section", {"model": {"path": "org/model"}}, "model", ("unknown key", "policy")),
    ("a pipeline's prompts", {"prompts": {"train": "a.txt"}}, "prompts", ("unknown key",)),
    ("other tools' rate", {"learning_rate": 1e-4}, "learning_rate", ("did you mean optimizer.lr?",)),
    (
        "wrong algorithm",
        {"trainer": {"algorithm": "pppo"}},
        "trainer.algorithm",
        ("unknown method 'pppo'", "grpo, ppo, ", "did you mean ppo?"),
    ),
    (
        "a pipeline's algorithm",
        {"trainer": {"algorithm": "flow_grpo"}},
        "trainer.algorithm",
        ("grpo, ppo, ",),
    ),
    ("no algorithm", {"trainer": {"gamma": 0.9}}, "trainer.algorithm", ("missing", "grpo, ppo, ")),
    (
        "wrong kind",
        {"sampler": {"kind": "flow_sed"}},
        "sampler.kind",
        (
            "found 'flow_sed' (text)",
            "diffusion, flow_cps, flow_noise, flow_sde, regression, reinflow, tokens",
            "did you mean flow_sde?",
        ),
    ),
    ("no kind", {"sampler": {"steps": 4}}, "sampler.kind", ("missing", "flow_sde")),
    (
        "wrong choice",
        {"sampler": {"kind": "flow_sde", "selection": "random"}},
        "sampler.selection",
        ("random_per_env",),
    ),
    ("a number's range", {"trainer": {**PPO, "gamma": 1.5}}, "trainer.gamma", ("found 1.5 (a number)",)),
    ("CPS draws its last step", {"sampler": {"kind": "flow_cps", "skip_last": False}}, "sampler.skip_last", ("True",)),
    ("dual clip", {"trainer": {**PPO, "dual_clip": 1.0}}, "trainer.dual_clip", ("above 1",)),
    ("workers", {"environment": {"name": "minitable", "workers": "rya"}}, "environment.workers", ("ray",)),
    ("no environment", {"environment": None}, "environment", ("missing",)),
    ("no tasks", {"environment": {"name": "minitable", "tasks": []}}, "environment.tasks", ("a list",)),
]


@pytest.mark.parametrize(("changes", "key", "says"), [row[1:] for row in SPELLING], ids=[row[0] for row in SPELLING])
def test_keys_and_values_are_refused_with_the_nearest(
    changes: dict[str, Any], key: str, says: tuple[str, ...], tmp_path: Path
) -> None:
    error = refused(tmp_path, TRAINED, **changes)
    assert [problem.path for problem in error.problems] == [key], str(error)
    for part in says:
        assert part in error.problems[0].text


def test_no_suggestion_is_of_the_other_kind_of_run(tmp_path: Path) -> None:
    """`group_size` is sampling's in a pipeline's run, environment's here."""
    assert "environment.group_size" in only(refused(tmp_path, TRAINED, group_size=8))[1]
    assert "sampling" not in only(refused(tmp_path, TRAINED, num_generations=8))[1]


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
    error = refused(tmp_path, TRAINED, ["sampler={kind: flow_sde, low: 1.0}"])
    assert "belongs to another sampler.kind" in only(error)[1] and "override" in str(error)


def policy_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
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

    @pytest.mark.parametrize("kind", ["tiny_flow_vla", "diffusion"])
    def test_a_folder_of_a_policy_without_layers(self, kind: str, tmp_path: Path) -> None:
        folder = policy_folder(tmp_path / "good", output_features={}, type=kind)
        asked = {"path": str(folder), "lora": {}, "gradient_checkpointing": True}
        changes = {"policy": asked, "distributed": {"fsdp": True}, "trackers": []}
        found = dict(self.problems(tmp_path, TRAINED, **changes))
        assert bool(found.pop("sampler.kind", None)) == (kind == "diffusion")  # the default is for flows
        assert found.keys() == {"policy.lora", "policy.gradient_checkpointing", "distributed.fsdp"}
        assert all(f"{folder} is a {kind}: leave it out" in text for text in found.values())

    def test_a_folder_of_a_policy_without_likelihood(self, tmp_path: Path) -> None:
        """Its own sampler, and training by imitation alone; no layers of transformers'."""
        path = policy_folder(tmp_path / "good", output_features={}, type="act")
        one = {"policy": {"path": str(path)}, "trackers": []}
        [(key, text)] = self.problems(tmp_path, TRAINED, **one)
        assert (
            key == "trainer.algorithm"
            and "is of type act: ppo cannot train" in text
            and "no likelihood; take sft" in text
        )
        [(key, text)] = self.problems(tmp_path, NEW, **one)
        assert key == "sampler.kind" and text.endswith("predicts actions; write regression")
        assert self.problems(tmp_path, NEW, **one, sampler={"kind": "regression"}) == []
        shards = {"distributed": {"fsdp": True}, "sampler": {"kind": "regression"}}
        assert "is for pi0, pi0.5, SmolVLA, GR00T and OpenVLA" in str(self.problems(tmp_path, NEW, **one, **shards))

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
        ("environment", "key", "says"),
        [
            ({"name": "minitabel"}, "environment.name", "did you mean minitable?"),
            (
                {"name": "robosuite"},
                "environment.name",
                "there are fetch, libero, maniskill, metaworld, minitable, point_maze, reacher, gymnasium ids",
            ),
            ({"name": "none.py:make"}, "environment.name", "there is no file none.py"),
            ({"name": "docs/mine.py"}, "environment.name", "docs/mine.py:make"),
        ],
    )
    def test_an_environment_that_is_none(
        self, environment: dict[str, Any], key: str, says: str, tmp_path: Path
    ) -> None:
        [(found, text)] = self.problems(tmp_path, NEW, environment=environment, trackers=[])
        assert found == key and says in text

    @pytest.mark.parametrize(("name", "says"), [("none.py:Mine", "no file none.py"), ("none.py", "none.py:Name")])
    def test_a_policy_of_ones_own_that_is_not_there(self, name: str, says: str, tmp_path: Path) -> None:
        [(found, text)] = self.problems(tmp_path, NEW, policy={"new": {"type": name}}, trackers=[])
        assert found == "policy.new.type" and says in text

    def test_a_policy_of_ones_own_is_code_that_will_run(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("class Mine: ...\n")
        name = f"{tmp_path / 'mine.py'}:Mine"
        note = f"training runs the code of {tmp_path / 'mine.py'}"
        path = write(tmp_path, NEW, policy={"new": {"type": name}}, trackers=[])
        assert check_files(load(path)) == [f"policy.new.type: {note}"]
        folder = policy_folder(tmp_path / "saved", output_features={}, type=name)
        path = write(tmp_path, TRAINED, policy={"path": str(folder)}, trackers=[])
        assert check_files(load(path)) == [f"policy.path: {note}"]

    def test_a_function_is_code_that_will_run(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("def make(): ...\n")
        path = write(tmp_path, NEW, environment={"name": f"{tmp_path / 'mine.py'}:make"}, trackers=[])
        assert check_files(load(path)) == [f"environment.name: training runs the code of {tmp_path / 'mine.py'}"]

    def test_packages_that_are_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        changes = {"environment": {"name": "metaworld", "workers": "ray"}, "trackers": ["wandb"]}
        found = dict(self.problems(tmp_path, NEW, **changes))
        assert "pip install 'genrl-diffusion[metaworld]'" in found["environment.name"]
        assert "pip install 'genrl-diffusion[ray]'" in found["environment.workers"]
        assert "pip install wandb" in found["trackers.0"]

    def test_all_of_them_at_once_and_the_output_in_use(self, tmp_path: Path) -> None:
        changes = {"policy": {"path": str(tmp_path / "none")}, "environment": {"name": "minitabl"}, "trackers": []}
        assert len(self.problems(tmp_path, TRAINED, **changes)) == 2
        path = write(tmp_path, NEW, output=str(tmp_path), trackers=[])
        assert any("is in use" in note for note in check_files(load(path)))


def test_a_pipelines_file_is_still_one(root: Path) -> None:
    assert isinstance(load(root / "configs" / "quickstart.yaml"), Config)
