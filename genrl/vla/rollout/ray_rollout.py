"""Rollouts on Ray actors, policy and simulators together: what crosses the network is the trained weights, once per
rollout, and the rollout, instead of observations and chunks at every decision.

Every actor has some of the groups, simulates them in its own process, and runs `collect` on them with a copy of the
policy. Episodes and noise are functions of the slot's number among all, so the whole is the rollout that one process
would have collected, up to the rounding of other batch sizes. An actor that dies or hangs is replaced; its slots are
not in this rollout, and their episodes are counted as dropped.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from genrl.runtime.loop import ray_cluster
from genrl.runtime.loop.ray_cluster import connected
from genrl.runtime.weights.devices import use_tf32, without_cudnn_attention
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan, collect, joined
from genrl.vla.simulators.contract import Description, Fault, Simulation
from genrl.vla.simulators.ray_workers import Actor
from genrl.vla.simulators.ray_workers import actors as room
from genrl.vla.simulators.tables import FAILURES, open_environment
from genrl.vla.simulators.workers import Crew, Worker, WorkerLost


class Assignment(NamedTuple):
    """What an actor is to do: a rollout of its slots by these weights (a reference) of this version."""

    weights: Any
    version: int
    sampler: Any
    plan: RolloutPlan


class Part(NamedTuple):
    """What an actor has collected: of its slots, by the weights of this version, waited_s of it for simulators."""

    rollout: ChunkRollout
    version: int
    waited_s: float


class ActingHost:
    """The environment of some groups of slots, and a copy of the policy (and of DPPO's frozen one)."""

    def __init__(self, groups: int, *, policies: Any, simulation: Simulation, tf32: bool | None) -> None:
        without_cudnn_attention()  # as where the policy is trained
        use_tf32(tf32)
        policy, frozen = connected().get(policies)
        device = "cuda" if connected().get_gpu_ids() else "cpu"
        self.policy, self.frozen = policy.to(device), None if frozen is None else frozen.to(device)
        self.env = open_environment(replace(simulation, num_envs=groups * simulation.group_size))

    def run(self, work: Assignment) -> Iterator[Part | Exception | None]:
        """None after every decision, that it goes on is heard of; at the end the part, or what was raised."""
        messages: queue.SimpleQueue[Part | Exception | None] = queue.SimpleQueue()

        def act() -> None:
            torch.set_num_threads(1)  # as many actors as CPUs
            waited = self.env.waited_s
            try:
                put_weights(self.policy, connected().get(work.weights))
                advance = partial(messages.put, None)
                rollout = collect(self.env, self.policy, work.sampler, work.plan, frozen=self.frozen, advance=advance)
                messages.put(Part(rollout, work.version, self.env.waited_s - waited))
            except Exception as error:  # noqa: BLE001 - of the thread: raised again where it is waited for
                messages.put(error)

        # `collect` returns at its end, and the caller waits for a sign of life after every decision.
        threading.Thread(target=act, daemon=True).start()
        while (message := messages.get()) is None:
            yield None
        yield message

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def trained_weights(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that training moves, on the CPU."""
    return {name: p.detach().cpu() for name, p in policy.named_parameters() if p.requires_grad}


@torch.no_grad()
def put_weights(policy: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `trained_weights` into a policy of the same kind."""
    parameters = dict(policy.named_parameters())
    for name, value in weights.items():
        parameters[name].copy_(value)


class RayRollouts:
    """`collect` on `actors` actors (0: one per CPU of the cluster).

    simulation: of all slots together; groups stay whole. cuda: the copies of the policy are on GPUs, of which the
    actors have equal shares; else on CPUs. timeout_s: the longest that an actor may take for a decision of all its
    slots, start_timeout_s for the first one, for which simulators are made. tf32: `devices.use_tf32`, as where the
    policy is trained. What is not trained (a frozen encoder, the statistics) is sent once, to an actor that is started;
    trained weights with every rollout, with a version that counts them. waited_s: seconds of the slowest actor's
    simulators; dropped: episodes; parts: the slots of each actor in the newest rollout.
    Raises ValueError for GPUs that the cluster lacks, RuntimeError for an actor that is lost three times in a row. What
    `collect` raises comes through; it ends the actors, and another rollout starts them again.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        actors: int = 0,
        cuda: bool = False,
        timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        tf32: bool | None = None,
    ) -> None:
        self.num_envs, self.chunk, self.group_size = simulation.num_envs, simulation.chunk, simulation.group_size
        # Nothing is started by opening it: simulators begin with the first reset.
        self.max_steps = open_environment(replace(simulation, num_envs=self.group_size)).max_steps
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.waited_s, self.dropped, self.restarts, self.version = 0.0, 0, 0, 0
        self.parts: list[Tensor] = []
        self.crew: Crew | None = None
        self._count = min(room(actors), self.num_envs // self.group_size)
        self._actor = type("Actor", (Actor,), {"gpus": gpu_share(self._count)}) if cuda else Actor
        self._simulation, self._tf32 = simulation, tf32
        self._losses = [0] * self._count

    def collect(
        self,
        policy: Any,
        sampler: Any,
        plan: RolloutPlan,
        *,
        frozen: Any = None,
        weights: Mapping[str, Tensor] | None = None,
        advance: Callable[[], None] = lambda: None,
    ) -> ChunkRollout:
        """`collect.collect`, always with the same policy, whose weights may have moved. weights: of what is trained,
        None = as it is.

        `advance` is called for as many messages as there are actors: about once per decision.
        """
        crew = self.crew = self.crew or self._crew(policy, frozen)
        self.version += 1
        sent = connected().put(trained_weights(policy) if weights is None else dict(weights))
        work = Assignment(sent, self.version, sampler, plan)
        parts: dict[int, Part] = {}
        try:
            crew.start()
            while not parts:  # unless all were lost, one turn
                parts = self._turn(crew, work, advance)
        except BaseException:
            self.close()
            raise
        missing = sum(len(groups) for number, groups in enumerate(crew.parts) if number not in parts)
        done = [parts[number] for number in sorted(parts)]
        # A mix of versions would show only as ratios that are off, much later.
        if stale := {part.version for part in done} - {self.version}:
            raise RuntimeError(f"a Ray actor acted by weights {stale}, not by {self.version}")
        self.waited_s += max(part.waited_s for part in done)
        rollout = joined([part.rollout for part in done])
        self.dropped += missing * self.group_size + int(rollout.dropped.sum())
        sizes = [len(part.rollout.group) for part in done]
        self.parts = [torch.arange(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]
        return rollout

    def close(self) -> None:
        """End the actors; another rollout starts them again."""
        if self.crew is not None:
            self.crew.end(kill=True)
        self.crew = None

    def _crew(self, policy: Any, frozen: Any) -> Crew:
        """An actor for as many groups of slots each."""
        # Copies, as `cpu` moves a module where it is.
        copies = connected().put((copy.deepcopy(policy).cpu(), None if frozen is None else copy.deepcopy(frozen).cpu()))
        described = Description(ActingHost, {"policies": copies, "simulation": self._simulation, "tf32": self._tf32})
        times = {"timeout_s": self.timeout_s, "start_timeout_s": self.start_timeout_s}
        return Crew(described, self._actor, self._count, self.num_envs // self.group_size, **times)

    def _turn(self, crew: Crew, work: Assignment, advance: Callable[[], None]) -> dict[int, Part]:
        """Ask all actors for their part, and wait: number -> part of those that were not lost."""
        heard, parts = 0, {}
        for actor in crew.workers:
            first = work.plan.first_slot + actor.slots.start * self.group_size
            crew.send(actor, work._replace(plan=replace(work.plan, first_slot=first)), list(actor.slots))
            # The first decision may have to wait for simulators that are made.
            crew.expect(actor, starting=True)
        while waiting := [actor for actor in crew.workers if actor.open]:
            actor, message = crew.next(waiting)
            if actor not in waiting:
                continue  # it is gone
            if message is None:
                crew.expect(actor, starting=False)
                heard += 1
                if heard % len(crew.workers) == 0:
                    advance()
            elif isinstance(message, Part):
                number = crew.workers.index(actor)
                actor.open, parts[number], self._losses[number] = [], message, 0
            elif isinstance(message, Fault):
                actor.report = message.report  # its host cannot be made: it ends, which is told next
            elif isinstance(message, WorkerLost):
                self._replace(crew, actor, message)
            else:
                raise message
        return parts

    def _replace(self, crew: Crew, actor: Worker, lost: WorkerLost) -> None:
        """Another actor for these slots, from the next rollout on."""
        number = crew.workers.index(actor)
        self._losses[number] += 1
        if self._losses[number] >= FAILURES:
            raise RuntimeError(
                f"Ray actor {number} was lost {FAILURES} times in a row; the last time: {lost}\n{actor.report}"
            ) from lost
        crew.restart(actor)
        self.restarts += 1


def gpu_share(actors: int) -> float:
    """Share of a GPU for each actor, of those that the cluster has. Raises ValueError where it has none."""
    share = ray_cluster.gpu_share(actors)
    if not share:
        raise ValueError(
            "environment.workers: ray acts with copies of the policy, which is on a GPU here, and the Ray cluster has "
            "none: it would round differently from the one that trains. Write ray_simulators: it stays here"
        )
    return share
