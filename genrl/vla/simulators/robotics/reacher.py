"""Reacher of gymnasium: an arm of two links on a plane, and an expert that solves its inverse kinematics."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.mujoco_scenes import Box
from genrl.vla.simulators.robotics import env
from genrl.vla.simulators.robotics.env import FIELD_OF_VIEW, RoboticsEnv, Seen, Task, View, twin

WITHIN = 0.03
"""Success, in metres from the middle of the fingertip to that of the target. The package defines none."""
UPPER, FORE, BENT = 0.1, 0.11, 3.0
"""Lengths from joint to joint and from there to the fingertip, in metres; the second joint's range, +- radians."""
SPEED, PULL, TORQUE = 8.0, 10.0, 0.2
"""The expert's: greatest speed in radian/s, wanted speed per radian of distance, torque per missing radian/s."""


class ReacherEnv(RoboticsEnv):
    """An arm seen from above, and a red target, as wide as success is. "agent_pos" [6]: cosines of both joints, sines,
    velocities; "environment_state" [2]: the target. Actions [2] in [-1, 1]: torques; success within 3 cm."""

    name = "reacher"
    tasks = {"reach": Task("Reacher-v5", 50, "touch the red ball with the tip of the arm")}
    sizes = (6, 2)
    workspace = Box((-0.27, -0.27, 0.002), (0.27, 0.27, 0.1))

    def slot(self) -> Any:
        model_env = self.shared.made
        model_env.model.geom("target").size[0] = WITHIN  # it touches nothing, and its mass is known already
        visual = model_env.model.vis
        visual.headlight.ambient[:] = 0.5  # else the target and the arm are both nearly black
        # of what is round; the 28 and 16 of MuJoCo are five times a picture's time
        visual.quality.numslices, visual.quality.numstacks = 8, 4
        return twin(model_env, data=self.shared.mujoco.MjData(model_env.model))

    def ahead(self) -> Any:
        return twin(self.inner, data=copy.copy(self.inner.data))

    def named(self, raw: NDArray[np.float64]) -> Seen:
        return {"agent_pos": raw[[0, 1, 2, 3, 6, 7]], "environment_state": raw[4:6]}

    def succeeded(self, info: Mapping[str, Any]) -> bool:
        return bool(-info["reward_dist"] < WITHIN)

    def view(self) -> View:
        """Looks from straight above: as far as the arm reaches, and no walls."""
        return View((0.0, 0.0, 0.0), 0.23 / np.tan(FIELD_OF_VIEW / 2), 90.0, -90.0)

    def expert(self, seen: Seen) -> NDArray[np.float64]:
        """Moves to the posture, bent left, that touches the target, each joint at the speed that it wants there."""
        joints = np.arctan2(seen["agent_pos"][2:4], seen["agent_pos"][:2])
        way = posture(seen["environment_state"]) - joints
        way[0] = (way[0] + np.pi) % (2 * np.pi) - np.pi  # the first joint turns freely, the second does not
        torque: NDArray[np.float64] = TORQUE * (np.clip(PULL * way, -SPEED, SPEED) - seen["agent_pos"][4:])
        return torque


def posture(target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Angles [2] of the joints by which the fingertip is at a place [2], or as near as it comes; bent to the left."""
    cosine = (target @ target - UPPER**2 - FORE**2) / (2 * UPPER * FORE)
    bend = np.arccos(np.clip(cosine, np.cos(BENT), 1.0))
    turned = np.arctan2(FORE * np.sin(bend), UPPER + FORE * np.cos(bend))
    return np.array([np.arctan2(target[1], target[0]) - turned, bend])


describe, demonstrate = partial(env.describe, ReacherEnv), partial(env.demonstrate, ReacherEnv)
