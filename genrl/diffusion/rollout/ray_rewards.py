"""Rewards held by Ray actors: each has all rewards of the run that no server has, and answers one call at a time.

A score is a function of the samples it is asked for, so it does not matter which actor answers; the call of one that
dies is made again elsewhere.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import set_seed

import rewards
from genrl.config import Config
from genrl.config.schema import Reward
from genrl.runtime.ray_cluster import START_S, check_versions, connected, versions
from rewards.contract import Scored, declare, read
from rewards.failures import RewardFailed
from rewards.placing import open_reward
from rewards.service.remote import Outage

FAILURES = 3
"""Actors lost in a row by one call, after which the run ends."""
POLL_S = 0.2
"""How long a call waits before it looks whether the run is to end."""


def opened_for(settings: Reward, device: str, stopped: Callable[[], bool] = lambda: False) -> rewards.Reward:
    """A reward as its section says, in this process; errors as of `rewards.placing.open_reward`."""
    return open_reward(
        settings.name,
        settings.args,
        device=str(settings.args.get("device", device)),
        batch_size=settings.batch_size,
        cache=settings.cache,
        remote=settings.remote,
        isolate=settings.isolate,
        outage=Outage(**settings.outage.model_dump()),
        stopped=stopped,
    )


class RewardActor:
    """The rewards in another process."""

    def open(self, config: str, folder: str, threads: int) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
        """Load the rewards of this configuration (JSON), as in the run that works in `folder` with so many threads;
        returns `versions`, and what each takes, by label."""
        os.chdir(folder)  # paths in a configuration are relative
        torch.set_num_threads(threads)  # rounding depends on it
        found = Config.model_validate_json(config)
        set_seed(found.seed)
        device = "cuda" if connected().get_gpu_ids() else "cpu"
        labelled = zip(found.reward_labels, found.rewards, strict=True)
        self.rewards = {label: opened_for(one, device) for label, one in labelled if one.remote is None}
        return versions(), {label: rewards.needs(reward).names for label, reward in self.rewards.items()}

    def score(self, label: str, arguments: Mapping[str, Any]) -> Scored:
        """What the reward returns."""
        scored = read(self.rewards[label](**arguments), _count(arguments), label)
        return scored.values, scored.parts


@dataclass
class Seat:
    """An actor, and how many calls it has before it."""

    actor: Any
    opened: Any
    """Reference to what its opening answers."""
    calls: int = 0


class RewardPool:
    """`count` actors that score for this process. options: Ray's for each (`ray_cluster.place_of`); stopped: as of
    `rewards.service.remote.Remote`.

    Raises ValueError where one cannot be started, and what opening a reward raises there.
    """

    def __init__(
        self, config: Config, count: int, options: Mapping[str, Any], stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._ray, self._config, self._options, self._stopped = connected(), config, options, stopped
        self._timeout_s = config.distributed.timeout_s / 2  # before the watchdog's end
        self._lock, self.lost = threading.Lock(), 0
        self.seats = [Seat(*self._started()) for _ in range(count)]
        try:
            for found, takes in self._ray.get([seat.opened for seat in self.seats], timeout=START_S):
                check_versions(found)
                self.takes: dict[str, tuple[str, ...]] = takes
        except self._ray.exceptions.RayTaskError as error:
            raise ValueError(f"engine.reward_workers: {error.cause}") from error
        except self._ray.exceptions.RayError as error:
            raise ValueError(f"engine.reward_workers: none could be started in {START_S:g} s: {error}") from error

    def score(self, label: str, arguments: Mapping[str, Any]) -> Scored:
        """Ask the actor with the fewest calls before it. Any number of threads may.

        Raises what the reward raises, and RewardFailed where actors are lost again and again.
        """
        for _ in range(FAILURES):
            with self._lock:
                seat = min(self.seats, key=lambda seat: seat.calls)
                seat.calls += 1
                actor, opened = seat.actor, seat.opened
            try:
                if not self._came(opened, START_S) or not self._came(
                    answer := actor.score.remote(label, arguments), self._timeout_s
                ):
                    return [math.nan] * _count(arguments), {}
                self._check(opened)
                scored: Scored = self._ray.get(answer)
                return scored
            except self._ray.exceptions.RayTaskError:
                raise  # of the reward
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                last = error
                self._replace(seat, actor)
            finally:
                with self._lock:
                    seat.calls -= 1
        raise RewardFailed(f"{FAILURES} reward workers were lost in a row, the last one since: {last}") from last

    def close(self) -> None:
        """End the actors."""
        for seat in self.seats:
            self._ray.kill(seat.actor)

    def _came(self, awaited: Any, patience_s: float) -> bool:
        """Whether an answer is there; False once the run is to end. TimeoutError after so long."""
        end = time.monotonic() + patience_s
        while not self._ray.wait([awaited], timeout=POLL_S)[0]:
            if self._stopped():
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"nothing was heard of it for {patience_s:g} s")
        return True

    def _check(self, opened: Any) -> None:
        """RewardFailed where an actor that took another's place could not open the rewards."""
        try:
            check_versions(self._ray.get(opened)[0])
        except (self._ray.exceptions.RayTaskError, ValueError) as error:
            raise RewardFailed(f"engine.reward_workers: {error}") from error

    def _started(self) -> tuple[Any, Any]:
        """A new actor, and the reference to what its opening answers."""
        actor = self._ray.remote(RewardActor).options(**self._options).remote()
        return actor, actor.open.remote(self._config.model_dump_json(), os.getcwd(), torch.get_num_threads())

    def _replace(self, seat: Seat, actor: Any) -> None:
        with self._lock:
            if seat.actor is not actor:
                return  # another call has
            self._ray.kill(actor)
            self.lost += 1
            seat.actor, seat.opened = self._started()


def _count(arguments: Mapping[str, Any]) -> int:
    """How many numbers a reward returns that is called with these."""
    return len(arguments["pairs"] if "pairs" in arguments else next(iter(arguments.values())))


class FarReward:
    """A reward of the pool."""

    def __init__(self, pool: RewardPool, label: str) -> None:
        self._pool, self._label = pool, label
        self.__signature__ = declare(pool.takes[label])

    def __call__(self, **arguments: Sequence[Any]) -> Scored:
        return self._pool.score(self._label, arguments)
