"""Offline methods that learn from a file of steps and are judged where it was recorded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.config import ConfigError, check_files, load
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import recorded
from genrl.vla.data.recordings import extremes, read_steps
from genrl.vla.methods.fisor import train as fisor
from genrl.vla.offline.transitions import Words
from genrl.vla.train import train
from tests.run_folders import assert_resumes, rows
from tests.vla.dangerous_line import Line

h5py = pytest.importorskip("h5py", reason="needs h5py: pip install 'genrl-diffusion[h5py]'")

LINE = f"{Path(__file__).parents[1] / 'dangerous_line.py'}:Line"
LIMIT = 8


def write(path: Path, episodes: int = 40) -> Path:
    """Players on the line who go on to its end, or stop where it is safe: half of the episodes each."""
    kept: dict[str, list[Any]] = {}
    rng, env = np.random.default_rng(0), Line()
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


def config(root: Path, name: str, path: Path, output: Path, *more: str) -> VLAConfig:
    of_line = [f"environment.name={LINE}", f"environment.max_steps={LIMIT}", "environment.num_envs=4"]
    of_file = ["environment.reward=environment", "environment.success_key=null", "environment.instruction=go on"]
    fast = ["evaluation.episodes=4", "evaluation.every=1", "evaluation.videos=0", "checkpoint.every=1", "trackers=[]"]
    how = [*of_line, *of_file, *fast, f"demonstrations={{dataset: {path}}}", f"output={output}"]
    found = load(root / "configs" / "vla" / f"{name}.yaml", [*how, *more])
    assert isinstance(found, VLAConfig)
    return found


FISOR = ("trainer.steps_per_iteration=3", "trainer.candidates=2", "iterations=2")
RL100 = (
    "environment.chunk=2", "trainer.imitation_steps=4", "trainer.rounds=1", "trainer.episodes=4",
    "trainer.critic_steps=4", "trainer.dynamics_steps=4", "trainer.steps_per_iteration=2", "trainer.batch_size=8",
    "trainer.gate_every=2", "trainer.union_steps=2", "trainer.distil_steps=0", "iterations=2",
)  # fmt: skip


@pytest.mark.slow
def test_fisor_learns_from_a_file_and_is_judged_as_dsrl_judges(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "line.hdf5")
    given = config(root, "fisor_bullet", path, tmp_path / "whole", *FISOR)
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
    """Its decisions are in the data from the first round on, and its policy imitates them."""
    path = write(tmp_path / "line.hdf5")
    steps = len(read_steps(path, success_key=None, cost_key=None).done)
    kept = rows(train(config(root, "rl100", path, tmp_path / "run", *RL100)))
    assert steps < kept[1]["data/transitions"] <= steps + 4 * LIMIT / 2
    assert kept[-1]["eval/return_mean"] != 0


def test_a_file_of_another_environment_is_refused(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "line.hdf5", 2)
    with h5py.File(path, "a") as file:
        wider = {key: np.repeat(file[key][()], 2, 1) for key in ("observations", "next_observations")}
        for key, values in wider.items():
            del file[key]
            file[key] = values
    with pytest.raises(ValueError, match="actions of 4 and 1 numbers, those of environment.name: .*Line have 2 and 1"):
        train(config(root, "fisor_bullet", path, tmp_path / "run", *FISOR))


def test_rewards_are_scaled_to_the_longest_episode(root: Path, tmp_path: Path) -> None:
    given = config(root, "fisor_bullet", write(tmp_path / "line.hdf5"), tmp_path)
    steps = recorded(given)
    assert steps is not None
    data = fisor.file_data(given, Words(("go", "on")), steps)
    returns = torch.zeros(40).index_add(0, data.episode, data.reward)
    assert float(returns.max() - returns.min()) == pytest.approx(LIMIT, rel=1e-5)
    assert np.allclose(data.cost, steps.cost) and data.action.shape == (len(steps.done), 1, 1)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("fisor_bullet", "environment.cost_key=null", "fisor limits costs: write the entry of info"),
        ("fisor_bullet", "environment.instruction=null", "hold no sentences; write the one of the task"),
        ("fisor_bullet", "policy.new.horizon=2", "costs of a file are those of single actions; write 1"),
        ("fisor_bullet", "environment.name=minitable", "a file of steps is of a gymnasium environment"),
        ("fisor_bullet", "environment.reward=success", "nothing would ever be paid without one"),
    ],
)
def test_what_cannot_work_is_refused(root: Path, tmp_path: Path, name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(root, name, write(tmp_path / "line.hdf5", 2), tmp_path, override)


def test_files_are_looked_for_before_anything_is_loaded(root: Path, tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "ball_circle.hdf5", 2)
    assert check_files(config(root, "fisor_bullet", path, tmp_path / "run")) != []  # the file's code will run
    with pytest.raises(ConfigError, match="there is no file .*circle.hdf5; did you mean .*ball_circle.hdf5"):
        check_files(config(root, "fisor_bullet", tmp_path / "circle.hdf5", tmp_path / "run"))
    (tmp_path / "lerobot" / "meta").mkdir(parents=True)
    (tmp_path / "lerobot" / "meta" / "info.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a LeRobotDataset, which has no costs"):
        check_files(config(root, "fisor_bullet", tmp_path / "lerobot", tmp_path / "run"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"h5py, which reads .*, is not installed: pip install 'h5py"):
        check_files(config(root, "fisor_bullet", path, tmp_path / "run"))
