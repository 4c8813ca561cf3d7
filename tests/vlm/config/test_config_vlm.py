"""Configurations of a vision-language model's run: those that are shipped load, what cannot work is refused with
advice, and the functions of a method are taken by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config import ConfigError, check_files, load, load_located
from genrl.vlm.config.files import _model
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.recipe.advantages import LeaveOneOut
from genrl.vlm.recipe.losses import Kl
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.surrogates import Clip
from genrl.vlm.recipe.weights import TopEntropy
from genrl_rewards.scorers.texts import verifiable
from genrl_rewards.scorers.texts.completions import RULES
from tests.vlm import vlm_runs
from tests.vlm.methods import test_rlfr, test_sft
from tests.vlm.methods.episodes import agent_runs, test_sub_agents

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs" / "vlm").glob("*.yaml"))
BASE: dict[str, Any] = {"vlm": {"path": "some/model"}, "task": {"name": "shapes"}, "rewards": [{"name": "exact"}]}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes}, sort_keys=False))
    return path


def made(folder: Path, **changes: Any) -> VLMConfig:
    return load(write(folder, **changes))


def recipe_of(config: VLMConfig) -> Preset:
    return config.trainer.recipe(config)


def refused(folder: Path, **changes: Any) -> tuple[str, str]:
    """The key and the text of the one problem."""
    with pytest.raises(ConfigError) as caught:
        load(write(folder, **changes))
    assert len(caught.value.problems) == 1, str(caught.value)
    problem = caught.value.problems[0]
    assert problem.origin.line is not None or "(default)" in problem.path
    return problem.path, problem.text


OWN_DATA = ("janus_pro_7b_grpo", "janus_pro_7b_dpo", "paco_reward_7b", "shapellm_omni_7b_hi_grpo")
"""Recipes for data of the user's own, which check names."""


class TestShipped:
    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
    def test_is_possible(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        config, origins = load_located(path)
        if path.stem in OWN_DATA:
            with pytest.raises(ConfigError) as caught:
                check_files(config, origins)
            assert all("no such file" in problem.text for problem in caught.value.problems)
        else:
            check_files(config, origins)


LIMITED = ("vl_dac", "poad", "token_ppo", "ma_rlhf", "ui_s1", "trloo")
"""Presets that need more than the default configuration."""


class TestNames:
    def test_the_rules_are_all_of_the_verifiable_rewards(self) -> None:
        own = {n for n, f in vars(verifiable).items() if getattr(f, "__module__", "") == verifiable.__name__}
        helpers = {"T", "answer_in", "votes_of", "number_in", "numbers_in", "letters_in", "iou_of", "ndcg_of"}
        assert {name for name in own - helpers if not name.startswith("_")} == set(RULES)

    @pytest.mark.parametrize("name", [n for n, one in PRESETS.items() if one.output is None and n not in LIMITED])
    def test_a_preset_is_itself(self, name: str, tmp_path: Path) -> None:
        epochs = 2 if name in ("reg_grpo", "kl_cov") else 1
        result, own = recipe_of(made(tmp_path, trainer={"preset": name, "epochs": epochs})), PRESETS[name]
        changed = {f.name for f in dataclasses.fields(result) if getattr(result, f.name) != getattr(own, f.name)}
        assert changed <= {"length"} and (changed == set() or name == "dr_grpo")

    def test_functions_are_changed_by_name_and_constant(self, tmp_path: Path) -> None:
        changes = {"preset": "dapo", "advantage": "leave_one_out", "surrogate": {"high": 0.5}, "aggregation": "const"}
        changes |= {"weights": [{"name": "top_entropy", "share": 0.3}]}
        changes |= {"regularisers": [{"name": "kl", "beta": 0.1}]}
        assert recipe_of(made(tmp_path, trainer={"preset": "grpo", "regularisers": []})).regularisers == ()
        result = recipe_of(made(tmp_path, trainer=changes))
        assert result.advantage == LeaveOneOut() and result.surrogate == Clip(low=0.2, high=0.5)
        assert result.weights == (TopEntropy(share=0.3),) and result.regularisers == (Kl(beta=0.1),)
        assert result.aggregation == "const" and result.length == 64


REFUSED: list[tuple[str, str, str]] = [
    # sections that are changed, the key and a part of the text of the one problem
    ("task: {}", "task.name, task.train", "write one of them"),
    ("task: {train: a.jsonl}", "task.eval, evaluation.every", "held-out data is needed"),
    ("trainer: {preset: grpoo}", "trainer.preset", "grpo"),
    ("trainer: {preset: vl_dac}", "trainer.preset, task", "environment"),
    ("trainer: {preset: bgpo}", "trainer.preset, vlm.output", "output is masked_text"),
    ("trainer: {surrogate: linear_bound}", "trainer.surrogate, vlm.output", "masked_text"),
    ("generation: {guidance_scale: 2.0}", "generation.guidance_scale, vlm.output", "only pictures"),
    ("generation: {elbo_samples: 4}", "generation.elbo_samples, trainer.preset", "only BGPO"),
    ("generation: {denoising_steps: 4}", "generation.denoising_steps, vlm.output", "only masked_text"),
    ("vlm: {path: x, output: image}, trainer: {preset: vppo}", "trainer.preset", "masked_image"),
    ("vlm: {path: x, output: masked_text, lora: {}}", "vlm.lora", "leave it out"),
    ("trainer: {updates: 9}", "trainer.updates, generation.prompts_per_iteration", "9 updates need a group each"),
    ("trainer: {resample: 2}", "trainer.resample, trainer.filter", "filter: spread"),
    ("trainer: {surrogate: clib}", "trainer.surrogate.name", "did you mean clip?"),
    ("trainer: {surrogate: {hihg: 0.3}}", "trainer.surrogate.hihg", "did you mean trainer.surrogate.high?"),
    ("trainer: {surrogate: {high: much}}", "trainer.surrogate.high", "found 'much'"),
    ("trainer: {weights: [{share: 0.1}]}", "trainer.weights.0.name", "one of clip_cov"),
    ("trainer: {preset: reg_grpo}", "trainer.epochs", "2 or more"),
    ("trainer: {preset: real, micro_batch: 4}", "trainer.micro_batch", "whole groups"),
    ("trainer: {preset: real, weights: [top_entropy]}", "trainer.weights", "token weights"),
    ("generation: {group_size: 1}", "generation.group_size", "write 2 or more"),
    ("rewards: [{name: exact, weight: 0}]", "rewards", "all weights are 0"),
    ("generation: {temperature: 0}", "generation.temperature", "allowed"),
    ("stages: [{iterations: 5}]", "iterations, stages", "write iterations: 5"),
    ("stages: [{iterations: 200, task: {name: null}}]", "stages.0.task.name, stages.0.task.train", "write one of them"),
    ("stages: [{iterations: 200, trainer: {preset: dapoo}}]", "stages.0.trainer.preset", "did you mean dapo?"),
    ("stages: [{iterations: 200, trainer: {preset: bgpo}}]", "stages.0.trainer.preset, vlm.output", "masked_text"),
    ("stages: [{iterations: 200, trainer: {epoch: 2}}]", "stages.0.trainer.epoch", "did you mean trainer.epochs?"),
    ("stages: [{iterations: 200, optimizer: {name: lion}}]", "stages.0.optimizer.name", "lr, schedule, warmup_steps"),
    ("augmentation: {truth: '{question} {anser}'}", "augmentation.truth", "and no others"),
    ("task: {name: shapes, passes: 1}", "task.passes", "allowed"),
    ("vlm: {path: x, output: audio}, distributed: {fsdp: true}", "distributed.fsdp, vlm.output", "answer with text"),
    (
        "stages: [{iterations: 200, trainer: {algorithm: sft, fit_batch: true}}], distributed: {fsdp: true}",
        *("stages.0.trainer.fit_batch, distributed.fsdp", "find micro_batch by hand"),
    ),
    ("trainer: {preset: grpo_care}, distributed: {fsdp: true}", "distributed.fsdp, vlm.lora", "give vlm.lora"),
    (
        "synthesis: {pipeline: p/p, ask: '?', check: exact}, stages: [{iterations: 200, task: {rows: 9}}]",
        *("synthesis, stages", "one task's questions"),
    ),
    (
        "synthesis: {pipeline: p/p, ask: '?', check: exact}, distributed: {fsdp: true}",
        *("distributed.fsdp, synthesis", "write null"),
    ),
    ("optimizer: {name: muon}, distributed: {fsdp: true}", "optimizer.name, distributed.fsdp", "adamw or lion"),
]


@pytest.mark.parametrize(("changes", "key", "text"), REFUSED, ids=[f"{key}-{text[:12]}" for _, key, text in REFUSED])
def test_what_cannot_work_is_refused(changes: str, key: str, text: str, tmp_path: Path) -> None:
    result, why = refused(tmp_path, **yaml.safe_load(f"{{{changes}}}"))
    assert result.replace(" (default)", "") == key and text in why


MODEL = {"path": str(ROOT / "assets" / "tiny-vlm")}


class TestFiles:
    def wrong(self, folder: Path, **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            config, origins = load_located(write(folder, **changes))
            check_files(config, origins)
        return str(caught.value)

    def test_a_model_without_a_processor(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llava"}')
        assert "has no image processor" in self.wrong(tmp_path, vlm={"path": str(folder)})
        assert "did you mean" in self.wrong(tmp_path, vlm={"path": str(tmp_path / "mode")})

    def test_rows_that_lack_something(self, tmp_path) -> None:
        for row, changes, words in (
            ({}, {}, "train.jsonl:2: no picture in the column 'image'"),
            ({"image": "a.png", "anser": "1"}, {}, "asks for the column answer"),
            ({"image": "a.png"}, {"rewards": [{"name": "tag_format"}], "augmentation": {}}, "from the column answer; "),
        ):
            (tmp_path / "a.png").write_bytes(b"")
            rows = [{"prompt": "what ?", "image": "a.png", "answer": "1"}, {"prompt": "and ?"} | row]
            (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
            task = {"train": str(tmp_path / "train.jsonl"), "eval": "org/name:test"}
            assert words in self.wrong(tmp_path, vlm=MODEL, task=task, **changes)

    def test_what_is_named_and_is_not_there(self, tmp_path: Path) -> None:
        for changes, words in (
            ("rewards: [{name: steadiness}]", "here completions are scored"),
            ("rewards: [{name: exakt}]", "Did you mean 'exact'"),
            (
                "stages: [{iterations: 200, task: {name: null, train: none.jsonl, eval: 'org/name:test'}}]",
                "stages.0.task.train",
            ),
            ("synthesis: {pipeline: ./none, ask: what, check: exact}", "./none is no folder of a diffusers pipeline"),
            ("synthesis: {pipeline: ./none, ask: what, check: exakt}", "Did you mean 'exact'"),
        ):
            assert words in self.wrong(tmp_path, vlm=MODEL, **yaml.safe_load(f"{{{changes}}}"))


def test_check_prints_what_the_method_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["check", "configs/vlm/grpo.yaml", "trainer.preset=vppo"])
    assert result.exit_code == 0 and "top_dependency" in result.output and "masked_image" in result.output


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("model.safetensors", b"", "model.safetensors is empty"),
        ("model.safetensors", None, "holds no weights"),
        ("tokenizer.json", None, "has no vocabulary"),
    ],
)
def test_a_model_that_cannot_load_is_refused_for_the_true_reason(tmp_path, file, content, says) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parents[3] / "assets" / "tiny-vlm", folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    named: Any = SimpleNamespace(path=str(folder), codec=None, output="text", makes="text")
    result = list(_model(SimpleNamespace(vlm=named), []))  # type: ignore[arg-type]
    assert [key for key, _ in result] == [("vlm", "path")]
    assert says in result[0][1]


# -- sections of a run that do not go together: refused in words that say what to do
AGENT: dict[str, Any] = {"task": None, "rewards": None, "environment": {"name": "grid"}}
SERVER = {"staleness": 1, "vllm": {"url": "http://localhost:1"}}
AHEAD = {"generation": SERVER, "iterations": 4}


def opd(place: Path, **trainer: Any) -> object:
    return test_rlfr.config_of_opd_language(place, trainer)


def acting(place: Path, **changes: Any) -> object:
    return agent_runs.config(place, "vl_dac", **changes)


def stale(place: Path, **changes: Any) -> object:
    return vlm_runs.config(place, **({"iterations": 4, "generation": {"staleness": 1}} | changes))


def staged(place: Path, **stage: Any) -> object:
    return vlm_runs.config(place, stages=[{"iterations": 1, **stage}])


def preferring(place: Path, **trainer: Any) -> object:
    return vlm_runs.config(place, task=test_sft.TASK, trainer=test_sft.DPO | trainer)


TOGETHER: dict[Callable[..., object], list[tuple[dict[str, Any], str]]] = {
    vlm_runs.config: [
        ({"rewards": []}, "answers are worth nothing"),
        ({"vlm": {"packing": True, "prefix_attention": "sdpa"}}, "share no prompts"),
        (
            {"generation": {"group_size": 1}, "stages": [{"iterations": 1, "trainer": {"preset": "grpo"}}]},
            "answers of a group",
        ),
        ({"trainer": {"preset": "trloo"}}, "turns are of episodes: write environment"),
        ({"vlm": {"quantize": "int4", "lora": {"rank": 2}}}, "vlm.quantize.*packed four-bit"),
        ({"vlm": {"quantize": "nf4"}}, "vlm.quantize, vlm.lora|quantised weights cannot be trained"),
        ({"vlm": {"quantize": "nf4", "lora": {}}, "distributed": {"fsdp": True}}, "cannot be divided"),
        ({"vlm": {"quantize": "int8", "lora": {}}, "generation": {"vllm": {}}}, "vLLM is sent merged weights"),
        # before which the server has to know what is asked
        (AHEAD | {"trainer": {"filter": "spread", "resample": 1}}, "before which the server samples"),
        (AHEAD | {"augmentation": {}}, "before which the server samples"),
    ],
    staged: [
        ({"trainer": {"preset": "dapo", "epochs": 0}}, "stages.0.trainer.epochs"),
        ({"trainer": {"algorithm": "episodes"}}, "stages.0.trainer.algorithm.*learns from episodes"),
    ],
    acting: [
        ({"task": {"name": "shapes"}}, "questions, or an environment"),
        ({"rewards": [{"name": "exact"}]}, "an environment has a reward of its own"),
        ({"trainer": {"preset": "grpo", "critic": {}}}, "grpo has no critic"),
        ({"trainer": {"preset": "vppo"}}, "reads what only questions have"),
        ({"trainer": {"advantage": {"macro": 5}}}, "macro actions are of tokens"),
        ({"trainer": {"regularisers": []}}, "a critic's advantage and its loss go together"),
    ],
    test_sub_agents.crops: [({"generation": SERVER, "iterations": 2}, "samples answers ahead, not episodes")],
    test_rlfr.config: [
        ({"trainer": {"preset": "gspo"}}, "the flow pays tokens, and sequence_clip takes one advantage"),
        ({"generation": {"staleness": 1}}, "rlfr learns from samples of the present weights"),
        ({"distributed": {"fsdp": True}}, "not tried in shards"),
        ({"flow": {"threshold": 1.0}}, "threshold"),
    ],
    opd: [
        ({"beta": 0.001}, "the distance vanishes"),
        ({"preset": "gspo"}, "takes one advantage per answer"),
        ({"preset": "poad"}, "trainer.preset"),
    ],
    stale: [
        ({"trainer": {"preset": "rloo"}}, "losses of clipped ratios, 'reinforce' is none"),
        ({"stages": [{"iterations": 4}]}, "stages.*was not tried with it"),
        ({"distributed": {"fsdp": True}}, "in shards are not kept"),
        ({"iterations": 1}, "samples of all 1 iterations would be of the first weights"),
        ({**AGENT, "trainer": {"algorithm": "archer"}}, "of the present weights"),
        ({**AGENT, "trainer": {"preset": "vl_dac"}}, "values and episodes that go on are of the present weights"),
        ({**AGENT, "trainer": {"preset": "rloo"}}, "losses of clipped ratios, 'reinforce' is none"),
    ],
    preferring: [
        ({"preference": {"loss": "ipo", "smoothing": 0.1}}, "ipo has none"),
        ({"preference": {"loss": "robust", "smoothing": 0.5}}, "say nothing"),
        ({"preference": {"loss": "orpo"}}, "write 1"),
        ({"batch_size": 2, "preference": {"loss": "kto"}}, "write 4 or more"),
        ({"first_token_share": 0.1}, "likelihood of answers"),
    ],
}


@pytest.mark.parametrize(
    ("make", "changes", "text"), [(make, *case) for make, cases in TOGETHER.items() for case in cases]
)
def test_what_does_not_go_together_is_refused(make: Any, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        make(tmp_path, **changes)
