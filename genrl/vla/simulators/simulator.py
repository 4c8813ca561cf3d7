"""Gymnasium environments in slots: how they are read, made and kept where the simulators run."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray
from PIL import Image

from genrl.config.plugins import find, names
from genrl.data.rows import flag
from genrl.vla.config.names import SIMULATORS
from genrl.vla.simulators import bullet_safety
from genrl.vla.simulators.contract import (
    Description,
    Fault,
    Message,
    Misuse,
    Observation,
    Outcome,
    Reading,
    Run,
    episode_keys,
    no_expert,
)
from genrl_rewards.given import is_given
from genrl_rewards.pictures import check_pixels


@runtime_checkable
class Pictures(Protocol):
    """An environment that renders by itself, at any size; one with several cameras has their names in `cameras`, and
    takes one as a second argument."""

    def picture(self, size: int) -> NDArray[np.uint8]: ...


@runtime_checkable
class Cameras(Protocol):
    """An environment with several cameras."""

    @property
    def cameras(self) -> Sequence[str]: ...

    def picture(self, size: int, camera: str) -> NDArray[np.uint8]: ...


@runtime_checkable
class Clouds(Protocol):
    """An environment that shows the surfaces before its camera as `count` points in the world's frame."""

    def points(self, count: int) -> NDArray[np.float32]: ...


@runtime_checkable
class Expert(Protocol):
    """An environment that knows what an expert would do from where it is: its next actions [horizon, D], standing still
    after the success; the environment stays as it is."""

    def expert_chunk(self, horizon: int) -> NDArray[np.float32]: ...


@runtime_checkable
class Listed(Protocol):
    """An environment with a list of so many starts, which are taken in turn: a reset's options["start"] is the number
    of one."""

    @property
    def listed_starts(self) -> int: ...


class Simulator:
    """One gymnasium environment, observed once per chunk. Success ends the episode; actions are clipped to its box.

    Observations: a dict by LeRobot's names ("pixels", "agent_pos", "environment_state"; "environment_points") is taken
    as it is; another dict (of a goal environment, say) is flattened in alphabetical order; a picture is "pixels"; a
    vector is "agent_pos", or with `proprioception` p: its first p numbers are, and all are "environment_state".
    Pictures that are asked for and not there are rendered: by the environment's `picture(size)`, or else by `render()`,
    once per chunk. With `cameras` pictures are "pixels/<camera>": of the dict that the observation has as "pixels", or
    rendered by `picture(size, camera)` of an environment whose `cameras` are so named. A picture of an observation is a
    square of any size; it is made as small as the policy reads it by averages over areas. Points that are asked for and
    not there are those of the environment's `points(count)`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], reading: Reading) -> None:
        if not isinstance(env, gymnasium.Env):
            raise Misuse(f"the function must return a gymnasium environment, not {type(env).__name__}")
        box = env.action_space
        if not isinstance(box, spaces.Box) or len(box.shape) != 1:
            raise Misuse(f"chunks need an action space of vectors, a Box of shape [D]; {env} has {box}")
        takes = inspect.signature(env.unwrapped.reset).parameters.values()
        if not any(p.name == "seed" or p.kind is inspect.Parameter.VAR_KEYWORD for p in takes):
            raise Misuse(
                f"{env.unwrapped} cannot be given a seed, so its episodes could not be repeated: gymnasium's reset is "
                "reset(self, *, seed=None, options=None), and begins with super().reset(seed=seed)"
            )
        self.env, self.box, self.reading, self.elapsed, self.seed = env, box, reading, 0, 0
        self.says_success = False

    def begin(self, number: int) -> Outcome:
        """Begin the episode of a number: of one of `goals` starts, where there are so many."""
        self.elapsed, self.seed = 0, seed_of(number, self.reading)
        bare: Any = self.env.unwrapped
        if isinstance(bare, Listed):
            start = number % (self.reading.goals or bare.listed_starts) % bare.listed_starts
            raw, _ = self.env.reset(seed=self.seed, options={"start": start})
        else:
            raw, _ = self.env.reset(seed=self.seed)
        return self._outcome(raw, np.zeros(self.reading.chunk, dtype=np.float32), 0)

    def execute(self, chunk: NDArray[np.float32]) -> Outcome:
        """Up to C actions [C, D], until the episode ends: by success, by the environment, or by the time limit."""
        rewards, costs = np.zeros((2, self.reading.chunk), dtype=np.float32)
        for k in range(self.reading.chunk):
            # As the robot would: a policy's noise goes beyond its limits, and some simulators raise there.
            action = np.clip(chunk[k], self.box.low, self.box.high).astype(self.box.dtype)
            result = self.env.step(action)
            if not isinstance(result, tuple) or len(result) != 5:
                count = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
                raise Misuse(
                    f"step of {self.env.unwrapped} returned {count}: gymnasium's returns observation, reward, "
                    "terminated, truncated, info"
                )
            raw, reward, *ends, info = result
            who = f"{self.env.unwrapped}: the third or fourth value that step returns"
            terminated, truncated = (flag(end, who, Misuse) for end in ends)
            self.elapsed += 1
            limit = self.reading.max_steps is not None and self.elapsed >= self.reading.max_steps
            success = self._success(info, terminated or truncated or (limit and not self.says_success))
            costs[k] = self._number(self._info_entry(info, "cost_key", needed=True), "cost_key")
            # Success ends an episode here even where the simulator goes on: rewards after it would pay for standing
            # still.
            terminated = terminated or success
            # Both at once is an end: what is bootstrapped from a finished task would be value that does not come.
            truncated = (truncated or limit) and not terminated
            rewards[k] = float(success) if self.reading.reward == "success" else float(reward)
            if terminated or truncated:
                break
        return self._outcome(raw, rewards, k + 1, terminated, truncated, success)._replace(costs=costs[None])

    def _success(self, info: dict[str, Any], ended: bool) -> bool:
        """Whether the step succeeded. Some environments say it at the end of an episode alone, which is enough; where
        an entry of another name speaks of success, the key is wrong, which is said at once."""
        self.says_success |= self.reading.success_key in info
        ended = ended or any("success" in str(name) for name in info)
        entry = self._info_entry(info, "success_key", needed=ended)
        value = self._number(entry, "success_key")
        if value not in (0.0, 1.0):
            raise Misuse(
                f"{self.env.unwrapped}: info[{self.reading.success_key!r}] is {entry!r}, and success is true or false: "
                "set environment.success_key to an entry that says so, or compare it with a threshold there"
            )
        return value == 1.0

    def _number(self, entry: Any, which: str) -> float:
        try:
            value = float(entry)
        except (TypeError, ValueError):
            value = float("nan")
        if not math.isfinite(value):
            key = getattr(self.reading, which)
            raise Misuse(f"{self.env.unwrapped}: info[{key!r}] is {entry!r}, no finite number (environment.{which})")
        return value

    def _info_entry(self, info: dict[str, Any], which: str, *, needed: bool) -> Any:
        """The entry of info under the key that the reading has for it; 0 where it has none, or none is needed yet."""
        key = getattr(self.reading, which)
        if key is None or (key not in info and not needed):
            return 0
        if key not in info:
            raise Misuse(
                f"{self.env.unwrapped} has no {key!r} in its info, only {sorted(info)}: set environment.{which} to "
                "one of these, or to null"
            )
        return np.asarray(info[key]).item() if np.asarray(info[key]).size == 1 else info[key]

    def expert_chunk(self, horizon: int) -> NDArray[np.float32]:
        """See `Expert`; clipped to the box of actions. Raises Misuse where the environment is none, tells something
        else, or raises."""
        bare: Any = self.env.unwrapped
        if not isinstance(bare, Expert):
            raise no_expert(str(bare))
        try:
            advice = np.asarray(bare.expert_chunk(horizon), dtype=np.float32)
        except Misuse:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise Misuse(
                f"expert_chunk({horizon}) of {bare} raised {type(error).__name__} ({where.filename}, line "
                f"{where.lineno}): {error}. It was asked after {self.elapsed} actions of the episode that "
                f"reset(seed={self.seed}) begins. It must answer wherever a policy may bring the robot; if it knows no "
                "better, let it stand still"
            ) from error
        if advice.shape != (horizon, *self.box.shape) or not np.isfinite(advice).all():
            raise Misuse(
                f"expert_chunk({horizon}) of {bare} must be finite numbers {[horizon, *self.box.shape]}, got "
                f"{list(advice.shape)}"
            )
        return np.clip(advice, self.box.low, self.box.high)

    def picture(self, size: int, camera: str = "") -> NDArray[np.uint8]:
        """The scene as it is, uint8 [size, size, 3], as the environment shows it or as one of its cameras sees it."""
        return as_picture(self._rendered(size, camera), size, str(self.env.unwrapped))

    def _rendered(self, size: int, camera: str) -> Any:
        bare: Any = self.env.unwrapped
        if camera:
            return bare.picture(size, camera)
        return bare.picture(size) if isinstance(bare, Pictures) else self.env.render()

    def _outcome(self, raw: Any, rewards: NDArray[np.float32], count: int, *ends: bool) -> Outcome:
        """ends: terminated, truncated, success."""
        terminated, truncated, success = ends or (False, False, False)
        has_instruction = self.env.has_wrapper_attr("task_description")
        return Outcome(
            slots=np.zeros(1, dtype=np.int64),
            observation={name: value[None] for name, value in self._observe(raw).items()},
            rewards=rewards[None],
            n_executed=np.array([count]),
            terminated=np.array([terminated]),
            truncated=np.array([truncated]),
            success=np.array([success]),
            instruction=[
                str(self.env.get_wrapper_attr("task_description")) if has_instruction else self.reading.instruction
            ],
            action_dim=self.box.shape[0],
        )

    def _observe(self, raw: Any) -> Observation:
        who, size, cameras = str(self.env.unwrapped), self.reading.image_size, self.reading.cameras
        observation = named(raw, self.reading.proprioception, who)
        if self.reading.points:
            observation["environment_points"] = self._cloud(observation.get("environment_points"))
        pictures = {name: observation.pop(name) for name in list(observation) if name.startswith("pixels")}
        if not size:
            return observation
        if not cameras and len(pictures) > 1:
            several = [name.removeprefix("pixels/") for name in pictures]
            raise Misuse(
                f"{who} shows the cameras {sorted(several)}, and the policy reads one picture, observation.image: name "
                "those that it has by policy.rename {observation.images.<camera>: observation.images.<the policy's>}"
            )
        if not cameras:
            return observation | {"pixels": self._sized(next(iter(pictures.values()), None), "")}
        bare = self.env.unwrapped
        rendered = list(bare.cameras) if isinstance(bare, Cameras) else []
        known = [*(name.removeprefix("pixels/") for name in pictures if "/" in name), *rendered]
        check_cameras(cameras, known, who, self.reading.left_empty)
        return observation | {f"pixels/{name}": self._sized(pictures.get(f"pixels/{name}"), name) for name in cameras}

    def _cloud(self, shown: NDArray[np.float32] | None) -> NDArray[np.float32]:
        bare, count = self.env.unwrapped, self.reading.points
        if shown is None and not isinstance(bare, Clouds):
            raise Misuse(f"{bare} shows no points: give it a method points(count), or write policy.new.points: 0")
        points = bare.points(count) if shown is None else shown  # type: ignore[attr-defined]
        if points.shape != (count, 3):
            raise Misuse(f"{bare} shows points {list(points.shape)}, the policy reads {[count, 3]}")
        return points

    def _sized(self, shown: NDArray[Any] | None, camera: str) -> NDArray[np.uint8]:
        size, who = self.reading.image_size, str(self.env.unwrapped)
        picture = self._rendered(size, camera) if shown is None else shown
        return as_picture(picture, size, who, squeezed=False)


class SlotHost:
    """Slots of gymnasium environments. One of another task's is kept for the next slot that needs it; without
    `resting`, only for one of the same round, and there are never more environments than slots.

    Environments are made by `make(task)`. One that raises is thrown away, and the next episode has a new one.
    """

    def __init__(
        self, make: Callable[[int], gymnasium.Env[Any, Any]], tasks: int, reading: Reading, *, resting: bool = True
    ) -> None:
        headless()
        self.make, self.tasks, self.reading, self.resting = make, tasks, reading, resting
        self._running: dict[int, tuple[int, Simulator]] = {}
        self._free: dict[int, list[Simulator]] = {task: [] for task in range(tasks)}

    def run(self, work: Run) -> Iterator[Message]:
        """One message per slot."""
        self._release({slot: episode % self.tasks for slot, episode in work.begin.items()})
        # In the order of the slots: the other side knows by it which one is being worked on when nothing comes.
        for slot in sorted(work.begin.keys() | work.chunks.keys()):
            try:
                if slot in work.begin:
                    outcome = self._begin(slot, work.begin[slot])
                else:
                    outcome = self._running[slot][1].execute(work.chunks[slot])
            except Exception as error:  # noqa: BLE001 - whatever it is, the other side is told, and judges
                misuse = isinstance(error, (Misuse, ModuleNotFoundError))
                report = str(error) if misuse else traceback.format_exc()
                yield Fault(slot, report + self._thrown_away(slot), misuse)
            else:
                yield outcome._replace(slots=np.array([slot]))

    def render(self, slots: list[int], size: int) -> NDArray[np.uint8]:
        """Black where nothing has begun."""
        pictures = np.zeros((len(slots), size, size, 3), dtype=np.uint8)
        for row, slot in enumerate(slots):
            if slot in self._running:
                pictures[row] = self._running[slot][1].picture(size)
        return pictures

    def advise(self, slots: list[int], horizon: int) -> NDArray[np.float32]:
        """See `contract.Host`."""
        return np.stack([self._running[slot][1].expert_chunk(horizon) for slot in slots])

    def close(self) -> None:
        """Close all environments."""
        for simulator in [simulator_of for _, simulator_of in self._running.values()] + sum(self._free.values(), []):
            simulator.env.close()
        self._running, self._free = {}, {task: [] for task in range(self.tasks)}

    def _release(self, begin: Mapping[int, int]) -> None:
        """Free the environments of slots that begin another task (slot -> task), before any takes one: slots may have
        each other's."""
        for slot, task in begin.items():
            if slot in self._running and self._running[slot][0] != task:
                was, simulator = self._running.pop(slot)
                self._free[was].append(simulator)
        needed = Counter(task for slot, task in begin.items() if slot not in self._running)
        for task, free in self._free.items():
            while not self.resting and len(free) > needed[task]:
                free.pop().env.close()

    def _thrown_away(self, slot: int) -> str:
        """Close the environment of a slot, which has raised. What that raises is returned, as part of the report."""
        _, simulator = self._running.pop(slot, (0, None))
        try:
            if simulator is not None:
                simulator.env.close()
        except Exception as error:  # noqa: BLE001 - it is broken already; the other side is told
            return f"\nClosing it raised {error!r}."
        return ""

    def _begin(self, slot: int, episode: int) -> Outcome:
        number, task = divmod(episode, self.tasks)
        if slot not in self._running:
            free = self._free[task]
            self._running[slot] = task, free.pop() if free else Simulator(self.make(task), self.reading)
        return self._running[slot][1].begin(number)


def seed_of(number: int, reading: Reading) -> int:
    """The seed of an episode of a task by its number, or of one of the few starts; 31 bits: all that some take."""
    start = number % reading.goals if reading.goals else number
    key = episode_keys(reading.seed, np.array([start % 2**64], dtype=np.uint64), np.array([0]))[0]
    return int(key >> np.uint64(33))


def headless() -> None:
    """Let simulators render without a display where there is none; before their packages are imported.

    In a process with torch Triton comes first: imported after Mesa has drawn anything, it ends the process with a
    segmentation fault (each brings an LLVM), and torch imports it some time or other.
    """
    if "torch" in sys.modules and importlib.util.find_spec("triton") is not None:
        importlib.import_module("triton")
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")


def named(raw: Any, proprioception: int, who: str) -> Observation:
    """An observation by LeRobot's names, a picture of several as "pixels/<camera>": see `Simulator`.

    Raises Misuse for what is neither numbers nor a picture.
    """
    names = ("pixels", "agent_pos", "environment_state", "environment_points")
    if isinstance(raw, Mapping) and any(name in raw for name in names):
        by_name = {name: raw[name] for name in names if name in raw}
        if isinstance(by_name.get("pixels"), Mapping):
            by_name |= {f"pixels/{camera}": picture for camera, picture in by_name.pop("pixels").items()}
        try:
            return {
                name: check_pixels(value, f"{who}, {name}")
                if name.startswith("pixels")
                else _numbers(value, f"{who}, {name}")
                for name, value in by_name.items()
            }
        except ValueError as error:
            raise Misuse(str(error)) from error
    parts = [raw[name] for name in sorted(raw)] if isinstance(raw, Mapping) else [raw]
    arrays = [np.asarray(part) for part in parts]
    if len(arrays) == 1 and arrays[0].ndim == 3 and arrays[0].dtype == np.uint8:
        return {"pixels": arrays[0]}
    if any(array.dtype.kind not in "fiub" or array.ndim > 1 for array in arrays):
        shapes = [f"{array.dtype} {list(array.shape)}" for array in arrays]
        raise Misuse(f"{who} shows {shapes}, neither vectors nor one uint8 picture [S, S, 3]: name its parts {names}")
    vector = np.concatenate([array.reshape(-1) for array in arrays]).astype(np.float32)
    if not proprioception:
        return {"agent_pos": vector}
    if proprioception > len(vector):
        raise Misuse(f"proprioception: {proprioception} of an observation of {len(vector)} numbers ({who})")
    return {"agent_pos": vector[:proprioception], "environment_state": vector}


def _numbers(value: Any, what: str) -> NDArray[np.float32]:
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise Misuse(f"{what} is {array.dtype} {list(array.shape)}, no numbers")
    return array.astype(np.float32)


def check_cameras(asked: Sequence[str], known: Sequence[str], who: str, left_empty: Sequence[str] = ()) -> None:
    """Raises Misuse for a camera that an environment does not have, or that it has and a policy would not be shown."""
    for unknown in (camera for camera in asked if camera not in known):
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f" (the nearest is {near[0]!r})" if near else ""
        listed = [f"observation.images.{name}" for name in known] or ["observation.image"]
        raise Misuse(
            f"{who} has no camera {unknown!r}{hint}, it shows {listed}: give the policy's pictures these names by "
            f"policy.rename {{{listed[0]}: observation.images.<the policy's>}}"
        )
    for hidden in (f"observation.images.{camera}" for camera in left_empty if camera in known):
        raise Misuse(
            f"{who} shows {hidden}, which policy.rename leaves empty by naming other cameras alone: write "
            f"{hidden}: {hidden} there, too"
        )


def describe(name: str, tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> Description:
    """Slots of a gymnasium id (a module to import may stand before it, "gym_pusht:gym_pusht/PushT-v0"), or of a
    function by the rule of `plugins`, called with the settings, and with `task` where there are tasks.

    Raises ValueError for a name that is neither.
    """
    limit = reading.max_steps
    if not is_function(name):
        if "/" not in name and "-v" not in name:
            close = difflib.get_close_matches(name, names(SIMULATORS), n=1)
            hint = f" (the nearest is {close[0]!r})" if close else ""
            simulators = ", ".join(names(SIMULATORS))
            raise ValueError(f"no environment {name!r}{hint}: {simulators}, a gymnasium id, or path/file.py:function")
        limit = find_registered(name).max_episode_steps if limit is None else limit
    arguments = {"name": name, "reading": reading, "settings": settings, "tasks": tasks}
    return Description(gymnasium_host, arguments, max(1, len(tasks)), limit)


def gymnasium_host(
    slots: int, *, name: str, reading: Reading, settings: Mapping[str, Any], tasks: Sequence[str] = ()
) -> SlotHost:
    """See `describe`."""

    def make(task: int) -> gymnasium.Env[Any, Any]:
        arguments = {"task": tasks[task]} if tasks else {}
        if not is_function(name):
            return registered(name, reading.max_steps, {**settings, **arguments})
        try:
            function = find(name, SIMULATORS)
        except ValueError as error:
            raise Misuse(str(error)) from error
        try:
            inspect.signature(function).bind(**settings, **arguments)
        except TypeError as error:
            took = f"{name} is defined as {function.__name__}{inspect.signature(function)}"
            raise Misuse(
                f"{took}, and called with environment.args {dict(settings)} and {arguments}: {error}"
            ) from error
        env: gymnasium.Env[Any, Any] = function(**settings, **arguments)
        return env

    return SlotHost(make, max(1, len(tasks)), reading)


def is_function(name: str) -> bool:
    """Whether a name is that of a function, in a file, installed or of a script, and not a gymnasium id."""
    return is_given(name) or name.rpartition(":")[0].endswith(".py") or name in names(SIMULATORS)


def find_registered(name: str) -> EnvSpec:
    """The gymnasium environment of an id; its package is imported. Raises Misuse where there is none."""
    module, _, env_id = name.rpartition(":")
    packages = ["gym_" + env_id.partition("/")[0].removeprefix("gym_"), bullet_safety.PACKAGE, "gymnasium_robotics"]
    for package in [module] if module else packages:
        if env_id not in gymnasium.registry and importlib.util.find_spec(package) is not None:
            imported = importlib.import_module(package)
            if "register_robotics_envs" in vars(imported):
                gymnasium.register_envs(imported)
    try:
        return gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise Misuse(f"{error} (pip install what has it: gym-pusht, gymnasium-robotics, ...)") from error


def registered(name: str, max_steps: int | None, settings: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """The environment of an id, which renders pictures, with a time limit."""
    spec = find_registered(name)
    if str(spec.entry_point).startswith(bullet_safety.PACKAGE):
        return bullet_safety.environment(spec, max_steps, settings)
    how = {"render_mode": "rgb_array", **settings}
    if max_steps is not None:
        how["max_episode_steps"] = max_steps
    env: gymnasium.Env[Any, Any] = gymnasium.make(spec, disable_env_checker=True, **how)
    return env


def as_picture(shown: Any, size: int, who: str, *, squeezed: bool = True) -> NDArray[np.uint8]:
    """uint8 [size, size, 3] of a rendered picture, by averages over areas. Not squeezed, its longer side is `size`, and
    a policy that reads squares pads it in its own way (`robot.letterbox`), as it does those of its data."""
    picture = np.asarray(shown)
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise Misuse(
            f"{who} renders {type(shown).__name__}, no uint8 picture [S, S, 3]: has it render_mode='rgb_array'?"
        )
    high, wide = picture.shape[:2]
    wanted = (size, size) if squeezed else (high * size // max(high, wide), wide * size // max(high, wide))
    if (high, wide) == wanted:
        return np.ascontiguousarray(picture)
    return np.asarray(Image.fromarray(picture).resize(wanted[::-1], Image.Resampling.BOX))
