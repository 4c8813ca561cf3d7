"""Rollouts of earlier weights (`runtime.versions`): Ray actors act for the next iterations while one is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.vla.rollout.collect import RolloutPlan
from genrl.vla.rollout.ray_rollout import RayRollouts
from genrl.vla.rollout.rollout import ChunkRollout
from genrl.vla.rollout.sampling import Acting

POLL_S = 0.2
"""How long this thread sleeps without looking at signals."""


class Acted(NamedTuple):
    """A rollout; parts: the slots that were sampled in one batch; waited_s: of the simulators; dropped: episodes;
    seconds: that it took."""

    rollout: ChunkRollout
    parts: list[Tensor]
    waited_s: float
    dropped: int
    seconds: float


@dataclass
class Underway:
    """A rollout that the second thread collects. decided: decisions of it so far."""

    decided: int = 0
    work: Future[Acted] | None = None


class Closed(Exception):
    """Nobody waits for rollouts any more."""


class Ahead:
    """The rollouts on their way, one after the other in a second thread."""

    def __init__(self, far: RayRollouts) -> None:
        self.far = far
        self.underway: dict[int, Underway] = {}
        self._closing = Event()
        self._thread = ThreadPoolExecutor(1, "acting", torch.set_num_threads, (torch.get_num_threads(),))

    def begin(self, acting: Acting, weights: Mapping[str, Tensor], plan: RolloutPlan) -> None:
        """Act for an iteration by these weights, after those that are on their way already. The actors are made for
        the first one, from the policy as it is: its caller waits for it, and trains nothing before."""
        underway = self.underway[plan.iteration] = Underway()
        underway.work = self._thread.submit(self._acted, underway, acting, weights, plan)

    def take(self, iteration: int, advance: Callable[[int], None]) -> Acted:
        """The rollout of this iteration, once it is there. advance: told of decisions, in this thread."""
        underway, told = self.underway[iteration], 0
        assert underway.work is not None
        while not wait([underway.work], timeout=POLL_S).done:
            if (decided := underway.decided) > told:
                advance(decided - told)
                told = decided
        del self.underway[iteration]
        return underway.work.result()

    def close(self) -> None:
        """End what is on its way, at its next decision."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _acted(self, underway: Underway, acting: Acting, weights: Mapping[str, Tensor], plan: RolloutPlan) -> Acted:
        far, begun = self.far, time.perf_counter()
        waited, dropped = far.waited_s, far.dropped

        def advance() -> None:
            if self._closing.is_set():
                raise Closed
            underway.decided += 1

        policy, sampler, frozen = acting
        rollout = far.collect(policy, sampler, plan, frozen=frozen, weights=weights, advance=advance)
        seconds = time.perf_counter() - begun
        return Acted(rollout, far.parts, far.waited_s - waited, far.dropped - dropped, seconds)
