"""LIBERO: its tasks and starts where hf-libero is installed, and the environment over a double of the simulator."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.vla.simulators import libero
from genrl.vla.simulators.contract import Misuse, Reading
from genrl.vla.simulators.simulator import Simulator

installed = pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="needs LIBERO: pip install hf-libero")


def test_names_of_tasks() -> None:
    assert libero.expanded(()) == tuple(f"libero_spatial/{i}" for i in range(10))
    assert libero.expanded(("libero_10/3", "libero_90/89")) == ("libero_10/3", "libero_90/89")
    assert libero.time_limit(("libero_10/3", "libero_goal/0")) == 480
    for wrong in ("libero_spatial/10", "libero", "libero_goal/x"):
        with pytest.raises(ValueError, match=f"no task '{wrong}'"):
            libero.expanded((wrong,))


def test_axis_angle() -> None:
    half = np.sqrt(0.5)
    np.testing.assert_allclose(libero.axis_angle(np.array([0, 0, half, half])), [0, 0, np.pi / 2])
    np.testing.assert_allclose(libero.axis_angle(np.array([1.0, 0, 0, 0])), [np.pi, 0, 0])
    assert libero.axis_angle(np.array([0.0, 0, 0, 1])).tolist() == [0, 0, 0]


class Context:
    """A GL context; pictures come from the one that is current, whoever asks."""

    current: Any = None

    def __init__(self) -> None:
        self.gl_ctx = self
        self.make_current()

    def make_current(self) -> None:
        Context.current = self


class Sim:
    def __init__(self) -> None:
        self._render_context_offscreen = Context()

    def render(self, *, width: int, height: int, camera_name: str) -> np.ndarray:
        picture = np.zeros((height, width, 3), dtype=np.uint8)
        picture[0, 0] = {"agentview": 255, "robot0_eye_in_hand": 99}[camera_name]
        return picture


class Double:
    """What LIBERO's ControlEnv does, for a hand that follows its actions; success at x = .5."""

    def __init__(self) -> None:
        self.sim, self.calls, self.place = Sim(), [], np.zeros(3)

    def seed(self, seed: int) -> None:
        self.calls.append("seed")

    def reset(self) -> None:
        self.calls.append("reset")

    def set_init_state(self, start: np.ndarray) -> dict[str, Any]:
        self.calls.append("start")
        self.place = np.array([start[0], 0.0, 0.0])
        return self.seen()

    def step(self, action: np.ndarray):
        self.calls.append("step")
        self.place = self.place + 0.1 * action[:3]
        return self.seen(), 0.0, False, {}

    def check_success(self) -> bool:
        return bool(self.place[0] >= 0.5)

    def seen(self) -> dict[str, Any]:
        return {
            "robot0_eef_pos": self.place,
            "robot0_eef_quat": np.array([0.0, 0, 0, 1]),
            "robot0_gripper_qpos": np.array([0.04, -0.04]),
        }


class Doubled(libero.LiberoEnv):
    def __init__(self) -> None:
        self.env, self.task_description = Double(), "push the hand forward"
        self.starts = -np.arange(5.0)[:, None] / 10
        self.action_space = libero.spaces.Box(-1.0, 1.0, (7,), np.float32)


def test_an_episode() -> None:
    simulator = Simulator(Doubled(), Reading(chunk=4, image_size=8))
    outcome = simulator.begin(3)
    double = simulator.env.unwrapped.env
    assert double.calls == ["seed", "reset", "start"] + ["step"] * 10
    assert outcome.observation["agent_pos"].shape == (1, 8) and outcome.instruction == ["push the hand forward"]
    assert outcome.observation["pixels"][0, 7, 7].tolist() == [255] * 3, "turned by 180 degrees"
    chunk = np.zeros((4, 7), dtype=np.float32)
    chunk[:, 0] = 1.0
    start = outcome.observation["agent_pos"][0, 0]
    executed = 0
    while not outcome.terminated[0]:
        outcome = simulator.execute(chunk)
        executed += int(outcome.n_executed[0])
    assert outcome.success[0] and executed == round((0.5 - start) / 0.1)
    starts = {float(simulator.begin(number).observation["agent_pos"][0, 0]) for number in range(40)}
    assert len(starts) == 5, "every listed start, and no other"


def test_two_cameras_by_lerobots_names() -> None:
    how = Reading(chunk=4, image_size=8, cameras=("image", "image2"))
    shown = Simulator(Doubled(), how).begin(3).observation
    assert set(shown) == {"agent_pos", "pixels/image", "pixels/image2"}
    assert [int(shown[f"pixels/{name}"][0, 7, 7, 0]) for name in ("image", "image2")] == [255, 99]
    with pytest.raises(Misuse, match=r"no camera 'image3'.*nearest is 'image2?'"):
        Simulator(Doubled(), Reading(chunk=4, image_size=8, cameras=("image3",))).begin(3)


def test_starts_are_read_without_unpickling_anything_else(tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(3, 5))
    torch.save(states, tmp_path / "good.pruned_init")
    assert np.array_equal(libero.starts(tmp_path / "good.pruned_init"), states)

    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save(Evil(), tmp_path / "evil.pruned_init")
    with pytest.raises(pickle.UnpicklingError):
        libero.starts(tmp_path / "evil.pruned_init")


@installed
def test_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As far as it goes without its scenes, which are on the hub."""
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for suite, (count, _) in libero.SUITES.items():
        tasks = libero._benchmark(suite)
        assert len(tasks) == count and all(task.language for task in tasks)
        folder = libero._package()
        found = libero.starts(folder / "init_files" / tasks[0].problem_folder / tasks[0].init_states_file)
        assert found.ndim == 2 and len(found) == 50
        assert (folder / "bddl_files" / tasks[0].problem_folder / tasks[0].bddl_file).is_file()
    if not (libero._package() / "assets").is_dir():
        with pytest.raises(Misuse, match="LIBERO's scenes are not in"):
            libero.LiberoEnv("libero_spatial/0")


def test_each_of_several_in_a_process_draws_into_its_own_context() -> None:
    first, second = Doubled(), Doubled()
    for env in (first, second, first):
        env.picture(4)
        assert Context.current is env.env.sim._render_context_offscreen
    second.reset(seed=0)
    assert Context.current is second.env.sim._render_context_offscreen
