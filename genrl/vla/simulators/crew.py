"""The workers of an environment: each has some of the slots, is waited for, and is replaced where it is lost."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from genrl.vla.simulators.contract import Description, Run
from genrl.vla.simulators.workers import Work, Worker, WorkerLost, report

logger = logging.getLogger(__name__)


class Link:
    """A worker and the thread that waits for it; what it says goes into `inbox` with this link.

    A worker that is started again gets a new link: what the old one had still to say is not taken for the new one's.
    """

    def __init__(self, worker: Worker, slots: range, inbox: queue.SimpleQueue[tuple[Link, Any]]) -> None:
        self.worker, self.slots, self.inbox = worker, slots, inbox
        self.open: list[int] = []
        """Slots that are to report, in the order of the work."""
        self.deadline = 0.0
        self.report = ""
        worker.start()
        self._outbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        if not worker.inline:
            threading.Thread(target=self._wait, daemon=True).start()

    def send(self, work: Work) -> None:
        """Never blocks, unless the worker is inline."""
        if self.worker.inline:
            self._do(work)
        else:
            self._outbox.put(work)

    def end(self, *, kill: bool) -> None:
        self._outbox.put(None)
        if kill:
            self.worker.kill()
        else:
            self.worker.close()

    def _wait(self) -> None:
        while (work := self._outbox.get()) is not None:
            self._do(work)

    def _do(self, work: Work) -> None:
        try:
            for message in self.worker.do(work):
                self.inbox.put((self, message))
        except WorkerLost as lost:
            self.inbox.put((self, lost))
        except Exception as error:  # noqa: BLE001 - in a thread: the round is told, and judges
            if self.worker.inline:
                raise
            self.inbox.put((self, WorkerLost(report(error, -1).report)))


class Crew:
    """`count` workers at most, with neighbouring slots each; started when they are needed."""

    def __init__(
        self,
        description: Description,
        worker: Callable[[Description, int], Worker],
        count: int,
        num_envs: int,
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        bounds = [num_envs * w // count for w in range(count + 1)]
        self.parts = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False) if pair[0] < pair[1]]
        self.workers = [worker(description, len(part)) for part in self.parts]
        self.links: list[Link] = []
        self.restarts = self.renewed = 0
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self._inbox: queue.SimpleQueue[tuple[Link, Any]] = queue.SimpleQueue()

    def start(self) -> None:
        if not self.links:
            pairs = zip(self.workers, self.parts, strict=True)
            self.links = [Link(worker, part, self._inbox) for worker, part in pairs]

    def renew(self, most: float) -> None:
        """Start those workers anew that hold more than so many bytes; they must have nothing to do."""
        for number, link in enumerate(self.links):
            held = link.worker.memory()
            if held > most:
                logger.warning(
                    "simulators: worker %d holds %.1f GB, more than environment.worker_gb: it is started anew",
                    number,
                    held / 1e9,
                )
                self._anew(link, kill=False)
                self.renewed += 1

    def send(self, link: Link, work: Work, slots: list[int]) -> None:
        """Give a worker something to do, of which it is to report these slots."""
        if not link.open:
            self.expect(link, starting=isinstance(work, Run) and not work.chunks)
        link.open += slots
        link.send(work)

    def expect(self, link: Link, *, starting: bool) -> None:
        """Begin to wait for the next message of a worker."""
        link.deadline = time.monotonic() + (self.start_timeout_s if starting else self.timeout_s)

    def next(self, links: Collection[Link]) -> tuple[Link, Any]:
        """The next message of any worker, WorkerLost for one that is too late, which is killed; its link may no longer
        be among `links`."""
        soonest = min(links, key=lambda link: link.deadline)
        try:
            return self._inbox.get(timeout=max(0.0, soonest.deadline - time.monotonic()))
        except queue.Empty:
            soonest.worker.kill()
            return soonest, WorkerLost("it was killed, having sent nothing for the time that is allowed (timeout)")

    def restart(self, link: Link) -> Link:
        """A new link instead of one whose worker is gone."""
        self.restarts += 1
        return self._anew(link, kill=True)

    def _anew(self, link: Link, *, kill: bool) -> Link:
        link.end(kill=kill)
        again = Link(link.worker, link.slots, self._inbox)
        self.links[self.links.index(link)] = again
        return again

    def end(self, *, kill: bool) -> None:
        links, self.links = self.links, []
        for link in links:
            link.end(kill=kill)
