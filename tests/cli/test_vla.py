"""The command line for policies as a user meets it: check, train, eval, export, report, and what is refused."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genrl.config import load
from genrl.runtime.folder.run import read_metrics
from genrl.vla import train as vla_train
from tests.cli.commands import ROOT, run, words, wrong_uses

SMALL = """\
policy:
  new: {type: tiny_flow_vla, horizon: 4, image_size: 16}
environment:
  name: minitable
  tasks: [touch]
  num_envs: 16
  max_steps: 12
demonstrations: {expert: 8}
trainer: {algorithm: sft, steps_per_iteration: 3, batch_size: 16}
optimizer: {lr: 1e-3}
evaluation: {every: 1, episodes: 16, videos: 2}
checkpoint: {every: 1, keep: 5}
trackers: []
iterations: 2
"""
REINFORCED = """\
policy: {path: runs/small}
environment: {name: minitable, tasks: [touch], num_envs: 16, max_steps: 8}
sampler: {kind: flow_sde, steps: 2}
trainer: {algorithm: ppo, epochs: 1, critic_warmup: 0}
evaluation: {every: 0, episodes: 8}
trackers: []
iterations: 1
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RANK", "GENRL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory of this file's tests: a new policy trained by `genrl train small.yaml`."""
    place, before = tmp_path_factory.mktemp("cli"), Path.cwd()
    os.chdir(place)
    (place / "small.yaml").write_text(SMALL)
    (place / "ppo.yaml").write_text(REINFORCED)
    run("train", "small.yaml")
    yield place
    os.chdir(before)


class TestCheck:
    def test_says_what_an_iteration_does_and_that_a_folder_is_in_use(self, folder: Path) -> None:
        text = words(run("check", "small.yaml", "output=elsewhere"))
        assert text.startswith("valid") and "optimiser steps 3 of 16 frames" in text
        assert "evaluations 3 of 16 episodes" in text and "iterations 2" in text
        text = words(run("check", "ppo.yaml", "--explain"))
        assert "environments 16 in groups of 1" in text and "decisions 32 at most 2 of each environment" in text
        assert "denoising steps 2 of a decision, flow_sde" in text and "evaluations 0 off" in text
        for key in ("trainer.critic_warmup", "environment.num_envs", "sampler.noise_level", "policy.freeze"):
            assert key in text
        assert "sampling.group_size" not in text
        assert "is in use; continue it by `genrl resume runs/small`" in words(run("check", "small.yaml"))
        refusal = words(run("train", "small.yaml", code=2))  # with the whole path
        assert "go on with it by `genrl resume" in refusal and "runs/small`" in refusal

    def test_what_is_wrong(self, folder: Path) -> None:
        for override, says in (
            ("policy.path=runs/smal", "there is no folder runs/smal; did you mean runs/small?"),
            ("trainer.algorithm=pppo", "did you mean ppo?"),
            ("environment.group_size=3", "the groups must be complete"),
        ):
            for command in ("check", "train"):
                assert says in words(run(command, "ppo.yaml", override, code=2))
                assert not (folder / "runs" / "ppo").exists()


class TestTrain:
    def test_leaves_a_run(self, folder: Path) -> None:
        place = folder / "runs" / "small"
        rows = read_metrics(place / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2] and rows[-1]["updates"] == 3
        assert (place / "policy" / "model.safetensors").is_file() and (place / "report.html").is_file()
        assert sorted(path.name for path in (place / "checkpoints").glob("step-*")) == ["step-000001", "step-000002"]
        assert len(list((place / "samples").glob("*.png"))) == 3 and len(list((place / "videos").iterdir())) == 3

    def test_reinforces_a_runs_policy(self, folder: Path) -> None:
        run("train", "ppo.yaml")
        place = folder / "runs" / "ppo"
        assert json.loads((place / "policy" / "config.json").read_text())["critic"] == 1
        assert read_metrics(place / "metrics.jsonl")[0]["rollout/env_steps"] > 0
        assert "has done all of its 1 iterations" in words(run("resume", "runs/ppo"))
        run("resume", "runs/ppo", "iterations=2")
        assert len(read_metrics(place / "metrics.jsonl")) == 2

    def test_what_the_policy_does_not_allow_and_the_command_put_right_runs(self, folder: Path) -> None:
        """Known only with the policy, and said before anything is written."""
        for change, says in (
            ("environment.chunk=9", "environment.chunk: 9 actions cannot be executed of chunks of 4"),
            ("environment.tasks=[pull]", "MiniTable has no task 'pull'"),
            ("sampler={kind: diffusion}", "predicts velocity; write flow_sde"),
        ):
            assert says in words(run("train", "ppo.yaml", change, "output=runs/wrong", code=2))
            assert not (folder / "runs" / "wrong" / "metrics.jsonl").exists()
        # An instruction that the policy was not taught is found at the first reset, when the folder is there.
        text = words(run("train", "ppo.yaml", "environment.tasks=[put]", "output=runs/later", code=2))
        assert "the policy does not know" in text and "environment.tasks" in text
        run("train", "ppo.yaml", "output=runs/later")


class TestEval:
    def test_a_run(self, folder: Path) -> None:
        """By its own configuration; with its seed and number it is the figure of its last row."""
        text = words(run("eval", "runs/small", "--out", "scores.json"))
        scores = json.loads((folder / "scores.json").read_text())
        assert "16 episodes of minitable" in text and "95 % interval" in text and "touch" in text
        last = read_metrics(folder / "runs/small/metrics.jsonl")[-1]
        last.pop("eval/below_best")  # of the run, not of the policy
        assert scores["scores"] == {key: value for key, value in last.items() if key.startswith("eval/")}
        assert scores["policy"] == "runs/small" and scores["seed"] == 1234 and scores["episodes"] == 16
        assert scores["environment"]["tasks"] == ["touch"]

    def test_another_environment_episodes_seed_and_films(self, folder: Path) -> None:
        """Changes to the configuration hold, as in training; options of pipelines are refused."""
        change = "environment.tasks=['touch the red block']"
        assert "touch the green block" in words(run("eval", "runs/small"))
        assert "touch the green block" not in words(run("eval", "runs/small", change))
        text = words(run("eval", "runs/small/policy", "environment.task=[touch]", "--config", "ppo.yaml", code=2))
        assert "did you mean environment.tasks?" in text
        assert "--height is not for a policy" in words(run("eval", "runs/small", "--height", "64", code=2))
        options = ("--episodes", "5", "--seed", "7", "--videos", "films", "--out", "b.json")
        text = words(run("eval", "runs/small", *options))
        scores = json.loads((folder / "b.json").read_text())
        assert (scores["episodes"], scores["seed"]) == (5, 7) and "films and pictures in films" in text
        assert len(list((folder / "films").iterdir())) >= 2
        assert "8 episodes of minitable" in words(run("eval", "runs/small/policy", "--config", "ppo.yaml"))


class TestExport:
    def test_round_trip(self, folder: Path) -> None:
        """Of the last step, and of an earlier one."""
        assert "written to out" in run("export", "runs/small", "--out", "out")
        ours, trained = (load_file(folder / place / "model.safetensors") for place in ("out", "runs/small/policy"))
        assert ours.keys() == trained.keys()
        assert all(torch.equal(value, trained[name]) for name, value in ours.items())
        config = json.loads((folder / "out" / "config.json").read_text())
        assert config == json.loads((folder / "runs/small/policy/config.json").read_text())
        text = words(run("eval", "out", "--config", "small.yaml", "--out", "c.json"))
        last = read_metrics(folder / "runs/small/metrics.jsonl")[-1]
        scores = json.loads((folder / "c.json").read_text())["scores"]
        assert scores["eval/success_mean"] == last["eval/success_mean"] and "all" in text
        assert scores["eval/length_mean"] == last["eval/length_mean"]
        run("export", "runs/small", "--out", "early", "--step", "1")
        early = load_file(folder / "early/model.safetensors")
        saved = load_file(folder / "runs/small/checkpoints/step-000001/weights.safetensors")
        assert all(torch.equal(early[name], value) for name, value in saved.items())
        assert any(not torch.equal(trained[name], value) for name, value in early.items())

    @wrong_uses("vla")
    def test_what_cannot_be_evaluated_or_exported(self, line: str, says: str, folder: Path) -> None:
        (folder / "films").mkdir(exist_ok=True)
        assert says in words(run(*line.format(root=ROOT).split(), code=2)) and not (folder / "never").exists()


def test_a_report_is_written_anew_and_pictures_are_not_of_policies(folder: Path) -> None:
    (folder / "runs/small/report.html").unlink()
    assert "report.html" in run("report", "runs/small")
    assert "eval/success_mean" in (folder / "runs/small/report.html").read_text()
    text = words(run("sample", "runs/small", "--prompt", "touch the red disc", code=2))
    assert "is not the run of a pipeline, so no pictures can be sampled from it" in text
    # Runs of two processes: `--nproc` in test_train.py, policies in tests/vla/test_resume.py.
    vla_train.check_processes(load("ppo.yaml"), 2)
    with pytest.raises(ValueError, match="15 groups of 1 .* cannot be shared out evenly to 2 processes"):
        vla_train.check_processes(load("ppo.yaml", ["environment.num_envs=15"]), 2)
