"""Demonstrations of scripted experts by the simulator's name, the successful episodes of an environment's expert; and
worlds in which methods make data themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genrl.config.plugins import find
from genrl.runtime.folder.hub import local_folder
from genrl.vla.config import sections as settings
from genrl.vla.config.files import is_recording
from genrl.vla.config.names import EXPERTS, WORLDS
from genrl.vla.data.frames import Shown, columns_of_openpi, episode_frames
from genrl.vla.data.lerobot_dataset import Episode, open_dataset
from genrl.vla.data.recordings import Steps, episodes_of, read_steps
from genrl.vla.policies.policy import (
    ACTION,
    ENVIRONMENT,
    IMAGE,
    IMAGES,
    POINTS,
    STATE,
    TOKENS,
    Batch,
    tokenise,
    vocabulary,
)
from genrl.vla.simulators.contract import episode_keys

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig
    from genrl.vla.policies.policy import Batch


Numbers = NDArray[np.float32]


def demonstrated(
    name: str,
    tasks: Sequence[str],
    count: int,
    *,
    seed: int,
    max_steps: int | None = None,
    image_size: int = 0,
    points: int = 0,
    cameras: Sequence[str] = (),
) -> Shown:
    """`count` successful episodes of a simulator's expert, of each task where it has several, with LeRobot's columns.

    max_steps: the longest that counts, None for the simulator's own limit; image_size, points: 0 for none. cameras: of
    libero, whose pictures are then "observation.images.<camera>".
    Raises ValueError for a simulator without an expert.
    """
    if name not in EXPERTS.built_in:
        experts = ", ".join(EXPERTS.built_in)
        raise ValueError(
            f"demonstrations.expert: {name} has no scripted expert; give a dataset instead ({experts} have one)"
        )
    how: dict[str, Any] = {"seed": seed, "max_steps": max_steps, "image_size": image_size, "points": points}
    how |= {"cameras": cameras} if cameras else {}
    show: Shown = find(name, EXPERTS)(tasks, count, **how)
    return show


World = Any
"""A simulator whose rules are known, so that methods can play in it, look at it, and say what is fulfilled: one of
`WORLDS`, as `playground.minitable.world.TableWorld`."""


def world_of(config: VLAConfig, default: Sequence[str] = ()) -> World:
    """The world of a configuration; default: its tasks, where the configuration names none."""
    env = config.environment
    world: World = find(env.name, WORLDS)(env.tasks or default, env.max_steps)
    return world


Look = Callable[[], NDArray[Any]]
"""What an environment shows now."""
Act = Callable[[dict[str, NDArray[np.float64]]], NDArray[Any]]
"""The expert's action from what is observed; it is clipped to [-1, 1]."""


def expert_episodes(
    tasks: Sequence[str],
    make: Callable[[str], Any],
    expert: Callable[[Any], Act],
    count: int,
    *,
    seed: int,
    max_steps: int,
    image_size: int = 0,
    points: int = 0,
    cameras: Sequence[str] = (),
) -> Iterator[Episode]:
    """`count` successful episodes of every task, with LeRobot's columns. make: from a task to an environment of
    LeRobot's names, with actions in [-1, 1] and info["success"] (or gymnasium's "is_success"); expert: for an
    environment.

    `STATE` and `ENVIRONMENT` [T, ...], `ACTION` [T, A] in [-1, 1], `IMAGE` (or each of the cameras) uint8
    [T, S, S, 3] and `POINTS` [T, N, 3] where image_size and points are not 0, "next.reward" (1 at success),
    "next.done", "next.success" [T, 1].
    An episode ends with its success; those that are not over in max_steps are left out, and others taken. A function of
    the seed, and of no rollout's starts.
    Raises RuntimeError where fewer than one attempt in five succeeds.
    """
    names: dict[str, Sequence[str]] = {IMAGES + camera: [camera] for camera in cameras}
    for task in tasks:
        env, won, attempt = make(task), 0, 0
        while won < count:
            if attempt >= 5 * count + 5:
                raise RuntimeError(
                    f"the expert of {task} succeeded in {won} of {attempt} episodes of at most {max_steps} steps: "
                    "allow more steps"
                )
            # Hashed once, where a rollout's start is hashed twice (`simulator.seed_of`): of one seed they are others.
            key = episode_keys(seed, np.array([0xE]), np.array([attempt]))[0]
            looks = (names or {IMAGE: []}) if image_size else {}
            look: dict[str, Look] = {name: partial(env.picture, image_size, *camera) for name, camera in looks.items()}
            look |= {POINTS: partial(env.points, points)} if points else {}
            episode = _episode(env, expert(env), int(key >> np.uint64(33)), max_steps, look)
            attempt += 1
            if episode is not None:
                won += 1
                yield episode
        env.close()


def _episode(env: Any, act: Act, seed: int, max_steps: int, look: dict[str, Look]) -> Episode | None:
    """One episode of the expert, or None where it does not succeed. look: column -> what it shows."""
    observation, _ = env.reset(seed=seed)
    states, surroundings, actions = [], [], []
    shown: dict[str, list[Any]] = {name: [] for name in look}
    for _ in range(max_steps):
        states.append(observation["agent_pos"].astype(np.float32))
        surroundings.append(observation["environment_state"].astype(np.float32))
        for name, value in look.items():
            shown[name].append(value())
        actions.append(np.clip(act(observation), -1.0, 1.0).astype(np.float32))
        observation, _, _, _, info = env.step(actions[-1])
        if info["success" if "success" in info else "is_success"]:
            break
    else:
        return None
    last = (np.arange(len(actions)) == len(actions) - 1)[:, None]
    columns: dict[str, NDArray[Any]] = {
        STATE: np.stack(states),
        ENVIRONMENT: np.stack(surroundings),
        ACTION: np.stack(actions),
        "next.reward": last.astype(np.float32),
        "next.done": last,
        "next.success": last,
    }
    columns |= {name: np.stack(pictures) for name, pictures in shown.items()}
    return Episode([env.task_description] * len(actions), columns)


def frames_of(config: VLAConfig, policy: Any) -> tuple[Batch, tuple[str, ...]]:
    """The frames that are imitated, for the policy (or for the new one that is to be made), and the words in them.

    Raises ValueError for an environment that has no expert, and for a data set without what the policy reads, clouds
    of points among it.
    """
    source = config.demonstrations
    reader = config.policy.new if policy is None else policy
    assert source is not None and reader is not None
    inputs = read_by(config.policy.new) if policy is None else policy.inputs
    if source.dataset is not None and POINTS in inputs:
        raise ValueError("demonstrations.dataset: data sets hold no clouds of points; write demonstrations.expert: N")
    steps = recorded(config)
    if steps is not None:
        inputs = tuple(name for name in inputs if name != ENVIRONMENT or config.environment.proprioception)
        demonstrated_steps = _recorded(config, steps, inputs)
    elif source.dataset is not None:
        demonstrated_steps = dataset_episodes(config, source.dataset, inputs, hidden=getattr(policy, "left_empty", ()))
    else:
        cameras = [name.removeprefix(IMAGES) for name in inputs if name.startswith(IMAGES)]
        demonstrated_steps = _expert(config, reader.image_size, reader.points if POINTS in inputs else 0, cameras)
    words = vocabulary(demonstrated_steps.texts)
    tokens_of = partial(tokenise, words=words) if policy is None else policy.tokenise
    frames = episode_frames(
        demonstrated_steps.episodes, tokens_of, inputs=inputs, horizon=reader.horizon, rest=demonstrated_steps.rest
    )
    return frames, words


def read_by(new: settings.NewPolicy | None) -> tuple[str, ...]:
    """What a new policy will read."""
    assert new is not None
    looks = {IMAGE: new.image_size, POINTS: new.points, STATE: True, ENVIRONMENT: not new.looks, TOKENS: True}
    return tuple(name for name, used in looks.items() if used)


def dataset_episodes(
    config: VLAConfig, folder: str, inputs: Sequence[str], also: Sequence[str] = (), hidden: Sequence[str] = ()
) -> Shown:
    """The episodes of a LeRobotDataset with what a policy reads, its actions, and these columns beside them. Raises
    ValueError for one that lacks any of them, or that has pictures (hidden) which `policy.rename` keeps from it."""
    assert config.demonstrations is not None
    dataset, camera = open_dataset(local_folder(folder, "dataset")), config.demonstrations.camera
    name = config.environment.name
    world = world_of(config) if name in WORLDS.built_in else None
    columns = [camera if name == IMAGE else name for name in inputs if name != TOKENS]
    pictures = [name for name in columns if name == camera or name.startswith(IMAGES)]
    missing = [name for name in pictures if name not in dataset.cameras]
    if missing:
        key = "demonstrations.camera" if IMAGE in inputs else "policy.rename"
        raise ValueError(f"{key}: {folder} has no pictures named {missing}, only {dataset.cameras}")
    for name in (name for name in hidden if name in dataset.cameras):
        raise ValueError(
            f"policy.rename: it leaves {name} empty by naming other pictures alone, and {folder} has it: write "
            f"{name}: {name} there, too"
        )
    held, stored = dataset.features, columns_of_openpi(dataset)
    columns = [stored.get(name, name) for name in (*columns, *also, ACTION)]
    if lacking := [name for name in columns if name not in held]:
        text = f"{folder} has no column {lacking[0]!r}; it has {', '.join(sorted(held))}"
        raise ValueError(f"demonstrations.dataset: {text}")
    width = int(held[columns[-1]]["shape"][-1])
    if world is not None and width != world.action_dim:
        text = f"{folder} has actions of {width} numbers, {name}'s have {world.action_dim}"
        raise ValueError(f"demonstrations.dataset: {text}: give demonstrations of environment.name")
    # a policy may learn all that a world can say; elsewhere what the demonstrations say is all that is known
    texts = [*dataset.tasks.values(), *(() if world is None else world.known)]
    renamed = {other: name for name, other in stored.items()} | ({camera: IMAGE} if IMAGE in inputs else {})
    episodes = (
        episode._replace(columns={renamed.get(key, key): value for key, value in episode.columns.items()})
        for episode in dataset.read(columns)
    )
    return Shown(texts, episodes, None if world is None else world.rest)


def recorded(config: VLAConfig) -> Steps | None:
    """The steps of `demonstrations.dataset`, where it is a file or folder of them, with the reward that the environment
    pays here; None elsewhere. Raises ValueError for what cannot be read."""
    source, env = config.demonstrations, config.environment
    if source is None or source.dataset is None or not is_recording(Path(source.dataset)):
        return None
    steps = read_steps(Path(source.dataset), success_key=env.success_key, cost_key=env.cost_key)
    return steps._replace(reward=steps.success.astype("float32")) if env.reward == "success" else steps


def _recorded(config: VLAConfig, steps: Steps, inputs: Sequence[str]) -> Shown:
    env = config.environment
    if any(name.startswith(IMAGE) for name in inputs):
        raise ValueError("demonstrations.dataset: files of steps hold no pictures; write policy.new.image_size: 0")
    if env.instruction is None:
        raise ValueError("environment.instruction: files of steps hold no sentences; write the one of the task")
    recorded_episodes = episodes_of(steps, instruction=env.instruction, proprioception=env.proprioception)
    return Shown([env.instruction], recorded_episodes, None)


def _expert(config: VLAConfig, image_size: int, points: int, cameras: Sequence[str]) -> Shown:
    assert config.demonstrations is not None and config.demonstrations.expert is not None
    env, count = config.environment, config.demonstrations.expert
    how: dict[str, Any] = {"seed": config.seed, "max_steps": env.max_steps, "image_size": image_size}
    return demonstrated(env.name, env.tasks or (), count, points=points, cameras=cameras, **how)
