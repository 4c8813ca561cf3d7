"""Answers of earlier weights (`runtime.versions`) that a server of vLLM's draws while an iteration is trained."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock

from torch import Tensor

from genrl.config.vlm import VLMConfig
from genrl.runtime.ahead import Advance, Ahead
from genrl.vlm.engines.vllm import Given, Sampler
from genrl.vlm.rollout.rollout import Answers, draw
from genrl.vlm.tasks.rows import Row
from rewards.contract import Reward


class Server:
    """Draws and scores the answers of coming iterations in a second thread, by the server of a run's own sampler.

    The thread has a processor of its own, since one cannot be used by two at a time, and the server and the rewards
    for as long as it draws the answers of an iteration.
    """

    def __init__(self, sampler: Sampler, opened: Mapping[str, Reward]) -> None:
        self.ahead: Ahead[tuple[Answers, float]] = Ahead()
        self.opened, self._own, self._lock = opened, sampler, Lock()
        self.policy = copy.copy(sampler.policy)
        self.policy.processor = copy.deepcopy(sampler.policy.processor)
        self.policy.tokenizer = self.policy.processor.tokenizer
        self._sampler = self.policy.sampler = Given(sampler.engine, self.policy)

    def begin(
        self,
        iteration: int,
        config: VLMConfig,
        rows: Sequence[Row],
        keys: Sequence[int | str],
        weights: dict[str, Tensor],
        version: str,
    ) -> None:
        """Draw the answers to these questions by these weights, as a checkpoint has them. keys: as of `draw`."""
        self.ahead.begin(iteration, partial(self._drawn, config, rows, keys, weights, version))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block the run's own sampler has the server, and this thread the rewards."""
        with self._lock:
            self._own.loaded = None
            yield
            self._sampler.loaded = None

    def _drawn(
        self,
        config: VLMConfig,
        rows: Sequence[Row],
        keys: Sequence[int | str],
        weights: dict[str, Tensor],
        version: str,
        advance: Advance,
    ) -> tuple[Answers, float]:
        """The answers, and the seconds that they took."""
        with self._lock:
            started = time.perf_counter()
            self._sampler.give(weights, version)
            answers = draw(self.policy, config, self.opened, rows, keys, advance=advance)
            return answers, time.perf_counter() - started
