"""Answers of earlier weights (`running.Versions`) that a server of vLLM's draws while an iteration is trained."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock

from torch import Tensor

from genrl.runtime.loop.running import Advance, Ahead
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.vllm import Given, Sampler
from genrl.vlm.rollout.rollout import Answers, Part, joined, sample_parts, scored
from genrl.vlm.tasks import Row
from genrl_rewards.contract import Reward


class Server:
    """Draws the answers of coming iterations in a second thread, by the server of a run's own sampler, and scores them
    in a third, while the next ones are drawn.

    The drawing thread has a processor of its own, since one cannot be used by two at a time; and each thread the server
    or the rewards for as long as it needs them.
    """

    def __init__(self, sampler: Sampler, opened: Mapping[str, Reward]) -> None:
        self._drawing: Ahead[tuple[list[Part], float]] = Ahead()
        self._scoring: Ahead[tuple[Answers, float]] = Ahead()
        self.opened, self._own = opened, sampler
        self._server, self._rewards = Lock(), Lock()
        # The model is shared, nothing is copied of it; processor and tokenizer keep state while they work.
        self.policy = copy.copy(sampler.policy)
        self.policy.processor = copy.deepcopy(sampler.policy.processor)
        self.policy.tokenizer = self.policy.processor.tokenizer
        self._sampler = self.policy.sampler = Given(sampler.engine, self.policy)

    def has(self, iteration: int) -> bool:
        """Whether its answers are on their way."""
        return iteration in self._scoring.underway

    def begin(
        self,
        iteration: int,
        config: VLMConfig,
        rows: Sequence[Row],
        keys: Sequence[int | str],
        weights: dict[str, Tensor],
        version: str,
    ) -> None:
        """Draw the answers to these questions by these weights, as a checkpoint has them. keys: of `sample_parts`."""
        self._drawing.begin(iteration, partial(self._sample_parts, config, rows, keys, weights, version))
        self._scoring.begin(iteration, partial(self._scored, config, iteration))

    def take(self, iteration: int, advance: Advance) -> tuple[Answers, float]:
        """The answers of an iteration, once they are scored, and the seconds that they took (`Ahead.take`)."""
        return self._scoring.take(iteration, advance)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block the run's own sampler has the server, and this thread the rewards."""
        with self._server, self._rewards:
            # The server held the other one's weights meanwhile: each has to give its own again.
            self._own.loaded = None
            yield
            self._sampler.loaded = None

    def close(self) -> None:
        """End what is on its way."""
        self._drawing.close()
        self._scoring.close()

    def _sample_parts(
        self,
        config: VLMConfig,
        rows: Sequence[Row],
        keys: Sequence[int | str],
        weights: dict[str, Tensor],
        version: str,
        advance: Advance,
    ) -> tuple[list[Part], float]:
        with self._server:
            started, parts = time.perf_counter(), list[Part]()
            self._sampler.give(weights, version)
            for part in sample_parts(self.policy, config, rows, keys):
                parts.append(part)
                advance(len(part.made.texts))
            return parts, time.perf_counter() - started

    def _scored(self, config: VLMConfig, iteration: int, advance: Advance) -> tuple[Answers, float]:
        parts, seconds = self._drawing.take(iteration, advance)
        with self._rewards:
            started, answers = time.perf_counter(), list[Answers]()
            for part in parts:
                answers.append(scored(config, self.opened, part))
                advance(0)
            return joined(answers), seconds + time.perf_counter() - started
