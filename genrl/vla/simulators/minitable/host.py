"""MiniTable for workers: all slots of a process in one vectorised step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from genrl.vla.simulators.minitable.env import MiniTable
from genrl.vla.simulators.minitable.render import render
from genrl.vla.simulators.minitable.task import Keys
from genrl.vla.simulators.simulator import Draw, Frames, Outcome, Run


def host(slots: int, *, tasks: Sequence[int], chunk: int, image_size: int, max_steps: int) -> TableHost:
    """`slots` tables; see `MiniTable`."""
    return TableHost(slots, tasks=tasks, chunk=chunk, image_size=image_size, max_steps=max_steps)


class TableHost(MiniTable):
    """A MiniTable whose episodes are chosen from outside."""

    _episodes: Keys

    def run(self, work: Run) -> Iterator[Outcome]:
        """One message for all slots. Those of `begin` are reset by the table's own next-step auto-reset."""
        self._seed = 0
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        self._episodes = np.zeros(self.num_envs, dtype=np.uint64)
        self._ended[list(work.begin)] = True
        self._episodes[list(work.begin)] = list(work.begin.values())
        chunks = np.zeros((self.num_envs, self.chunk, 3), dtype=np.float32)
        for slot, chunk in work.chunks.items():
            chunks[slot] = chunk
        observation, _, terminated, truncated, info = self.step(chunks)
        slots = np.array(sorted(work.begin.keys() | work.chunks.keys()), dtype=np.int64)
        said = self.task_description
        yield Outcome(
            slots,
            {name: value[slots] for name, value in observation.items()},
            info["rewards"][slots],
            info["n_executed"][slots],
            terminated[slots],
            truncated[slots],
            info["is_success"][slots],
            [said[slot] for slot in slots],
            3,
        )

    def draw(self, work: Draw) -> Frames:
        """The tables from above."""
        return Frames(render(self.state.rows(np.array(work.slots)), work.size))

    def _keys(self) -> Keys:
        return self._episodes
