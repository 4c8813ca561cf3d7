"""What an environment of a vision-language agent is: it shows pictures and texts, and is told a text.

Nothing here imports torch: environments may run in processes of their own, which begin in a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Observation = tuple[str | Image.Image, ...]
"""Texts and pictures in the order in which the model gets them."""


@dataclass(frozen=True)
class Question:
    """For a sub-agent: the model itself, which gets these parts and nothing of the conversation."""

    parts: Observation


Message = tuple[str | Image.Image | Question, ...]
"""What follows a step. The answers of sub-agents, texts, take the places of the questions before the model gets it."""
Split = Literal["train", "eval"]
Layout = Literal["steps", "conversation"]
"""How a prompt is made: "steps", of the last pictures and the newest text; "conversation", of all turns."""


class Environment(Protocol):
    """One episode at a time; a function of its seed, its split and the texts that it is told.

    help: goes into the prompt, behind the first text. begun: how every answer begins; the model does not choose it, and
    `step` gets it with the rest.
    """

    layout: Layout
    help: str
    begun: str

    def reset(self, seed: int, split: Split) -> Observation:
        """Begin the episode of this seed; those of "eval" are held out, where the environment has such."""
        ...

    def step(self, text: str) -> tuple[Message, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info), as gymnasium has it.

        info: valid (bool: the text said what to do), success (bool), and what else is to be averaged over episodes,
        numbers by name in `parts`, given where the episode ends.
        """
        ...

    def render(self) -> NDArray[np.uint8]:
        """The scene as it is, [H, W, 3]."""
        ...

    def close(self) -> None: ...
