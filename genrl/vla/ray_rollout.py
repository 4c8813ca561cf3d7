"""Rollouts on Ray actors, policy and simulators together: what crosses the network is the policy, once per iteration,
and the rollout, instead of observations and chunks at every decision.

Every actor has some of the slots, simulates them in its own process, and runs `rollout.collect` on them. Episodes and
noise are functions of the slot's number among all, so the whole is the rollout that one process would have collected,
up to the rounding of other batch sizes. An actor that is lost is replaced and does its part again: the same one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from genrl.vla.environments import open_environment
from genrl.vla.ray_workers import actors as room
from genrl.vla.ray_workers import connected
from genrl.vla.rollout import ChunkRollout, collect, joined
from genrl.vla.workers import FAILURES


class Collector:
    """What an actor is. environment: arguments of `open_environment`."""

    def __init__(self, environment: Mapping[str, Any], first_slot: int) -> None:
        torch.set_num_threads(1)  # as many actors as CPUs
        self.env = open_environment(**environment)
        self.first_slot = first_slot

    def collect(self, policy: Any, sampler: Any, frozen: Any, how: Mapping[str, Any]) -> tuple[ChunkRollout, float]:
        """A rollout of these slots, and the seconds that simulators took of it."""
        device = "cuda" if connected().get_gpu_ids() else "cpu"
        frozen = None if frozen is None else frozen.to(device)
        waited = self.env.waited_s
        first = self.first_slot + how["first_slot"]
        given = {**how, "first_slot": first}
        return collect(self.env, policy.to(device), sampler, frozen=frozen, **given), self.env.waited_s - waited


class RayRollouts:
    """`collect` on `actors` actors of one CPU (0: as many as the cluster has) and `gpus` of a GPU each.

    environment: arguments of `open_environment`, for all slots together; groups stay whole. timeout_s: the longest a
    rollout may take. waited_s: seconds of the slowest actor's simulators; dropped: episodes; restarts: actors.
    Raises RuntimeError for an actor that is lost three times in one rollout. What `collect` raises comes through.
    """

    def __init__(
        self, environment: Mapping[str, Any], *, actors: int = 0, gpus: float = 0.0, timeout_s: float = 3600.0
    ) -> None:
        self.num_envs, self.chunk = int(environment["num_envs"]), int(environment["chunk"])
        self.group_size = int(environment.get("group_size", 1))
        groups = self.num_envs // self.group_size
        count = min(room(actors), groups)
        if self.num_envs % self.group_size or not groups:
            raise ValueError(f"{self.num_envs} environments are not groups of {self.group_size}")
        self.gpus, self.timeout_s = gpus, timeout_s
        self.waited_s, self.dropped, self.restarts = 0.0, 0, 0
        bounds = [groups * a // count * self.group_size for a in range(count + 1)]
        self._parts = [
            (dict(environment) | {"num_envs": end - begin}, begin)
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ]
        self._actors = [self._actor(part) for part in range(count)]

    def collect(
        self,
        policy: Any,
        sampler: Any,
        *,
        decisions: int,
        seed: int,
        iteration: int,
        one_episode: bool = False,
        first_slot: int = 0,
        keep_contexts: bool = False,
        frozen: Any = None,
        advance: Callable[[], None] = lambda: None,
    ) -> ChunkRollout:
        """As `rollout.collect`; `advance` is called when an actor is done."""
        ray = connected()
        how = {"decisions": decisions, "seed": seed, "iteration": iteration, "one_episode": one_episode}
        how |= {"first_slot": first_slot, "keep_contexts": keep_contexts}
        sent = [ray.put(None if one is None else copy.deepcopy(one).cpu()) for one in (policy, frozen)]
        parts: list[tuple[ChunkRollout, float] | None] = [None] * len(self._actors)
        for attempt in range(FAILURES):
            missing = [number for number, part in enumerate(parts) if part is None]
            asked = {number: self._actors[number].collect.remote(sent[0], sampler, sent[1], how) for number in missing}
            for number, answer in asked.items():
                try:
                    parts[number] = ray.get(answer, timeout=self.timeout_s)
                    advance()
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                    if attempt + 1 == FAILURES:
                        raise RuntimeError(f"Ray actor {number} was lost {FAILURES} times in a rollout") from error
                    ray.kill(self._actors[number])
                    self._actors[number] = self._actor(number)
                    self.restarts += 1
        done = [part for part in parts if part is not None]
        self.waited_s += max(waited for _, waited in done)
        rollout = joined([part for part, _ in done])
        self.dropped += int(rollout.dropped.sum())
        return rollout

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            connected().kill(actor)
        self._actors = []

    def _actor(self, number: int) -> Any:
        environment, first = self._parts[number]
        how = {"num_cpus": 1, "num_gpus": self.gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        return connected().remote(Collector).options(**how).remote(environment, first)
