"""LIBERO (arXiv 2306.03310) through the package hf-libero: its tasks, sentences, lists of starts, and two cameras.

Tasks are "suite/number" ("libero_spatial/3") or whole suites. What the package does not hold are the scenes' meshes and
textures: it downloads them from the hub when it first makes an environment, unless `assets` names a folder with them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import yaml
from gymnasium import spaces
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Description, Misuse, Reading
from genrl.vla.simulators.simulator import SlotHost, headless

SUITES = {
    "libero_spatial": (10, 240),
    "libero_object": (10, 240),
    "libero_goal": (10, 320),
    "libero_10": (10, 480),
    "libero_90": (90, 400),
}
"""Number of tasks, and the time limit that pi_RL uses (libero_90: openpi's)."""
CAMERAS = {"image": "agentview", "image2": "robot0_eye_in_hand"}
"""LeRobot's names of the camera before the table, and of that at the hand."""
SETTLE = 10
REST = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""Actions at the start of an episode, while objects fall into place: none, gripper open."""


def expanded(tasks: Sequence[str]) -> tuple[str, ...]:
    """Names of single tasks; all of libero_spatial where there are none. Raises ValueError for an unknown one."""
    names: list[str] = []
    for task in tasks or ("libero_spatial",):
        suite, _, number = task.partition("/")
        if suite not in SUITES or (number and not (number.isdigit() and int(number) < SUITES[suite][0])):
            sizes = {name: size for name, (size, _) in SUITES.items()}
            raise ValueError(f"LIBERO has no task {task!r}: a suite or suite/number, of {sizes} tasks")
        names += [task] if number else [f"{suite}/{i}" for i in range(SUITES[suite][0])]
    return tuple(names)


def time_limit(tasks: Sequence[str]) -> int:
    """Limit of the longest suite among tasks."""
    return max(SUITES[task.partition("/")[0]][1] for task in tasks)


def describe(tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> Description:
    """Single tasks, or all of suites. settings: `assets`, the folder of the scenes."""
    names = expanded(tasks)
    limit = time_limit(names) if reading.max_steps is None else reading.max_steps
    told = {"tasks": names, "reading": replace(reading, max_steps=limit), **settings}
    return Description(host, told, len(names), limit)


def host(slots: int, *, tasks: Sequence[str], reading: Reading, assets: str = "") -> SlotHost:
    """Slots of these tasks."""
    return SlotHost(lambda task: LiberoEnv(tasks[task], assets=assets), len(tasks), reading)


class LiberoEnv(gymnasium.Env[dict[str, NDArray[np.float64]], NDArray[np.float32]]):
    """One task. The seed of a reset chooses one of the task's (50) listed starts.

    Observation: "agent_pos" [8], the hand's position, its axis times angle, and the two fingers, as openpi and LeRobot
    have it. Actions [7] in [-1, 1]: move, turn, grip. Reward 1 at success; info["is_success"].
    """

    cameras = tuple(CAMERAS)

    def __init__(self, task: str, *, assets: str = "") -> None:
        suite, _, number = task.partition("/")
        told = _benchmark(suite)[int(number)]
        folder = _package()
        self.task_description: str = told.language
        self.starts = starts(folder / "init_files" / told.problem_folder / told.init_states_file)
        self.env = self._made(str(folder / "bddl_files" / told.problem_folder / told.bddl_file), assets)
        self.observation_space = spaces.Dict({"agent_pos": spaces.Box(-np.inf, np.inf, (8,), np.float64)})  # type: ignore[assignment]
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def _made(self, bddl: str, assets: str) -> Any:
        import libero.libero as library
        from libero.libero.envs import OffScreenRenderEnv

        if assets:
            library._assets_path_cache = assets
        place = Path(library.get_assets_path())
        if not (place / "scenes").is_dir():
            raise Misuse(f"LIBERO's scenes are not in {place}: let it download them once, or name a folder as `assets`")
        # cameras are rendered by `picture`, once per chunk, instead of in every step
        return OffScreenRenderEnv(bddl_file_name=bddl, use_camera_obs=False, ignore_done=True)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
        """Begin at a listed start, and wait until things lie still."""
        super().reset(seed=seed)
        start = self.starts[int(self.np_random.integers(len(self.starts)))]
        self._make_current()
        self.env.seed(0)  # what else is random is not seen: the start replaces it
        self.env.reset()
        seen = self.env.set_init_state(start)
        for _ in range(SETTLE):
            seen = self.env.step(np.array(REST))[0]
        return {"agent_pos": state(seen)}, {"is_success": False}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[np.float64]], float, bool, bool, dict[str, Any]]:
        """One action."""
        seen = self.env.step(np.asarray(action, dtype=np.float64))[0]
        success = bool(self.env.check_success())
        return {"agent_pos": state(seen)}, float(success), success, False, {"is_success": success}

    def picture(self, size: int, camera: str = "image") -> NDArray[np.uint8]:
        """One of `cameras`, turned by 180 degrees as openpi and LeRobot do; uint8 [size, size, 3]."""
        self._make_current()
        picture = self.env.sim.render(width=size, height=size, camera_name=CAMERAS[camera])
        return np.ascontiguousarray(picture[::-1, ::-1])

    def close(self) -> None:
        """Close the simulator."""
        self._make_current()
        self.env.close()

    def _make_current(self) -> None:
        """Draw into this simulator's own context: robosuite never says so, and several in one process then show each
        other's scenes."""
        context = getattr(self.env.sim, "_render_context_offscreen", None)
        if context is not None:  # there is none before the first picture
            context.gl_ctx.make_current()


def state(seen: dict[str, Any]) -> NDArray[np.float64]:
    """Proprioception [8] of robosuite's observation."""
    turn = axis_angle(np.asarray(seen["robot0_eef_quat"]))
    return np.concatenate([seen["robot0_eef_pos"], turn, seen["robot0_gripper_qpos"]]).astype(np.float64)


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Axis times angle [3] of a unit quaternion (x, y, z, w)."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    length = math.sqrt(1.0 - w * w)
    if length < 1e-9:
        return np.zeros(3)
    turned: NDArray[np.float64] = quaternion[:3] * (2.0 * math.acos(w) / length)
    return turned


def starts(path: Path) -> NDArray[np.float64]:
    """The listed starts of a task, simulator states [S, D]: a pickle of one numpy array, and nothing else is let in."""
    import torch
    from numpy._core import multiarray

    make: Any = multiarray._reconstruct
    by_name = [(make, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]  # before and since 2.0
    with torch.serialization.safe_globals([*by_name, np.ndarray, np.dtype, np.dtypes.Float64DType]):
        states: NDArray[np.float64] = torch.load(path, weights_only=True)
    return states


def _benchmark(suite: str) -> list[Any]:
    headless()
    _package()
    from libero.libero.benchmark import task_maps

    return list(task_maps[suite].values())


def _package() -> Path:
    """The package's folder. Its first import asks questions at the terminal unless there is a configuration: this
    writes one into a folder of its own, where LIBERO_CONFIG_PATH does not say another."""
    found = importlib.util.find_spec("libero")
    if found is None or not found.submodule_search_locations:
        raise Misuse("LIBERO is not installed: pip install hf-libero (in an environment of its own, see docs)")
    folder = Path(found.submodule_search_locations[0]) / "libero"
    if "LIBERO_CONFIG_PATH" not in os.environ and not (Path.home() / ".libero" / "config.yaml").is_file():
        os.environ["LIBERO_CONFIG_PATH"] = tempfile.mkdtemp(prefix="libero-")
    place = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero")) / "config.yaml"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        names = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "../datasets", "assets": "assets"}
        paths = {"benchmark_root": str(folder)} | {key: str(folder / name) for key, name in names.items()}
        place.write_text(yaml.safe_dump(paths))
    return folder
