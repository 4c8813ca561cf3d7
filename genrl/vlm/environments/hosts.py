"""Where environments come from and where they run: by name (one of our own, a gymnasium id, a function in a file), in
this process or each in one of its own, which is killed where it hangs."""

from __future__ import annotations

import importlib
import importlib.util
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import gymnasium
import numpy as np
import psutil
from numpy.typing import NDArray

from genrl.config.plugins import import_file
from genrl.data.rows import flag
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.environments.contract import Environment, Message, Split
from genrl.vlm.environments.discrete import Discrete, Misuse, Texts, takes_texts

OWN = {
    "grid": "genrl.playground.grid:Grid",
    "crop": "genrl.playground.crop:Crop",
    "search": "genrl.playground.crop:Search",
    "trajectories": "genrl.playground.grid:Trajectories",
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


FAILURES = 3
"""So many losses of one slot, with no step between them, are an error."""
START_S = 120.0
"""Longest that a process may take to begin its first episode, if a step may not take longer."""


class Begin(NamedTuple):
    """The episode of a seed."""

    seed: int
    split: Split


class Say(NamedTuple):
    """A step."""

    text: str


class Draw(NamedTuple):
    """The scene."""


Work = Begin | Say | Draw


class Outcome(NamedTuple):
    """What an environment shows and tells after a piece of work. lost: it hung or died, and is no more."""

    observation: Message = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}
    picture: NDArray[np.uint8] | None = None
    lost: str = ""


class Host(Protocol):
    """The environments of some slots."""

    def do(self, work: Mapping[int, Work]) -> dict[int, Outcome]:
        """A piece of work for each of some slots. Raises what an environment raises, with its slot's place."""
        ...

    def close(self) -> None: ...


def open_host(settings: Settings) -> Host:
    """The host that `environment.timeout_s` asks for."""
    return Local(settings) if settings.timeout_s is None else Processes(settings)


def done(environment: Environment, work: Work) -> Outcome:
    """A piece of work."""
    if isinstance(work, Begin):
        return Outcome(environment.reset(work.seed, work.split))
    if isinstance(work, Draw):
        return Outcome(picture=environment.render())
    observation, reward, terminated, truncated, info = environment.step(work.text)
    who = f"{type(environment).__name__}.step: its"
    if not math.isfinite(reward):
        raise ValueError(f"{who} reward is {reward}, no finite number")
    ends = (flag(terminated, f"{who} terminated"), flag(truncated, f"{who} truncated"))
    return Outcome(observation, float(reward), *ends, info)


class Local:
    """In this process: what hangs, hangs; the run's watchdog ends it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.environments: dict[int, Environment] = {}

    def do(self, work: Mapping[int, Work]) -> dict[int, Outcome]:
        """See `Host`."""
        for slot in work:
            if slot not in self.environments:
                self.environments[slot] = open_environment(self.settings)
        return {slot: done(self.environments[slot], piece) for slot, piece in work.items()}

    def close(self) -> None:
        """Close them."""
        for environment in self.environments.values():
            environment.close()
        self.environments = {}


class Processes:
    """Each in a process of its own, spawned. One that says nothing in time, or dies, is killed and its slot is lost:
    the next episode begins in a new process."""

    def __init__(self, settings: Settings) -> None:
        assert settings.timeout_s is not None, "only with it they have processes of their own"
        self.settings, self.timeout_s = settings, settings.timeout_s
        self.running: dict[int, tuple[Any, Connection]] = {}
        self.failures: dict[int, int] = {}

    def do(self, work: Mapping[int, Work]) -> dict[int, Outcome]:
        """See `Host`. Raises RuntimeError where a slot is lost too often."""
        # All work at the same time, so each one's deadline counts from here and not from when it is listened to.
        begun, allowed = time.monotonic(), {}
        for slot, piece in work.items():
            new = slot not in self.running
            allowed[slot] = begun + (max(START_S, self.timeout_s) if new else self.timeout_s)
            if new:
                self.running[slot] = self._start()
            try:
                self.running[slot][1].send(piece)
            except OSError:
                pass  # it has died, which is seen below
        return {slot: self._heard(slot, piece, allowed[slot]) for slot, piece in work.items()}

    def close(self) -> None:
        """End them."""
        for process, connection in self.running.values():
            try:
                connection.send(None)
                process.join(2.0)
            except OSError:
                pass  # it has ended already
            _end_programs(process.pid)
            process.kill()
        self.running = {}

    def _start(self) -> tuple[Any, Connection]:
        # Not forked: a child would have a copy of the GPU's context and of every lock that some thread holds.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.settings), daemon=True)
        process.start()
        # Or this process would hold the other end open, and never see that the child has died.
        theirs.close()
        return process, ours

    def _heard(self, slot: int, piece: Work, deadline: float) -> Outcome:
        process, connection = self.running[slot]
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                message = connection.recv()
                if isinstance(message, Outcome):
                    self.failures[slot] = 0 if isinstance(piece, Say) else self.failures.get(slot, 0)
                    return message
                raise message
            why = f"said nothing for {self.timeout_s:g} s (environment.timeout_s), and was killed"
        except (EOFError, OSError):
            process.join(5.0)
            why = f"died with exit code {process.exitcode}"
        _end_programs(process.pid)
        process.kill()
        process.join()
        del self.running[slot]
        self.failures[slot] = self.failures.get(slot, 0) + 1
        if self.failures[slot] >= FAILURES:
            raise RuntimeError(
                f"the environment {self.settings.name} of slot {slot} {why}; the last of {FAILURES} times with no step "
                f"between them. It was doing: {piece}. Mend it, or allow more time"
            )
        return Outcome(lost=why)


def _serve(connection: Connection, settings: Settings) -> None:
    """The life of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other side, which closes this one
    try:
        environment = open_environment(settings)
        while (work := connection.recv()) is not None:
            connection.send(done(environment, work))
        environment.close()
    except (EOFError, BrokenPipeError):
        _end_programs(os.getpid())
        os._exit(1)  # the other side is gone; an environment that hangs in its end must not keep this process
    except Misuse as error:
        connection.send(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side is told, and raises it
        connection.send(RuntimeError(f"{settings.name} raised {type(error).__name__}: {error}"))


def _end_programs(pid: int) -> None:
    """What a process has started, such as browsers, which would outlive it."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
