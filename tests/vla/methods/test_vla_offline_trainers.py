"""The offline methods as tiny whole runs: they train, log what is documented, and resume bit for bit; those that learn
from a file of steps are judged where it was recorded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import genrl_rewards
from genrl.config import ConfigError, check_files, load
from genrl.playground.minitable import MiniTable, expert_chunk
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import recorded
from genrl.vla.data.recordings import extremes, read_steps
from genrl.vla.methods.fisor import train as fisor
from genrl.vla.methods.v_ptr.settings import VPTR
from genrl.vla.offline.transitions import Words
from genrl.vla.policies.folder import load_policy
from genrl.vla.setup import load_trained
from genrl.vla.train import check_processes, open_policy, train
from tests.rewards import tiny_vlm
from tests.run_folders import assert_resumes, rows, tiered
from tests.servers import live
from tests.vla import frail

_RL100 = (
    "environment.num_envs=8 demonstrations.expert=6 trainer.imitation_steps=4 trainer.rounds=1 trainer.episodes=8 "
    "trainer.critic_steps=4 trainer.dynamics_steps=4 trainer.steps_per_iteration=4 trainer.batch_size=16 "
    "trainer.gate_every=2 trainer.union_steps=2 trainer.distil_steps=0"
)
SMALL = {
    "rl100": _RL100,
    "rl100_points": f"{_RL100} policy.new.points=14",
    "diwa": "environment.num_envs=6 environment.max_steps=12 demonstrations.expert=6 sampler.steps=4 "
    "sampler.ft_denoising_steps=2 trainer.world.tables=8 trainer.world.window=6 "
    "trainer.world.steps=4 trainer.classifier.steps=3 trainer.imitation_steps=3 trainer.critic_warmup=0 "
    "trainer.epochs=1",
    "fisor": "trainer.episodes=12 trainer.steps_per_iteration=3 trainer.candidates=2",
    "rl_vlm_f": "environment.num_envs=6 trainer.episodes=12 trainer.labels.pairs=10 trainer.labels.rounds=2 "
    "trainer.labels.steps=3 trainer.critic_steps=3 trainer.steps_per_iteration=3 trainer.batch_size=8 "
    "optimizer.schedule=constant",
    "recap": "environment.num_envs=4 trainer.episodes=24 trainer.critic_steps=3 trainer.steps_per_iteration=2 "
    "trainer.batch_size=8",
    "v_ptr": "environment.num_envs=4 trainer.episodes=12 trainer.critic_steps=3 "
    " trainer.steps_per_iteration=2 trainer.batch_size=8",
}
PICTURES = "policy.new.image_size=16"
COMMON = "evaluation.episodes=4 evaluation.every=1 evaluation.videos=0 checkpoint.every=1 iterations=2"


@pytest.fixture(autouse=True)
def few_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VPTR, "videos", 6)
    monkeypatch.setattr(VPTR, "pretraining_steps", 2)


def small(root: Path, name: str, output: Path, *more: str) -> VLAConfig:
    overrides = [*SMALL[name].split(), *COMMON.split(), "trackers=[]", f"output={output}", *more]
    result: Any = load(root / "configs" / "vla" / f"{name}.yaml", overrides)
    config = result[0] if isinstance(result, tuple) else result
    assert isinstance(config, VLAConfig)
    return config


@pytest.mark.parametrize("name", tiered(SMALL, ("rl_vlm_f", "recap")))
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(root: Path, tmp_path: Path, name: str) -> None:
    config = small(root, name, tmp_path / "whole")
    assert_resumes(train, config, tmp_path)
    kept = rows(tmp_path / "whole")
    assert [row["step"] for row in kept] == [0, 1, 2]
    assert all(0 <= row["eval/success_mean"] <= 1 for row in kept)
    assert load_policy(tmp_path / "whole" / "policy").horizon == (1 if name == "fisor" else 4)
    if name == "fisor":
        assert kept[1]["data/success_mean"] > 0.9
        assert (tmp_path / "whole" / "samples" / "sheet" / "sheet.json").is_file()
        assert [row["eval/within_limit"] for row in kept] == [float(row["eval/cost_mean"] <= 0.25) for row in kept]
    if name == "rl100":
        assert kept[1]["gate/accepted"] + kept[1]["gate/refused"] == 2
        assert 0 < kept[1]["rollout/env_steps"] < kept[2]["rollout/env_steps"]  # of rounds and online
    with pytest.raises(ValueError, match="runs in one process"):
        check_processes(config, 2)


@pytest.mark.slow
def test_what_looks_is_frozen_after_imitation(root: Path, tmp_path: Path) -> None:
    """The rest learns on what it sees, and the one-step copy looks with it."""
    config = small(root, "rl100", tmp_path, PICTURES, "trainer.distil_steps=2")
    begun, folder = open_policy(config)[0].state_dict(), train(config)
    first, last = (load_trained(folder, step=step).state_dict() for step in (1, 2))
    still = {key for key in first if torch.equal(first[key], last[key])}
    assert still == {key for key in first if key.startswith("encoder.")}
    assert any(not torch.equal(begun[key], first[key]) for key in still)  # imitation has taught it
    copied = load_policy(folder / "one_step")
    assert copied.horizon == 4 and 0 <= rows(folder)[-1]["distil/success_mean"] <= 1
    assert all(torch.equal(value, last[f"encoder.{key}"]) for key, value in copied.encoder.state_dict().items())
    with pytest.raises(ValueError, match="optimizer.weight_decay, policy.new: it would move the encoder"):
        train(small(root, "rl100", tmp_path / "other", PICTURES, "optimizer.weight_decay=0.1"))


@pytest.mark.slow
def test_a_served_model_labels_pairs(root: Path, tmp_path: Path) -> None:
    """Some answers are no number: they are counted and teach nothing. A second run asks nothing and is the same."""
    env = MiniTable(6, image_size=32, chunk=1)
    shown = [env.reset(seed=0)[0]["pixels"]]
    for _ in range(11):
        shown.append(env.step(expert_chunk(env.state, 1))[0]["pixels"])
    folder = tiny_vlm.save_comparing(tmp_path / "vlm", [Image.fromarray(row) for row in np.concatenate(shown)[::4]])
    short = {"compare": "{prompt}", "answer": "{analysis}"}
    judge = genrl_rewards.load("preference_judge", {"model": str(folder), "dtype": "float32", "max_tokens": 4, **short})
    asked = "trainer.labels.judge=preference_judge", f"trainer.labels.cache={tmp_path / 'labels.jsonl'}"
    with live(judge, "preference_judge") as url:
        given = "trainer.labels.pairs=40", "iterations=1", f"trainer.labels.remote={url}"
        first = rows(train(small(root, "rl_vlm_f", tmp_path / "a", *asked, *given)))[-1]
        again = rows(train(small(root, "rl_vlm_f", tmp_path / "b", *asked, *given)))[-1]
    labels = [json.loads(line)["label"] for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert first["labels/asked"] == len(labels) and again["labels/asked"] == 0
    assert {-2, -1, 0, 1} == {*labels} and 0 < first["labels/unusable"] <= first["labels/dropped"] < 1
    assert first["loss/policy"] == again["loss/policy"]


CASES = yaml.safe_load((Path(__file__).parents[2] / "fixtures" / "config" / "impossible_recipes.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['recipe']}: {case['change']}")
def test_what_cannot_work_is_refused(root: Path, tmp_path: Path, case: dict[str, str]) -> None:
    line = [line_file(tmp_path / "line.hdf5", 2)] if case["recipe"] == "fisor_bullet" else []
    with pytest.raises(ConfigError, match=case["says"]):
        (of_file if line else small)(root, case["recipe"], *line, tmp_path, case["change"])


# -- Steps of a file
LINE = f"{frail.__file__}:Line"
LIMIT = 8


def line_file(path: Path, episodes: int = 40) -> Path:
    """Players on the line who go on to its end, or stop where it is safe: half of the episodes each."""
    h5py = pytest.importorskip("h5py", reason="needs h5py: pip install 'genrl-diffusion[h5py]'")
    kept: dict[str, list[Any]] = {}
    rng, env = np.random.default_rng(0), frail.Line()
    for number in range(episodes):
        seen, bold = env.reset()[0], number % 2 == 0
        for t in range(LIMIT):
            towards = 1.0 if bold else np.clip(0.8 - seen[0], -1, 1)
            action = np.clip([towards + rng.normal(0, 0.3)], -1, 1).astype(np.float32)
            following, reward, terminated, _, info = env.step(action)
            row = {"observations": seen, "next_observations": following, "actions": action, "rewards": reward}
            row |= {"costs": info["cost"], "terminals": terminated, "timeouts": t == LIMIT - 1 and not terminated}
            for key, value in row.items():
                kept.setdefault(key, []).append(value)
            seen = following
            if terminated:
                break
    with h5py.File(path, "w") as file:
        for key, values in kept.items():
            file[key] = np.array(values, dtype=np.float32)
    return path


def of_file(root: Path, name: str, path: Path, output: Path, *more: str) -> VLAConfig:
    of_line = [f"environment.name={LINE}", f"environment.max_steps={LIMIT}", "environment.num_envs=4"]
    read = ["environment.reward=environment", "environment.success_key=null", "environment.instruction=go on"]
    fast = ["evaluation.episodes=4", "evaluation.every=1", "evaluation.videos=0", "checkpoint.every=1", "trackers=[]"]
    how = [*of_line, *read, *fast, f"demonstrations={{dataset: {path}}}", f"output={output}"]
    result = load(root / "configs" / "vla" / f"{name}.yaml", [*how, *more])
    assert isinstance(result, VLAConfig)
    return result


STEPS_FISOR = ("trainer.steps_per_iteration=3", "trainer.candidates=2", "iterations=2")
STEPS_RL100 = [part for part in _RL100.split() if "expert" not in part and "num_envs" not in part]
STEPS_RL100 += ["environment.chunk=2", "trainer.episodes=4", "iterations=2"]


@pytest.mark.slow
def test_fisor_learns_from_a_file_and_is_judged_as_dsrl_judges(root: Path, tmp_path: Path) -> None:
    path = line_file(tmp_path / "line.hdf5")
    given = of_file(root, "fisor_bullet", path, tmp_path / "whole", *STEPS_FISOR)
    assert_resumes(train, given, tmp_path)
    last = rows(tmp_path / "whole")[-1]
    returns, costs = read_steps(path, success_key=None, cost_key=None).totals()
    low, high = extremes(returns)
    assert last["data/return_mean"] == pytest.approx(returns.mean()) and last["data/cost_mean"] == costs.mean()
    assert last["eval/normalized_return"] == pytest.approx((last["eval/return_mean"] - low) / (high - low))
    assert last["eval/normalized_cost"] == pytest.approx(last["eval/cost_mean"] / 10)
    assert not [name for name in last if "success" in name]


@pytest.mark.slow
def test_rl100_begins_with_a_files_steps(root: Path, tmp_path: Path) -> None:
    path = line_file(tmp_path / "line.hdf5")
    steps = len(read_steps(path, success_key=None, cost_key=None).done)
    kept = rows(train(of_file(root, "rl100", path, tmp_path / "run", *STEPS_RL100)))
    assert steps < kept[1]["data/transitions"] <= steps + 4 * LIMIT / 2
    assert kept[-1]["eval/return_mean"] != 0


def test_a_files_rewards_are_scaled_and_one_that_does_not_fit_is_refused(
    root: Path, tmp_path: Path, monkeypatch
) -> None:
    given = of_file(root, "fisor_bullet", line_file(tmp_path / "line.hdf5"), tmp_path)
    steps = recorded(given)
    assert steps is not None
    data = fisor.file_data(given, Words(("go", "on")), steps)
    returns = torch.zeros(40).index_add(0, data.episode, data.reward)
    assert float(returns.max() - returns.min()) == pytest.approx(LIMIT, rel=1e-5)
    assert np.allclose(data.cost, steps.cost) and data.action.shape == (len(steps.done), 1, 1)
    path = line_file(tmp_path / "line.hdf5", 2)
    with pytest.importorskip("h5py").File(path, "a") as file:
        wider = {key: np.repeat(file[key][()], 2, 1) for key in ("observations", "next_observations")}
        for key, values in wider.items():
            del file[key]
            file[key] = values
    with pytest.raises(ValueError, match="actions of 4 and 1 numbers, those of environment.name: .*Line have 2 and 1"):
        train(of_file(root, "fisor_bullet", path, tmp_path / "run", *STEPS_FISOR))
    path = line_file(tmp_path / "ball_circle.hdf5", 2)
    assert check_files(of_file(root, "fisor_bullet", path, tmp_path / "run")) != []  # the file's code will run
    with pytest.raises(ConfigError, match="there is no file .*circle.hdf5; did you mean .*ball_circle.hdf5"):
        check_files(of_file(root, "fisor_bullet", tmp_path / "circle.hdf5", tmp_path / "run"))
    (tmp_path / "lerobot" / "meta").mkdir(parents=True)
    (tmp_path / "lerobot" / "meta" / "info.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a LeRobotDataset, which has no costs"):
        check_files(of_file(root, "fisor_bullet", tmp_path / "lerobot", tmp_path / "run"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"h5py, which reads .*, is not installed: pip install 'h5py"):
        check_files(of_file(root, "fisor_bullet", path, tmp_path / "run"))
