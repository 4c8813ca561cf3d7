"""Reward: how far the table-top task of genrl's embedded simulator has come, read from its pictures by rules.

A judge that runs anywhere: it sees what a vision-language model would see, a picture and an instruction, and nothing of
the simulator's state. Instructions are "put the red block in the left zone" and "touch the red block".
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from PIL.Image import Image

VIEW = 1.1
"""Half the width of what the picture shows, in half table widths."""
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 214)}
ZONES = {"left": (-0.8, 0.0), "right": (0.8, 0.0), "far": (0.0, 0.8)}
ZONE_RADIUS = 0.25
OPEN, CLOSED = (90, 90, 90), (0, 0, 0)
NEAR = 70.0
"""RGB distance within which a pixel counts as one of a colour, the more the smaller it is."""
_PUT = re.compile(r"put the (\w+) block in the (\w+) zone")
_TOUCH = re.compile(r"touch the (\w+) block")


class TableProgress:
    """How far the embedded table-top task has come, by rules on its pictures: minus the remaining distance.

    In half table widths: from the gripper to the block plus from the block to its zone; 0 means done. No score for
    other instructions, or if neither block nor gripper can be seen.
    """

    def __call__(self, pil_images: list[Image], prompts: list[str]) -> list[float]:
        rows = zip(pil_images, prompts, strict=True)
        return [progress(np.asarray(picture.convert("RGB")), prompt) for picture, prompt in rows]


def progress(picture: np.ndarray, instruction: str) -> float:
    """The score of one picture, uint8 [S, S, 3]; NaN for no score."""
    put, touch = _PUT.search(instruction.lower()), _TOUCH.search(instruction.lower())
    request = put or touch
    if request is None or request[1] not in COLOURS or (put and put[2] not in ZONES):
        return math.nan
    gripper = place(picture, CLOSED) or place(picture, OPEN)
    block = place(picture, COLOURS[request[1]])
    if block is None or gripper is None:
        # a gripper over the block hides most of it, and cannot be nearer
        block = gripper = block or gripper
    if block is None or gripper is None:
        return math.nan
    reach = math.dist(gripper, block)
    if put is None:
        return -reach
    # Less than the radius, within which the simulator calls it done: places read off pixels are a little off.
    carry = max(math.dist(block, ZONES[put[2]]) - 0.8 * ZONE_RADIUS, 0.0)
    return -carry - (reach if carry > 0 else 0.0)


def place(picture: np.ndarray, colour: tuple[int, int, int]) -> tuple[float, float] | None:
    """Place of a colour, (x, y) in half table widths: the mean position of its pixels; None if there are none."""
    distance = np.linalg.norm(picture.astype(np.float64) - np.array(colour, dtype=np.float64), axis=-1)
    weight: Any = np.clip(1.0 - distance / NEAR, 0.0, None)
    if weight.sum() < 0.5:
        return None
    rows, columns = np.indices(weight.shape)
    pixel = 2.0 * VIEW / weight.shape[0]
    x = float((weight * columns).sum() / weight.sum() + 0.5) * pixel - VIEW
    y = VIEW - float((weight * rows).sum() / weight.sum() + 0.5) * pixel
    return x, y
