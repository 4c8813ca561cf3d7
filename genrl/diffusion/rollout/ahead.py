"""Samples of earlier weights (`running.Versions`): iterations that are drawn and scored while an earlier one is
trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event

import torch

from genrl.diffusion.config.schema import Config
from genrl.diffusion.rollout.ray_rollouts import Order, RayRollouts, unpacked
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts, Sheet, Worker, gathered, handed_on, jobs_of
from genrl.diffusion.rollout.scoring import Scorers, Scoring
from genrl_rewards.compose import Running

POLL_S = 0.2
"""How long this thread sleeps without looking at signals."""


@dataclass
class Underway:
    """An iteration that the second thread draws, and the third one scores."""

    sheet: Sheet
    scoring: Scoring
    count: int
    """Micro-batches that this process has of it."""
    drawn: SimpleQueue[tuple[int, MicroBatch]] = field(default_factory=SimpleQueue)
    """As they came (`unpacked`): they wait on the CPU."""
    beaten: Event = field(default_factory=Event)
    """Whether something was heard of the workers since it was asked last."""
    calls: int = 0
    """Model calls of what was drawn."""
    work: Future[None] | None = None


class Ahead:
    """The iterations on their way. It ends the workers that draw them when it is closed.

    device: of the samples that are taken. closing: is set where nobody waits for scores any more.
    """

    def __init__(self, far: RayRollouts, scorers: Scorers, device: torch.device, closing: Event) -> None:
        self.far, self.scorers, self.device, self.closing = far, scorers, device, closing
        self.underway: dict[int, Underway] = {}
        self._thread = ThreadPoolExecutor(1, "drawing", torch.set_num_threads, (torch.get_num_threads(),))

    def begin(self, config: Config, sheet: Sheet, order: Order, worker: Worker) -> None:
        """Draw and score an iteration, after those that are on their way already."""
        scoring = Scoring(self.scorers, sheet.rows, sheet.group.tolist(), background=True, beat=worker.beat)
        count = len(range(worker.process, len(sheet.plan), worker.num_processes))
        underway = self.underway[sheet.iteration] = Underway(sheet, scoring.__enter__(), count)
        place = (worker.process, worker.num_processes, worker.member, worker.members)
        here = Worker(*place, beat=underway.beaten.set)  # the run is told by the thread that waits

        def counted(calls: int) -> None:
            underway.calls += calls

        finishing = self.far.drawn(order, jobs_of(config, sheet, here), here, counted)

        def work() -> None:
            for item in handed_on(finishing, scoring, here):
                underway.drawn.put(item)

        underway.work = self._thread.submit(work)

    def take(self, iteration: int, worker: Worker, *, running: Mapping[str, Running]) -> tuple[Rollouts, int]:
        """The samples of this iteration, once all are there, and the model calls that they took."""
        underway = self.underway[iteration]
        drawn = self._heard(underway, worker)
        rollouts = gathered(underway.sheet, drawn, underway.scoring, worker, running=running)
        del self.underway[iteration]
        underway.scoring.__exit__()
        return rollouts, underway.calls

    def close(self) -> None:
        """End the workers, and what is on its way."""
        self.closing.set()
        self.far.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for underway in self.underway.values():
            underway.scoring.__exit__()

    def _heard(self, underway: Underway, worker: Worker) -> Iterator[tuple[int, MicroBatch]]:
        """What the second thread draws, as it comes. Raises what went wrong there."""
        assert underway.work is not None
        for _ in range(underway.count):
            with worker.timed("sample"):
                while True:
                    if underway.beaten.is_set():
                        underway.beaten.clear()
                        worker.beat()
                    try:
                        position, micro_batch = underway.drawn.get(timeout=POLL_S)
                        break
                    except Empty:
                        if underway.work.done():
                            underway.work.result()
            yield position, unpacked(micro_batch, self.device)
