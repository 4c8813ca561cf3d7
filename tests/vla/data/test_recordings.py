"""Steps from files in the formats of DSRL and Minari, made here row by row; what is refused; decisions from steps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.vla.config.sections import Environment
from genrl.vla.data.frames import episode_frames
from genrl.vla.data.recordings import episodes_of, read_steps, split
from genrl.vla.offline.transitions import Words, from_steps
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, STATE, TOKENS

h5py = pytest.importorskip("h5py", reason="needs h5py: pip install 'genrl-diffusion[h5py]'")

LENGTHS = (3, 4)


def columns() -> dict[str, np.ndarray]:
    """Two episodes, the first ends by itself, the second by its time limit. Observation t of episode e is
    [10 e + t, -t]."""
    seen = [np.array([[10.0 * e + t, -t] for t in range(n + 1)]) for e, n in enumerate(LENGTHS)]
    last = np.cumsum(LENGTHS) - 1
    flags = np.arange(sum(LENGTHS)) == last[:, None]
    return {
        "observations": np.concatenate([one[:-1] for one in seen]),
        "next_observations": np.concatenate([one[1:] for one in seen]),
        "actions": np.linspace(-1, 1, 7)[:, None],
        "rewards": np.arange(7.0),
        "costs": np.array([0, 1, 0, 0, 0, 1, 1.0]),
        "terminals": flags[0].astype(np.float32),
        "timeouts": flags[1].astype(np.float32),
    }


def dsrl(path: Path, **changes: Any) -> Path:
    with h5py.File(path, "w") as file:
        for key, values in (columns() | changes).items():
            if values is not None:
                file[key] = values
    return path


def minari(folder: Path, *, goal: bool = False, success: Sequence[int] = (), data_format: str = "hdf5") -> Path:
    """The same episodes by the layout of minari 0.5; goal: observations as a dict; success: in the second step of the
    second episode."""
    (folder / "data").mkdir(parents=True)
    attributes = {"total_episodes": 2, "total_steps": 7, "data_format": data_format}
    (folder / "data" / "metadata.json").write_text(json.dumps(attributes))
    given, first = columns(), 0
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number, count in enumerate(LENGTHS):
            own = slice(first, first + count)
            group = file.create_group(f"episode_{number}")
            group.attrs["total_steps"] = count
            seen = np.concatenate([given["observations"][own], given["next_observations"][own][-1:]])
            if goal:
                group["observations/observation"], group["observations/achieved_goal"] = seen[:, 1:], seen[:, :1]
            else:
                group["observations"] = seen
            group["actions"], group["rewards"] = given["actions"][own], given["rewards"][own]
            group["terminations"] = given["terminals"][own].astype(bool)
            group["truncations"] = given["timeouts"][own].astype(bool)
            group["infos/cost"] = np.concatenate([[0.0], given["costs"][own]])  # of the reset, too
            if success:
                group["infos/success"] = np.isin(np.arange(count + 1), success) & (number == 1)
            first += count
    return folder


def test_dsrl_and_minari_hold_the_same_steps(tmp_path: Path) -> None:
    one = read_steps(dsrl(tmp_path / "some.hdf5"), success_key=None, cost_key=None)
    for folder in (minari(tmp_path / "plain"), minari(tmp_path / "goal", goal=True)):
        other = read_steps(folder, success_key=None, cost_key="cost")
        for name, values in one._asdict().items():
            assert np.array_equal(values, getattr(other, name)), name
    path = dsrl(tmp_path / "narrow.hdf5", timeouts=np.zeros((7, 1)))
    steps = read_steps(path, success_key=None, cost_key=None)
    assert steps.done[6] and not steps.terminated[6]  # the last row ends an episode
    given = columns()
    assert np.array_equal(one.observation, given["observations"]) and one.observation.dtype == np.float32
    assert one.next_observation[2].tolist() == [3.0, -3.0] and one.next_observation[6].tolist() == [14.0, -4.0]
    assert one.terminated.tolist() == [False, False, True] + 4 * [False]
    assert one.done.tolist() == [False, False, True, False, False, False, True]
    assert one.episode.tolist() == [0, 0, 0, 1, 1, 1, 1] and not one.success.any()
    assert [total.tolist() for total in one.totals()] == [[3.0, 18.0], [1.0, 2.0]]


@pytest.mark.parametrize("later", [(), (3,), (3, 4)])
def test_what_is_recorded_after_a_success_is_left_out(tmp_path: Path, later: tuple[int, ...]) -> None:
    """A recording may go on, and succeed again: in simulation no episode begins after a success."""
    whole = read_steps(minari(tmp_path / "whole"), success_key=None, cost_key=None)
    steps = read_steps(minari(tmp_path / "some", success=(2, *later)), success_key="success", cost_key=None)
    assert np.flatnonzero(steps.success).tolist() == [4] and steps.cost.sum() == 0
    assert steps.done.tolist() == steps.terminated.tolist() == [False, False, True, False, True]
    assert (steps.action == whole.action[:5]).all() and (steps.reward == whole.reward[:5]).all()


def refused(words: str, path: Path, success_key: str | None = None, cost_key: str | None = None) -> None:
    with pytest.raises(ValueError, match=words):
        read_steps(path, success_key=success_key, cost_key=cost_key)


def test_a_broken_file_is_refused_by_key_and_row(tmp_path: Path) -> None:
    for changes, message in (
        ({"costs": None, "cost": np.zeros(7)}, r"/costs is missing \(the nearest is 'cost'\)"),
        ({"rewards": np.zeros(6)}, r"rewards is \[6\], with 7 observations"),
        ({"timeouts": np.zeros((7, 2))}, r"timeouts is \[7, 2\], with 7 observations"),
        ({"terminals": np.full(7, 0.3)}, "a value of terminals is 0.3.*, and it is true or false"),
        ({"actions": np.where(np.arange(7) == 4, np.nan, 0.0)[:, None]}, "actions is not finite in row 4"),
    ):
        refused(f"some.hdf5: {message}", dsrl(tmp_path / "some.hdf5", **changes))
    refused("says nothing of success .*write null", dsrl(tmp_path / "some.hdf5"), success_key="is_success")
    refused("there is no such file", tmp_path / "none.hdf5")
    folder = minari(tmp_path / "made")
    main = folder / "data" / "main_data.hdf5"
    with h5py.File(main, "a") as file:
        costs = file["episode_0/infos/cost"][()]
        file["episode_0/infos/unsure"] = np.where(np.arange(len(costs)) == 1, np.nan, costs)
    refused("episode_0, a value of unsure is nan, and it is true or false", folder, success_key="unsure")
    refused(r"/episode_0/infos/costs is missing \(the nearest is 'cost'\)", folder, cost_key="costs")
    refused("Minari's format 'arrow'", minari(tmp_path / "arrow", data_format="arrow"))
    for seen, message in (
        (np.zeros((5, 8, 8, 3), np.uint8), "episode_1/observations are not vectors; pictures"),
        (np.zeros((4, 2)), "episode_1 has 4 actions, so 5 observations, but 4 are there"),
    ):
        with h5py.File(main, "a") as file:
            del file["episode_1/observations"]
            file["episode_1/observations"] = seen
        refused(message, main)


def test_a_decision_from_every_step_and_frames_to_imitate_are_the_same_chunks(tmp_path: Path) -> None:
    steps = read_steps(dsrl(tmp_path / "some.hdf5"), success_key=None, cost_key=None)
    env = Environment(name="Some-v0", instruction="go on", proprioception=1)
    data = from_steps(steps, Words(("go", "on")), env, horizon=3, executed=2, gamma=0.5)
    assert data.n_executed.tolist() == [2, 2, 1, 2, 2, 2, 1]
    assert data.reward.tolist() == [0.5, 2.0, 2.0, 5.0, 6.5, 8.0, 6.0] and data.discount[1:3].tolist() == [0.25, 0.5]
    assert data.cost.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert data.terminated.tolist() == [False, True, True] + 4 * [False]
    assert data.done.tolist() == [False, True, True, False, False, True, True]
    assert data.next_observation[ENVIRONMENT][:, 0].tolist() == [2.0, 3.0, 3.0, 12.0, 13.0, 14.0, 14.0]
    assert data.observation[STATE].tolist() == steps.observation[:, :1].tolist()
    assert data.observation[TOKENS].tolist() == [[1, 2]] * 7
    actions = torch.from_numpy(steps.action)
    assert torch.equal(data.action[1], actions[[1, 2, 2]]) and torch.equal(data.action[3], actions[[3, 4, 5]])
    steps = read_steps(dsrl(tmp_path / "some.hdf5"), success_key=None, cost_key=None)
    reads = Words(("go",))
    episodes = episodes_of(steps, instruction="go", proprioception=2)
    frames = episode_frames(episodes, reads.tokenise, inputs=(STATE, ENVIRONMENT, TOKENS), horizon=3)
    env = Environment(name="Some-v0", instruction="go", proprioception=2)
    data = from_steps(steps, reads, env, horizon=3, executed=3, gamma=0.9)
    assert torch.equal(frames[ACTION], data.action)
    for name, values in data.observation.items():
        assert torch.equal(frames[name], values), name
    with pytest.raises(ValueError, match="environment.proprioception: 3 of an observation of 2 numbers"):
        split(steps.observation, 3)
