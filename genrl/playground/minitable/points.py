"""The table as a cloud of points: what stands on it has a height of its own, for a cloud has no colours."""

from __future__ import annotations

import math

import numpy as np

from genrl.playground.minitable.render import DISC_RADIUS, GRIPPER_RADIUS
from genrl.playground.minitable.task import ZONE_CENTRES, ZONE_RADIUS, Floats, State
from genrl.vla.config.names import MINITABLE_THINGS

HEIGHTS = (0.1, 0.2, 0.3)
"""Of the red, green and blue disc; zones are flat, and the gripper is above all, at `GRIPPER_HEIGHT`."""
GRIPPER_HEIGHT = 0.5
_RADII = np.array([DISC_RADIUS] * 3 + [GRIPPER_RADIUS] + [ZONE_RADIUS] * 3)
_LEVELS = np.array([*HEIGHTS, GRIPPER_HEIGHT, 0.0, 0.0, 0.0])


def cloud(state: State, count: int) -> Floats:
    """[n, count, 3], seen from above: the tops of the discs, the gripper and the zones, points spread evenly over each
    (a sunflower's spiral) and dealt out to the seven in turn. Nothing hides anything.

    Raises ValueError for fewer points than there are things.
    """
    if count < MINITABLE_THINGS:
        raise ValueError(f"{count} points cannot show the {MINITABLE_THINGS} things on the table")
    thing, rank = np.arange(count) % MINITABLE_THINGS, np.arange(count) // MINITABLE_THINGS
    share = np.bincount(thing)[thing]
    radius, angle = _RADII[thing] * np.sqrt((rank + 0.5) / share), rank * math.pi * (3.0 - math.sqrt(5.0))
    zones = np.broadcast_to(ZONE_CENTRES, (len(state.task), 3, 2))
    centres = np.concatenate([state.discs, state.gripper[:, None], zones], 1)[:, thing]
    flat = centres + np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    levels = np.broadcast_to(_LEVELS[thing][:, None], (len(state.task), count, 1))
    return np.concatenate([flat, levels], 2).astype(np.float32)
