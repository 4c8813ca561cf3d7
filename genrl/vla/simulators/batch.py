"""Simulators that step all their slots at once: the chunks and the ends of episodes, which are alike in all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Observation, Outcome, Run, no_expert

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
