"""What rollouts step, what simulators are told, and what crosses between the two.

Nothing here imports torch: a worker begins in a second. Nothing is made before it is needed: a graphics context that is
made in one process and used in another breaks.

A slot does one of two things in a round: it begins an episode by its number, or executes a chunk. The other side
(`tables.Simulators`) says which, and counts the episodes; so it does not matter which process has the slot.
Episode e is of task `e mod tasks`, and begins from a start that is a function of `e div tasks`.

Simulators that step all their slots at once: the chunks and the ends of episodes, which are alike in all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from genrl.vla.config.names import EXPERTS

Observation = dict[str, NDArray[Any]]
Keys = NDArray[np.uint64]
Step = tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]
"""Observation, rewards summed over the chunk, terminated, truncated [B], info."""


class Misuse(ValueError):
    """An environment that does not keep the contract, or cannot be made here: another attempt would not help."""


def no_expert(who: str) -> Misuse:
    """What is raised where nobody knows what to do."""
    return Misuse(
        f"{who} has no expert; {', '.join(EXPERTS.built_in)} have one, and so has an environment of your own with a "
        "method expert_chunk(horizon) (docs/vla_simulators.md)"
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How an environment is read and stepped."""

    chunk: int
    """Actions of a chunk that are executed."""
    max_steps: int | None = None
    """Actions until an episode is truncated; None: the simulator's own limit."""
    reward: Literal["success", "environment"] = "success"
    """1 at success, or the environment's."""
    image_size: int = 0
    """Pixels of a square picture; 0: none."""
    points: int = 0
    """Points of a cloud, "environment_points" float32 [N, 3]; 0: none."""
    cameras: tuple[str, ...] = ()
    """Those whose pictures are shown, each as "pixels/<camera>"; where there are none, one as "pixels"."""
    left_empty: tuple[str, ...] = ()
    """Cameras that the policy has and is shown none of; an environment that shows one of that name is refused."""
    goals: int = 0
    """Fixed starts of each task, by the seed; 0: a new one per episode."""
    seed: int = 0
    instruction: str = ""
    """gymnasium: the sentence, if the environment has no `task_description`."""
    success_key: str | None = "is_success"
    """gymnasium: the entry of info that says success; None: it knows rewards alone."""
    cost_key: str | None = None
    """gymnasium: the entry of info that is the cost of an action; None: it knows none."""
    proprioception: int = 0
    """gymnasium: how many of the first numbers of an observation are `agent_pos`."""


@dataclass(frozen=True, kw_only=True)
class Simulation(Reading):
    """Slots of a simulator, and where they run."""

    name: str = field(kw_only=False)
    """minitable, metaworld, point_maze, fetch, reacher, maniskill, libero, a gymnasium id ("gym_pusht/PushT-v0"), an
    installed simulator, or "file.py:function", which returns a gymnasium environment."""
    num_envs: int
    """Slots."""
    tasks: tuple[str, ...] = ()
    """Instructions (or "put", "touch") of MiniTable, names of Meta-World, of PointMaze and Fetch ("umaze", "push"), of
    LIBERO ("libero_spatial", "libero_10/3"), ids of ManiSkill, or what the function is called with as `task`; where
    empty: put, all of Meta-World, PointMaze and Fetch, libero_spatial, PickCube-v1."""
    group_size: int = 1
    """Consecutive slots that see the same episodes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`, of the function, of ManiSkill's make, or of `libero.host`."""
    workers: int | Literal["ray"] = 0
    """Processes, 0 for this one, or Ray actors."""
    ray_actors: int = 0
    """How many; 0: one per CPU of the cluster."""
    timeout_s: float = 60.0
    """The longest that one environment may take for a chunk."""
    start_timeout_s: float = 120.0
    """The longest for beginning an episode, for which it may have to be made."""
    render_size: int = 128
    """Pixels of the pictures of `render`."""

    def __post_init__(self) -> None:
        if min(self.num_envs, self.chunk, self.group_size) < 1 or self.num_envs % self.group_size:
            raise ValueError(
                "num_envs, chunk and group_size must be positive and groups complete; got "
                f"{self.num_envs}, {self.chunk} and {self.group_size}"
            )
        if min(self.timeout_s, self.start_timeout_s) <= 0:
            raise ValueError(f"timeouts are positive seconds, got {self.timeout_s} and {self.start_timeout_s}")


class Environment(Protocol):
    """A vector environment of `num_envs` slots whose action is a chunk [B, C, D] of float32, as the policy meant it.

    A step executes up to C actions in each slot and stops where the episode ends; it returns the observation after the
    last executed action (the final one, where the episode ended) and the sum of the rewards. info: "rewards" float32
    [B, C] (0 where nothing was executed), "n_executed" int64 [B] and "is_success" bool [B]; it may have "costs" float32
    [B, C], of the executed actions, where the environment knows costs; and it may have "dropped" bool [B]: the
    simulator was lost, the episode ends with this row as truncated, executed nothing, shows the last
    observation again, and is not to be learnt from.

    Next-step auto-reset, as gymnasium defines it: the decision after an end ignores its action, executes nothing, and
    returns the first observation of the next episode with reward 0. Slots of one group see the same episodes, which are
    functions of the slots' numbers among those of all processes, from `first_slot` on.

    max_steps: actions until an episode is truncated; None where only the environment itself knows. in_order: of
    `Description`. waited_s: seconds
    spent on simulators so far. dropped: episodes lost to simulators that died, hung or raised. restarts: workers that
    had to be started again.
    """

    num_envs: int
    chunk: int
    group_size: int
    first_slot: int
    in_order: bool
    waited_s: float
    dropped: int

    @property
    def task_description(self) -> list[str]:
        """The instruction of each slot."""
        ...

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in every slot: episode 0 of a seed, or without one the next. options["episodes"]: uint64
        [B], the numbers of the episodes instead (`evaluate.evaluation_episodes`); those after are the seed's.
        options["once"]: a slot whose episode has ended begins no other: it may rest, whatever its action; with it
        "episodes" may be fewer, [n], of the first n slots, and the others rest from the start."""
        ...

    def step(self, actions: NDArray[np.float32], /) -> Step: ...

    @property
    def max_steps(self) -> int | None: ...

    @property
    def restarts(self) -> int: ...

    @property
    def action_dim(self) -> int:
        """D of the chunks, known after the first reset."""
        ...

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Pictures of some slots as they are now, [n, render_size, render_size, 3]."""
        ...

    def close(self) -> None: ...


class Outcome(NamedTuple):
    """What m slots show after a chunk, or after the beginning of an episode (n_executed 0).

    slots int64 [m], observation name -> [m, ...], rewards float32 [m, C], n_executed int64 [m], terminated, truncated,
    success bool [m], instruction: m sentences, action_dim: numbers in an action, costs float32 [m, C]; None: not known.
    """

    slots: NDArray[np.int64]
    observation: Observation
    rewards: NDArray[np.float32]
    n_executed: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    instruction: list[str]
    action_dim: int
    costs: NDArray[np.float32] | None = None


class Fault(NamedTuple):
    """The environment of a slot raised, and is gone; misuse: so would the next one."""

    slot: int
    report: str
    misuse: bool


Message = Outcome | Fault | NDArray[Any]


class Run(NamedTuple):
    """A round of some slots, in the order of their numbers: `begin` slot -> episode, `chunks` slot -> [C, D]."""

    begin: dict[int, int]
    chunks: dict[int, NDArray[np.float32]]


class Ask(NamedTuple):
    """What do some slots look like, in pictures of so many pixels? Or what would the expert do there, so many actions?

    The answer is an array: uint8 [m, number, number, 3], or float32 [m, number, D].
    """

    what: Literal["render", "advise"]
    slots: list[int]
    number: int


class Host(Protocol):
    """The simulators of some slots."""

    def run(self, work: Run) -> Iterator[Message]:
        """Outcomes (or faults) as they come, in the order of the slots."""
        ...

    def render(self, slots: list[int], size: int) -> NDArray[np.uint8]:
        """See `Ask`."""
        ...

    def advise(self, slots: list[int], horizon: int) -> NDArray[np.float32]:
        """See `Ask`. Raises Misuse where there is no expert; the slots stay as they are."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Description:
    """A host that can be sent to another process: a function of a module, and what it is called with."""

    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: int = 1
    """How many its episodes have; they take turns over slots and episodes."""
    max_steps: int | None = None
    """The time limit, if it is known."""
    in_order: bool = False
    """Its tasks have listed starts, and an evaluation goes through them from the first one on."""

    def host(self, slots: int) -> Host:
        """Make it, for so many slots."""
        host: Host = self.function(slots, **self.settings)
        return host


def episode_keys(seed: int, slot: NDArray[np.generic], count: NDArray[np.generic]) -> Keys:
    """Numbers of the episodes `count` [n] of the slots `slot` [n] of a run: different in all three, uint64 [n]."""
    start = spread(np.array([seed % 2**64], dtype=np.uint64))
    # Spread after each part: sums of neighbouring seeds, slots and counts would meet.
    return spread(spread(start + slot.astype(np.uint64)) + count.astype(np.uint64))


def spread(keys: Keys) -> Keys:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) after one increment: spreads neighbours, one to one."""
    z = keys + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


Flags = NDArray[np.bool_]


class Batch(ABC):
    """A `contract.Host` whose slots begin, act and are observed together.

    An episode ends with its success, where the simulator says so, or after max_steps actions. One message for all
    slots: first the chunks, in lock step, then the episodes that begin.
    """

    def __init__(self, slots: int, chunk: int, max_steps: int, action_dim: int) -> None:
        self.slots, self.chunk, self.max_steps, self.action_dim = slots, chunk, max_steps, action_dim
        self.elapsed = np.zeros(slots, dtype=np.int64)

    @abstractmethod
    def begin(self, episodes: Mapping[int, int]) -> None:
        """Begin episodes by their numbers in some slots; the others stay as they are."""

    @abstractmethod
    def act(self, actions: NDArray[np.float32], alive: Flags) -> tuple[NDArray[np.float32], Flags, Flags]:
        """One action [n, D] in the slots that are alive: rewards [n], success and ends [n]; the others do not count."""

    @abstractmethod
    def observe(self) -> Observation:
        """name -> [n, ...]: each slot as it was when it began, ended, or was last acted in."""

    @abstractmethod
    def instructions(self) -> list[str]:
        """The instruction of every slot."""

    @abstractmethod
    def render(self, slots: list[int], size: int) -> NDArray[np.uint8]:
        """See `contract.Host`."""

    def keep(self, rows: Flags) -> None:  # noqa: B027 - most simulators leave slots that are over as they are
        """Keep what these slots show, for they are over for this round: where a simulator steps all slots along, it is
        what `observe` is to return."""

    def run(self, work: Run) -> Iterator[Outcome]:
        """See `contract.Host`."""
        chunks = np.zeros((self.slots, self.chunk, self.action_dim), dtype=np.float32)
        for slot, chunk in work.chunks.items():
            chunks[slot] = chunk
        alive = np.isin(np.arange(self.slots), list(work.chunks))
        rewards = np.zeros((self.slots, self.chunk), dtype=np.float32)
        n_executed = np.zeros(self.slots, dtype=np.int64)
        terminated, truncated, succeeded = np.zeros((3, self.slots), dtype=np.bool_)
        for k in range(self.chunk):
            if not alive.any():
                break
            paid, success, over = self.act(chunks[:, k], alive)
            rewards[alive, k] = paid[alive]
            n_executed += alive
            self.elapsed += alive
            succeeded |= alive & success
            terminated |= alive & (success | over)
            truncated |= alive & ~terminated & (self.elapsed >= self.max_steps)
            ended = alive & (terminated | truncated)
            # Those that end now, while they still show their end; with the chunk's last action also those that go on.
            self.keep(ended | alive if k == self.chunk - 1 else ended)
            alive = alive & ~ended
        # After the chunks: a simulator in lock step would move the new episodes along.
        if work.begin:
            self.elapsed[list(work.begin)] = 0
            self.begin(work.begin)
        at = np.array(sorted(work.begin.keys() | work.chunks.keys()), dtype=np.int64)
        instructions = self.instructions()
        yield Outcome(
            at,
            {name: value[at] for name, value in self.observe().items()},
            rewards[at],
            n_executed[at],
            terminated[at],
            truncated[at],
            succeeded[at],
            [instructions[slot] for slot in at],
            self.action_dim,
        )

    def advise(self, slots: list[int], horizon: int) -> NDArray[np.float32]:
        """See `contract.Host`; nobody knows, where a simulator does not say it."""
        raise no_expert(type(self).__name__)

    def close(self) -> None:  # noqa: B027
        """Nothing, where nothing is open."""
