"""Recorded steps in the formats of public benchmarks: DSRL's files, and Minari's folders (D4RL's data among them).

DSRL (arXiv 2306.09303): one HDF5 file whose arrays have a row per step, episode after episode; next_observations are
recorded, the last ones of episodes too. Minari 0.5: data/main_data.hdf5 with a group episode_N each, whose observations
have a row more than its actions, and data/metadata.json. Both need h5py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genrl.data.rows import flags
from genrl.vla.data.lerobot_dataset import Episode
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, STATE

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

MAIN, METADATA = "main_data.hdf5", "metadata.json"
COLUMNS = ("observations", "next_observations", "actions", "rewards", "costs", "terminals", "timeouts")
"""What DSRL's files hold."""


class Steps(NamedTuple):
    """N steps, episode after episode: observation and next_observation (also true at an end) float32 [N, D], action
    float32 [N, A], reward, cost float32 [N]; terminated, success bool [N]; done bool [N], the last of its episode."""

    observation: Floats
    action: Floats
    reward: Floats
    cost: Floats
    next_observation: Floats
    terminated: Flags
    success: Flags
    done: Flags

    @property
    def episode(self) -> NDArray[np.int64]:
        """The number of each step's episode, [N]."""
        return np.cumsum(self.done) - self.done

    def totals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return and cost of every episode, [E] each."""
        episode = self.episode
        return np.bincount(episode, self.reward).astype(np.float64), np.bincount(episode, self.cost).astype(np.float64)


def read_steps(path: Path, *, success_key: str | None, cost_key: str | None) -> Steps:
    """All steps of a DSRL file, or of a Minari folder (or of its main_data.hdf5).

    success_key, cost_key: entries of Minari's infos, None: there are none; DSRL has costs of its own, and no success.
    A step that succeeds ends its episode, as in simulation; what follows is another one.

    Raises ValueError for what is missing, of another shape or not finite, by file, key and row.
    """
    import h5py  # missing only where the configuration was not checked against the disk (`file_problems`)

    if path.is_dir():
        kind = json.loads((path / "data" / METADATA).read_text()).get("data_format", "hdf5")
        if kind != "hdf5":
            raise ValueError(f"{path}: is in Minari's format {kind!r}; load it there and save it as hdf5")
        path = path / "data" / MAIN
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    with h5py.File(path, "r") as file:
        if any(name.startswith("episode_") for name in file):
            return _minari(file, path, success_key, cost_key)
        return _dsrl(file, path, success_key)


def split(vector: Floats, proprioception: int) -> dict[str, Floats]:
    """An observation [N, D] as the simulator names one (`simulator.named`)."""
    if not proprioception:
        return {STATE: vector}
    if proprioception > vector.shape[1]:
        raise ValueError(f"environment.proprioception: {proprioception} of an observation of {vector.shape[1]} numbers")
    return {STATE: vector[:, :proprioception], ENVIRONMENT: vector}


def episodes_of(steps: Steps, *, instruction: str, proprioception: int) -> Iterator[Episode]:
    """The steps as the episodes of supervised training."""
    observation = split(steps.observation, proprioception)
    ends = np.flatnonzero(steps.done) + 1
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        columns = {name: values[begin:end] for name, values in observation.items()}
        yield Episode([instruction] * int(end - begin), columns | {ACTION: steps.action[begin:end]})


def _dsrl(file: Any, path: Path, success_key: str | None) -> Steps:
    if success_key is not None:
        raise ValueError(f"{path}: says nothing of success (environment.success_key: {success_key!r}); write null")
    read = {key: np.asarray(_entry(file, key, path)[()]) for key in COLUMNS}
    count = len(read["observations"])
    for key, values in read.items():
        flat = values.reshape(len(values), -1) if key in COLUMNS[:3] else values.squeeze()
        if len(values) != count or values.ndim > 2 or (key not in COLUMNS[:3] and flat.shape != (count,)):
            raise ValueError(f"{path}: {key} is {list(values.shape)}, with {count} observations")
        read[key] = _finite(flat, key, path)
    terminated, timeout = (flags(read[key], f"{path}: a value of {key}") for key in ("terminals", "timeouts"))
    nothing = np.zeros(count, dtype=np.bool_)
    return _ended(
        [
            *(read[key] for key in ("observations", "actions", "rewards", "costs", "next_observations")),
            *(terminated, nothing, terminated | timeout),
        ]
    )


def _minari(file: Any, path: Path, success_key: str | None, cost_key: str | None) -> Steps:
    parts: list[Steps] = []
    for number in range(len(file)):
        # By number: as names, episode_10 comes before episode_2.
        at = f"episode_{number}"
        group = _entry(file, at, path)
        observations = _finite(_vectors(_entry(group, "observations", path), f"{at}/observations", path), at, path)
        action = _finite(_vectors(_entry(group, "actions", path), f"{at}/actions", path), at, path)
        count = len(action)
        if len(observations) != count + 1:
            raise ValueError(
                f"{path}: {at} has {count} actions, so {count + 1} observations, but {len(observations)} are there"
            )
        columns = {
            name: np.asarray(_entry(group, name, path)[()]) for name in ("rewards", "terminations", "truncations")
        }
        columns |= {key: _info(group, key, at, count, path) for key in (success_key, cost_key) if key is not None}
        for name, values in columns.items():
            if values.shape != (count,):
                raise ValueError(f"{path}: {at}/{name} is {list(values.shape)}, with {count} actions")
        zero = np.zeros(count, dtype=np.float32)
        said = {
            key: flags(columns[key], f"{path}: {at}, a value of {key}")
            for key in ("terminations", "truncations", success_key)
            if key is not None
        }
        success = said[success_key] if success_key is not None else zero > 0
        cost = _finite(columns[cost_key], at, path) if cost_key is not None else zero
        terminated = said["terminations"]
        done = terminated | said["truncations"]
        reward = _finite(columns["rewards"], at, path)
        parts.append(_ended([observations[:-1], action, reward, cost, observations[1:], terminated, success, done]))
    return Steps(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _ended(columns: list[Any]) -> Steps:
    """Steps of columns: a success terminates its episode, what was recorded after it until the episode's end is left
    out, and the last step ends one."""
    done = columns[-1].copy()
    done[-1] = True
    steps = Steps(*columns)._replace(done=done)
    before: NDArray[Any] = np.cumsum(steps.success) - steps.success
    # As many successes before a step as before its episode's first one: nothing of it has succeeded yet.
    first = np.concatenate([[0], np.flatnonzero(done)[:-1] + 1])
    same_start: NDArray[np.bool_] = before == before[first][steps.episode]
    ended = steps._replace(terminated=steps.terminated | steps.success, done=done | steps.success)
    every: list[Any] = [values[same_start] for values in ended]
    return Steps(*every)


def _entry(group: Any, key: str, path: Path) -> Any:
    if key not in group:
        near = get_close_matches(key, list(group), n=1)
        hint = f" (the nearest is {near[0]!r})" if near else ""
        raise ValueError(f"{path}: {group.name.rstrip('/')}/{key} is missing{hint}, there is only {sorted(group)[:12]}")
    return group[key]


def _info(group: Any, key: str, at: str, count: int, path: Path) -> NDArray[Any]:
    """An entry of infos [T]; those of a reset, with which infos begin, are left out."""
    infos = _entry(group, "infos", path)
    values = np.asarray(_entry(infos, key, path)[()])
    return values[1:] if len(values) == count + 1 else values


def _vectors(entry: Any, name: str, path: Path) -> Floats:
    """Numbers [T, D]; those of a dict one after the other in alphabetical order, as the simulator reads them."""
    parts = [entry[key] for key in sorted(entry)] if hasattr(entry, "keys") else [entry]
    if any(hasattr(part, "keys") or part.dtype.kind not in "fiu" or part.ndim > 2 for part in parts):
        raise ValueError(f"{path}: {name} are not vectors; pictures, texts and dicts within dicts are not read")
    arrays = [np.asarray(part[()], dtype=np.float32) for part in parts]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], 1)


def _finite(values: NDArray[Any], name: str, path: Path) -> Floats:
    numbers = values.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(1))
    if len(bad):
        raise ValueError(f"{path}: {name} is not finite in row {bad[0]}")
    return numbers


def extremes(returns: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Least and largest return of a data set, between which DSRL normalises. Raises ValueError where they are one."""
    low, high = float(np.min(returns)), float(np.max(returns))
    if low == high:
        raise ValueError(f"all episodes of the data have the return {low}, so nothing can be told apart")
    return low, high
