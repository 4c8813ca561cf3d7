"""Rollouts on Ray actors, policy and simulators together: what crosses the network is the trained weights, once per
rollout, and the rollout, instead of observations and chunks at every decision.

Every actor has some of the slots, simulates them in its own process, and runs `collect` on them with a copy of
the policy. Episodes and noise are functions of the slot's number among all, so the whole is the rollout that one
process would have collected, up to the rounding of other batch sizes. An actor that dies or hangs is replaced; its
slots are not in this rollout, and their episodes are counted as dropped.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from genrl.vla.rollout.collect import RolloutPlan, collect
from genrl.vla.rollout.rollout import ChunkRollout, joined
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.environments import open_environment
from genrl.vla.simulators.ray_workers import actors as room
from genrl.vla.simulators.ray_workers import connected, placement
from genrl.vla.simulators.tables import FAILURES


class Part(NamedTuple):
    """What an actor has collected: of its slots, by the weights of this version, waited_s of it for simulators."""

    rollout: ChunkRollout
    version: int
    waited_s: float


class Collector:
    """What an actor is: a copy of the policy (and of DPPO's frozen one) and the environment of its slots."""

    def __init__(self, policy: Any, frozen: Any, simulation: Simulation, first_slot: int) -> None:
        device = "cuda" if connected().get_gpu_ids() else "cpu"
        self.policy, self.frozen = policy.to(device), None if frozen is None else frozen.to(device)
        self.env = open_environment(simulation)
        self.first_slot = first_slot

    def collect(
        self, weights: Mapping[str, Tensor], version: int, sampler: Any, plan: RolloutPlan
    ) -> Iterator[Part | None]:
        """None after every decision, that it goes on is heard of; the part at the end."""
        said: queue.SimpleQueue[Part | Exception | None] = queue.SimpleQueue()
        own = replace(plan, first_slot=self.first_slot + plan.first_slot)

        def work() -> None:
            torch.set_num_threads(1)  # as many actors as CPUs
            waited = self.env.waited_s
            try:
                put_weights(self.policy, weights)
                advance = partial(said.put, None)
                rollout = collect(self.env, self.policy, sampler, own, frozen=self.frozen, advance=advance)
                said.put(Part(rollout, version, self.env.waited_s - waited))
            except Exception as error:  # noqa: BLE001 - of the thread: raised again where it is waited for
                said.put(error)

        threading.Thread(target=work, daemon=True).start()
        while True:
            message = said.get()
            if isinstance(message, Exception):
                raise message
            yield message
            if message is not None:
                return


def trained_weights(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that training moves, on the CPU."""
    return {name: p.detach().cpu() for name, p in policy.named_parameters() if p.requires_grad}


@torch.no_grad()
def put_weights(policy: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `trained_weights` into a policy of the same kind."""
    own = dict(policy.named_parameters())
    for name, value in weights.items():
        own[name].copy_(value)


class RayRollouts:
    """`collect` on `actors` actors (0: one per CPU of the cluster).

    simulation: of all slots together; groups stay whole. cuda: the copies of the
    policy are on GPUs, of which the actors have equal shares; else on CPUs. timeout_s: the longest that an actor may
    take for a decision of all its slots, start_timeout_s for the first one, for which simulators are made. What is not
    trained (a frozen encoder, the statistics) is sent once, to an actor that is started; trained weights with every
    rollout, with a version that counts them. waited_s: seconds of the slowest actor's simulators; dropped: episodes;
    restarts: actors; parts: the slots of each actor in the newest rollout.
    Raises ValueError for GPUs that the cluster lacks, RuntimeError for an actor that is lost three times in a row. What
    `collect` raises comes through.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        actors: int = 0,
        cuda: bool = False,
        timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.num_envs, self.chunk, self.group_size = simulation.num_envs, simulation.chunk, simulation.group_size
        groups = self.num_envs // self.group_size
        self.max_steps = open_environment(replace(simulation, num_envs=self.group_size)).max_steps
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.waited_s, self.dropped, self.restarts, self.version = 0.0, 0, 0, 0
        self.parts: list[Tensor] = []
        count = min(room(actors), groups)
        self.gpus = gpu_share(count) if cuda else 0.0
        bounds = [groups * a // count * self.group_size for a in range(count + 1)]
        self._slots = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        self._simulation = simulation
        self._losses = [0] * count
        self._actors: list[Any] = []
        self._policies: tuple[Any, Any] | None = None

    def collect(
        self,
        policy: Any,
        sampler: Any,
        plan: RolloutPlan,
        *,
        frozen: Any = None,
        advance: Callable[[], None] = lambda: None,
    ) -> ChunkRollout:
        """As `collect.collect`, always with the same policy, whose weights may have moved.

        `advance` is called for as many messages as there are actors: about once per decision.
        """
        ray = connected()
        if self._policies is None:
            self._policies = ray.put(copy.deepcopy(policy).cpu()), ray.put(_on_cpu(frozen))
            self._actors = [self._actor(number) for number in range(len(self._slots))]
        self.version += 1
        work = ray.put(trained_weights(policy)), self.version, sampler, plan
        parts: dict[int, Part] = {}
        while not parts:  # unless all were lost, one turn
            parts = self._turn(work, advance)
        missing = [len(slots) for number, slots in enumerate(self._slots) if number not in parts]
        done = [parts[number] for number in sorted(parts)]
        if stale := {part.version for part in done} - {self.version}:
            raise RuntimeError(f"a Ray actor acted by weights {stale}, not by {self.version}")
        self.waited_s += max(part.waited_s for part in done)
        rollout = joined([part.rollout for part in done])
        self.dropped += sum(missing) + int(rollout.dropped.sum())
        sizes = [len(part.rollout.group) for part in done]
        self.parts = [torch.arange(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]
        return rollout

    def close(self) -> None:
        """End the actors; another rollout starts them again."""
        for actor in self._actors:
            connected().kill(actor)
        self._actors, self._policies = [], None

    def _turn(self, work: tuple[Any, ...], advance: Callable[[], None]) -> dict[int, Part]:
        """Ask all actors for their part, and wait: number -> part of those that were not lost."""
        ray = connected()
        heard, parts = 0, {}
        asked = {
            actor.collect.options(num_returns="streaming").remote(*work): number
            for number, actor in enumerate(self._actors)
        }
        deadline = dict.fromkeys(asked, time.monotonic() + self.start_timeout_s)
        while asked:
            soonest = min(asked, key=lambda stream: deadline[stream])
            ready, _ = ray.wait(list(asked), timeout=max(0.0, deadline[soonest] - time.monotonic()))
            stream = ready[0] if ready else soonest
            number = asked[stream]
            try:
                if not ready:
                    raise ray.exceptions.GetTimeoutError("it said nothing for the time that is allowed (timeout)")
                message = ray.get(next(stream))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                del asked[stream]
                self._replace(number, error)
                continue
            if message is None:
                deadline[stream] = time.monotonic() + self.timeout_s
                heard += 1
                if heard % len(self._actors) == 0:
                    advance()
            else:
                del asked[stream]
                parts[number], self._losses[number] = message, 0
        return parts

    def _replace(self, number: int, error: Exception) -> None:
        """Another actor for these slots, from the next rollout on."""
        self._losses[number] += 1
        if self._losses[number] >= FAILURES:
            raise RuntimeError(
                f"Ray actor {number} was lost {FAILURES} times in a row; the last time: {error}"
            ) from error
        connected().kill(self._actors[number])
        self._actors[number] = self._actor(number)
        self.restarts += 1

    def _actor(self, number: int) -> Any:
        assert self._policies is not None
        slots = self._slots[number]
        kind = connected().remote(Collector).options(**placement(self.gpus))
        return kind.remote(*self._policies, replace(self._simulation, num_envs=len(slots)), slots.start)


def gpu_share(actors: int) -> float:
    """Of a GPU for each actor, of those that the cluster has. Raises ValueError where it has none."""
    gpus = connected().cluster_resources().get("GPU", 0.0)
    if not gpus:
        raise ValueError(
            "environment.workers: ray acts with copies of the policy, which is on a GPU here, and the Ray cluster has "
            "none: another device rounds otherwise than the one that trains. Write ray_simulators: it stays here"
        )
    share = float(gpus) / actors / int(os.environ.get("WORLD_SIZE", "1"))
    return share if share < 1.0 else float(int(share))


def _on_cpu(frozen: Any) -> Any:
    return None if frozen is None else copy.deepcopy(frozen).cpu()
