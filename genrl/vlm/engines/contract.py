"""What an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from PIL import Image

from genrl.vlm.policies.weights import Stream


class Asked(NamedTuple):
    """A question for an engine: ids with one token per image, RGB images, arguments of vLLM's `SamplingParams`."""

    ids: list[int]
    pictures: tuple[Image.Image, ...]
    sampling: dict[str, Any]


class Drawn(NamedTuple):
    """An answer: ids with the stop token, log-probability of each, versions of the weights that drew them."""

    ids: list[int]
    log_prob: list[float]
    versions: set[str]


class Reply(NamedTuple):
    """What an engine made of a question: the ids of the prompt, images expanded, and the answers in their order."""

    prompt_ids: list[int]
    answers: list[Drawn]


Version = int | str
"""What an engine knows its weights by, as text."""


class Engine(Protocol):
    """forgets: the weights are gone after `rest`, and have to be loaded again."""

    forgets: bool

    def load(self, weights: Stream, version: Version) -> None:
        """Take these weights, and drop everything cached under others."""

    def answer(self, asked: Sequence[Asked]) -> list[Reply]:
        """In the order of the questions."""

    def rest(self) -> None:
        """Nothing is asked for a while."""
