"""Rewards held by Ray actors: each has all rewards of the run that no server has, and answers one call at a time.

A score is a function of the samples it is asked for, so it does not matter which actor answers; the call of one that
dies is made again elsewhere.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed

import genrl_rewards
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Reward
from genrl.runtime.loop.ray_cluster import START_S, check_versions, connected, versions
from genrl_rewards.contract import Scored, declare, needs, options_of, read
from genrl_rewards.failures import Failure, RewardFailed, catch
from genrl_rewards.placing import open_reward
from genrl_rewards.service.remote import Outage, ServerRaised

FAILURES = 3
"""Actors lost in a row by one call, after which the run ends."""
POLL_S = 0.2
"""How long a call waits before it looks whether the run is to end."""


def opened_for(settings: Reward, device: str, stopped: Callable[[], bool] = lambda: False) -> genrl_rewards.Reward:
    """A reward as its section says, in this process; errors as of `genrl_rewards.placing.open_reward`."""
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


class Opened(NamedTuple):
    """What an actor says once it has loaded the rewards."""

    versions: dict[str, str]
    declared: dict[str, inspect.Signature]
    """Label -> what the reward takes, and what it may take."""
    problem: str = ""
    """Why they could not be loaded."""

    def checked(self) -> Opened:
        """ValueError where it is of no use."""
        check_versions(self.versions)
        if self.problem:
            raise ValueError(f"engine.reward_workers: {self.problem}")
        return self


class RewardActor:
    """The rewards in another process."""

    def versions(self) -> dict[str, str]:
        """Versions of what computes here."""
        return versions()

    def open(self, config: str, folder: str, threads: int) -> Opened:
        """Load the rewards of this configuration (JSON), as in the run that works in `folder` with so many threads."""
        os.chdir(folder)  # paths in a configuration are relative
        torch.set_num_threads(threads)  # rounding depends on it
        parsed = Config.model_validate_json(config)
        set_seed(parsed.seed)
        device = "cuda" if connected().get_gpu_ids() else "cpu"
        labelled = zip(parsed.reward_labels, parsed.rewards, strict=True)
        local = [(label, settings) for label, settings in labelled if settings.remote is None]
        # As text: an exception of the reward's own class could not be unpickled where its package is not installed.
        opened = catch(lambda: {label: opened_for(settings, device) for label, settings in local}, 0)
        if isinstance(opened, Failure):
            return Opened(versions(), {}, opened.error)
        self.rewards = opened
        declared = {label: declare(needs(reward).names, options_of(reward)) for label, reward in opened.items()}
        return Opened(versions(), declared)

    def score(self, label: str, arguments: Mapping[str, Any]) -> Scored | Failure:
        """What the reward returns; as text what it raises, which may be of no class that the trainer knows."""
        count = _count(arguments)
        scores = catch(lambda: read(self.rewards[label](**arguments), count, label), count)
        return scores if isinstance(scores, Failure) else (scores.values, scores.parts)


@dataclass
class Seat:
    """An actor."""

    actor: Any
    opened: Any
    """Reference to what its opening answers."""


class RewardPool:
    """`count` actors that score for this process. options: Ray's for each (`ray_cluster.room_for`); stopped: as of
    `genrl_rewards.service.remote.Remote`.

    Raises ValueError where one cannot be started, or cannot open a reward.
    """

    def __init__(
        self, config: Config, count: int, options: Mapping[str, Any], stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._ray, self._config, self._options, self._stopped = connected(), config, options, stopped
        self._timeout_s = config.distributed.timeout_s / 2  # before the watchdog's end
        self._lock, self.lost = Lock(), 0
        self.seats = [self._started() for _ in range(count)]
        self._free: SimpleQueue[Seat] = SimpleQueue()
        try:
            # Asked first and by itself, in seconds: whether a machine is up is not to be confused with how long rewards
            # load.
            for versions in self._ray.get([seat.actor.versions.remote() for seat in self.seats], timeout=START_S):
                check_versions(versions)
            for opened in self._ray.get([seat.opened for seat in self.seats]):
                self.declared: dict[str, inspect.Signature] = opened.checked().declared
        except self._ray.exceptions.RayError as error:
            self.close()
            raise ValueError(f"engine.reward_workers: none could be started: {error}") from error
        except ValueError:
            self.close()
            raise
        for seat in self.seats:
            self._free.put(seat)

    def score(self, label: str, arguments: Mapping[str, Any]) -> Scored:
        """Ask an actor that has nothing to do, once there is one. Any number of threads may.

        Raises ServerRaised where the reward raises, and RewardFailed where actors are lost again and again.
        """
        # The run is ending: nobody reads these, and an error would hide the one that ended it.
        none: Scored = [math.nan] * _count(arguments), {}
        while not self._stopped():
            try:
                seat = self._free.get(timeout=POLL_S)
                break
            except Empty:
                pass
        else:
            return none
        try:
            answer = self._asked(seat, label, arguments)
        finally:
            self._free.put(seat)
        if isinstance(answer, Failure):
            if answer.fatal:
                raise RewardFailed(answer.error)
            raise ServerRaised(f"{answer.error}, in a reward worker:\n{answer.traceback}")
        return none if answer is None else answer

    def close(self) -> None:
        """End the actors."""
        for seat in self.seats:
            self._ray.kill(seat.actor)

    def _asked(self, seat: Seat, label: str, arguments: Mapping[str, Any]) -> Scored | Failure | None:
        """What the actor answers, or the one that takes its place; None once the run is to end."""
        for _ in range(FAILURES):
            try:
                opened: Opened | None = self._heard(seat.opened, math.inf)
                if opened is None:
                    return None
                opened.checked()
                answer: Scored | Failure | None = self._heard(
                    seat.actor.score.remote(label, arguments), self._timeout_s
                )
                return answer
            except self._ray.exceptions.RayTaskError:
                raise  # memory ran out
            except ValueError as error:
                raise RewardFailed(str(error)) from error
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                last = error
                # It may be alive and only slow, and would hold its memory beside the new one.
                self._ray.kill(seat.actor)
                new = self._started()
                seat.actor, seat.opened = new.actor, new.opened
                with self._lock:
                    self.lost += 1
        raise RewardFailed(f"{FAILURES} reward workers were lost in a row, the last one since: {last}") from last

    def _heard(self, awaited: Any, patience_s: float) -> Any:
        """An answer, once it is there; None once the run is to end. TimeoutError after so long."""
        end = time.monotonic() + patience_s
        while not self._ray.wait([awaited], timeout=POLL_S)[0]:
            if self._stopped():
                return None
            if time.monotonic() > end:
                raise TimeoutError(f"nothing was heard of it for {patience_s:g} s; raise distributed.timeout_s")
        return self._ray.get(awaited)

    def _started(self) -> Seat:
        actor = self._ray.remote(RewardActor).options(**self._options).remote()
        config = self._config.model_dump_json()
        return Seat(actor, actor.open.remote(config, os.getcwd(), torch.get_num_threads()))


class FarReward:
    """A reward of the pool."""

    def __init__(self, pool: RewardPool, label: str) -> None:
        self._pool, self._label = pool, label
        self.__signature__ = pool.declared[label]

    def __call__(self, **arguments: Sequence[Any]) -> Scored:
        return self._pool.score(self._label, arguments)


def _count(arguments: Mapping[str, Any]) -> int:
    """How many numbers a reward returns that is called with these."""
    return len(arguments["pairs"] if "pairs" in arguments else next(iter(arguments.values())))
