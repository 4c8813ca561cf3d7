"""An environment by its name: one of our own, a gymnasium id, or a function in a file."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium

from genrl.config.plugins import import_file
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.environments.contract import Environment
from genrl.vlm.environments.discrete import Discrete, Misuse, Texts, takes_texts

OWN = {
    "grid": "genrl.playground.grid:Grid",
    "crop": "genrl.playground.crop:Crop",
    "search": "genrl.playground.crop:Search",
    "trajectories": "genrl.playground.trajectories:Trajectories",
    "watch": "genrl.playground.watch:Watch",
    "miniwob": "genrl.vlm.environments.miniwob:MiniWoB",
} | {f"cards-{game}": "genrl.playground.cards:Cards" for game in ("numberline", "ezpoints", "points24", "blackjack")}
"""Where those of our own are; what stands behind a dash is their first argument."""
EXTRAS = {
    "MiniGrid": ("minigrid", "pip install minigrid"),
    "BabyAI": ("minigrid", "pip install minigrid"),
    "MiniWorld": ("miniworld", "pip install miniworld"),
    "ALE": ("ale_py", "pip install ale-py"),
    "browsergym": ("browsergym.miniwob", "pip install browsergym-miniwob"),
}
"""By the first word of an id: the module that registers it, and how to get it."""
TILE = 8  # pixels of a cell of MiniGrid's egocentric view of 7 x 7 cells


def open_environment(settings: Settings) -> Environment:
    """Make it. Raises Misuse (a ValueError) for an unknown name, with the nearest; a package that is not there, with
    the command that installs it; an environment without pictures or words for its actions."""
    name = settings.name
    if name == "miniwob" and settings.timeout_s is None:
        raise Misuse(
            "miniwob has a browser in each slot, and an evaluation would open 64: write environment.timeout_s: 60, "
            "which has environment.parallel of them"
        )
    opened: Any = _called(_own(name), name, settings.options) if name in OWN else _made(name, settings.options)
    if not isinstance(opened, gymnasium.Env):
        members = ("layout", "help", "begun", "reset", "step", "render", "close")
        missing = [part for part in members if not hasattr(opened, part)]
        if missing:
            raise Misuse(
                f"{name} returns a {type(opened).__name__} without {missing[0]!r}: see genrl.vlm.environments.contract"
            )
        return cast(Environment, opened)
    return Texts(opened, settings) if takes_texts(opened) else Discrete(opened, settings)


def _own(name: str) -> Callable[..., Any]:
    """One of our own, by name, so that a run imports none but the one it has."""
    module, _, attribute = OWN[name].partition(":")
    kind: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    _, _, game = name.partition("-")
    return partial(kind, game) if game else kind


def _called(make: Callable[..., Any], name: str, options: dict[str, Any]) -> Any:
    try:
        return make(**options)
    except TypeError as error:
        raise Misuse(f"environment.options do not fit {name}: {error}") from error


def _made(name: str, options: dict[str, Any]) -> Any:
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        return _called(_function(path, function), name, options)
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame then draws into memory
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    env_id = name.rpartition(":")[2]
    module, command = EXTRAS.get(env_id.partition("/")[0].partition("-")[0], ("", ""))
    if module and not _installed(module):
        raise Misuse(f"{name} is in the package {module}, which is not installed: {command}")
    # importing a package is what registers its environments
    for package in filter(None, (module, path)):
        importlib.import_module(package)
    if env_id not in gymnasium.registry:
        available = [*OWN, *gymnasium.registry]
        folded = {name_known.casefold(): name_known for name_known in available}
        close = get_close_matches(env_id.casefold(), folded, n=1, cutoff=0.5)
        hint = f"; did you mean {folded[close[0]]}?" if close else ""
        raise Misuse(
            f"there is no environment {name!r}{hint} (own ones: {', '.join(OWN)}; or a gymnasium id, or file.py:f)"
        )
    modes = _render_modes(env_id)
    if modes is not None and "rgb_array" not in modes:
        raise Misuse(f"{name} draws no pictures: its render modes are {', '.join(map(str, modes)) or 'none'}")
    try:
        mode: dict[str, Any] = (
            {} if module == "browsergym.miniwob" else {"render_mode": "rgb_array"}
        )  # its observations are pictures
        env = gymnasium.make(env_id, disable_env_checker=True, **mode, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise Misuse(f"{name} needs a package that is not installed: {error}") from error
    except (TypeError, gymnasium.error.Error) as error:
        raise Misuse(f"{name} cannot be made: {error}") from error
    if module == "minigrid":
        wrappers: Any = importlib.import_module("minigrid.wrappers")
        env = wrappers.RGBImgPartialObsWrapper(env, tile_size=TILE)
    return env


def _render_modes(name: str) -> list[str] | None:
    """Render modes of the environment's class, before it is made; None where they cannot be told."""
    entry = gymnasium.spec(name).entry_point
    try:
        entry_point = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    except ModuleNotFoundError as error:
        raise Misuse(f"{name} needs a package that is not installed: pip install {error.name}") from error
    metadata = getattr(entry_point, "metadata", None)
    return metadata.get("render_modes") if isinstance(metadata, dict) else None


def _function(file: str, name: str) -> Callable[..., Any]:
    path = Path(file).resolve()
    if not path.is_file():
        raise Misuse(f"there is no file {path}, which should have the function {name!r}")
    module = import_file(path)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value)]
        close = get_close_matches(name, functions, n=1, cutoff=0.5)
        raise Misuse(f"{path} has no function {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
    function: Callable[..., Any] = getattr(module, name)
    return function


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
