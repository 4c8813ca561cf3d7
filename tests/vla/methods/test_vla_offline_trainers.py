"""The offline methods as tiny whole runs: they train, log what is documented, and resume bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError, VLAConfig, load
from genrl.vla.methods.critics import seen_statistics
from genrl.vla.methods.offline import Transitions
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.policy import Statistics
from genrl.vla.setup import load_trained
from genrl.vla.train import check_processes, open_policy, train
from tests.run_folders import assert_resumes, rows

_RL100 = (
    "environment.num_envs=8 demonstrations.expert=6 trainer.imitation_steps=4 trainer.rounds=1 trainer.episodes=8 "
    "trainer.critic_steps=4 trainer.dynamics_steps=4 trainer.updates=4 trainer.batch_size=16 trainer.gate_every=2 "
    "trainer.union_steps=2 trainer.online_minibatch=32 trainer.distil_steps=0"
)
SMALL = {
    "rl100": _RL100,
    "rl100_points": f"{_RL100} policy.new.points=14",
    "diwa": "environment.num_envs=6 environment.max_steps=12 demonstrations.expert=6 sampler.steps=4 "
    "sampler.ft_denoising_steps=2 trainer.world.tables=8 trainer.world.length=10 trainer.world.window=6 "
    "trainer.world.steps=4 trainer.classifier.steps=3 trainer.imitation_steps=3 trainer.critic_warmup=0 "
    "trainer.epochs=1",
    "fisor": "trainer.episodes=12 trainer.steps_per_iteration=3 trainer.critics.batch_size=8 trainer.candidates=2",
    "rl_vlm_f": "environment.num_envs=6 trainer.episodes=12 trainer.labels.pairs=10 trainer.labels.rounds=2 "
    "trainer.labels.steps=3 trainer.critic_steps=3 trainer.steps_per_iteration=3 trainer.batch_size=8 "
    "optimizer.schedule=constant",
    "v_ptr": "environment.num_envs=4 trainer.episodes=12 trainer.pretraining.videos=6 trainer.pretraining.length=8 "
    "trainer.pretraining.steps=2 trainer.pretraining.batch_size=8 trainer.critic_steps=3 trainer.critics.batch_size=8 "
    "trainer.steps_per_iteration=2 trainer.batch_size=8",
}
COMMON = "evaluation.episodes=4 evaluation.every=1 evaluation.videos=0 checkpoint.every=1 iterations=2"


def small(root: Path, name: str, output: Path, *more: str) -> VLAConfig:
    overrides = [*SMALL[name].split(), *COMMON.split(), "trackers=[]", f"output={output}", *more]
    found: Any = load(root / "configs" / "vla" / f"{name}.yaml", overrides)
    config = found[0] if isinstance(found, tuple) else found
    assert isinstance(config, VLAConfig)
    return config


@pytest.mark.parametrize("name", SMALL)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(root: Path, tmp_path: Path, name: str) -> None:
    config = small(root, name, tmp_path / "whole")
    assert_resumes(train, config, tmp_path)
    kept = rows(tmp_path / "whole")
    assert [row["step"] for row in kept] == [0, 1, 2]
    assert all(0 <= row["eval/success_mean"] <= 1 for row in kept)
    assert load_policy(tmp_path / "whole" / "policy").horizon == (1 if name == "fisor" else 4)
    with pytest.raises(ValueError, match="runs in one process"):
        check_processes(config, 2)


@pytest.mark.slow
def test_the_numbers_that_critics_read_keep_their_meaning(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is seen is normalised by the first round's data, in every round."""
    asked: list[int] = []

    def counting(data: Transitions) -> Statistics:
        asked.append(len(data.reward))
        return seen_statistics(data)

    monkeypatch.setattr("genrl.vla.methods.rl100.train.seen_statistics", counting)
    kept = rows(train(small(root, "rl100_points", tmp_path, "trainer.rounds=2")))
    assert asked == [kept[1]["data/transitions"]] != [kept[2]["data/transitions"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "override"), [("rl100_points", "policy.new.points=14"), ("rl100", "policy.new.image_size=16")]
)
def test_what_looks_is_frozen_after_imitation(root: Path, tmp_path: Path, name: str, override: str) -> None:
    """From pictures and points alike: the rest learns on what it sees, and the one-step copy looks with it."""
    config = small(root, name, tmp_path, override, "trainer.distil_steps=2")
    begun, folder = open_policy(config)[0].state_dict(), train(config)
    first, last = (load_trained(folder, step=step).state_dict() for step in (1, 2))
    still = {key for key in first if torch.equal(first[key], last[key])}
    assert still == {key for key in first if key.startswith("encoder.")}
    assert any(not torch.equal(begun[key], first[key]) for key in still)  # imitation has taught it
    copied = load_policy(folder / "one_step").encoder.state_dict()
    assert all(torch.equal(value, last[f"encoder.{key}"]) for key, value in copied.items())
    with pytest.raises(ValueError, match="optimizer.weight_decay, policy.new: it would move the encoder"):
        train(small(root, name, tmp_path / "other", override, "optimizer.weight_decay=0.1"))


@pytest.mark.slow
def test_what_they_say_of_themselves(root: Path, tmp_path: Path) -> None:
    """RL-100 leaves a one-step policy, FISOR counts costs, RL-VLM-F asks its judge no more than it must."""
    folder = train(small(root, "rl100", tmp_path / "a", "iterations=1", "trainer.distil_steps=3"))
    last = rows(folder)[-1]
    assert last["gate/accepted"] + last["gate/refused"] == 2 and 0 <= last["distil/success_mean"] <= 1
    assert load_policy(folder / "one_step").horizon == 4
    last = rows(train(small(root, "fisor", tmp_path / "b", "iterations=1")))[-1]
    assert last["eval/within_limit"] == float(last["eval/cost_mean"] <= 0.25) and last["data/success_mean"] > 0.9
    config = small(
        root, "rl_vlm_f", tmp_path / "c", "iterations=1", f"trainer.labels.cache={tmp_path / 'labels.jsonl'}"
    )
    first = rows(train(config))[-1]
    again = rows(train(config.model_copy(update={"output": str(tmp_path / "d")})))[-1]
    assert first["labels/pairs"] == 20 and 0 < first["labels/asked"] <= 20 and again["labels/asked"] == 0
    assert first["loss/policy"] == again["loss/policy"]


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("fisor", "environment.name=metaworld", "minitable"),
        ("fisor", "policy.new.type=tiny_flow_vla", "diffusion_mlp"),
        ("fisor", "policy.new.points=8", "policy.new.points.*works on states; write 0"),
        ("rl_vlm_f", "policy.new.image_size=32", "states"),
        ("rl100", "sampler.selection=last", "write all"),
        ("diwa", "demonstrations=null", "expert"),
        ("v_ptr", "environment.name=metaworld", "on the table only; write minitable"),
        ("v_ptr", "policy.new.type=my.py:Policy", "pre-trains the picture encoder of embedded policies; write tiny_fl"),
        ("v_ptr", "policy.new.points=8", "pre-trains what looks at pictures; write 0"),
        ("v_ptr", "policy.new.image_size=0", "pre-trains what looks at pictures; write 32"),
        ("v_ptr", "demonstrations.expert=5", "makes its own data; take them out"),
    ],
)
def test_what_cannot_work_is_refused(root: Path, tmp_path: Path, name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(root, name, tmp_path, override)
