"""What a question is, and a row of a run's questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from PIL import Image

from genrl.vlm.policies.processor import Prompt

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Row:
    """One question. `columns` are for the rewards; they have at least `answer`. `name` is its key, within its split."""

    name: str
    prompt: Prompt
    columns: dict[str, Any]


class Question(NamedTuple):
    """Texts and pictures in the order in which the model gets them, the expected answer, a number that grows with
    difficulty (for a curriculum), and further columns."""

    parts: tuple[str | Image.Image, ...]
    answer: str
    level: float
    columns: dict[str, Any] = {}
