"""Fetch of gymnasium-robotics: an arm that reaches a point or pushes a block to one, and an expert for both."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.mujoco_scenes import Box
from genrl.vla.simulators.robotics import env
from genrl.vla.simulators.robotics.env import RoboticsEnv, Seen, Task, View, twin

GAIN = 10.0
"""The expert's: action per metre; an action of 1 moves the hand by up to 5 cm."""
BEHIND, BESIDE, ABOVE = 0.07, 0.02, 0.08
"""The expert's, in metres: where it begins to push, how far from the line of the push the hand may be, and how far over
the block it goes round it."""


class FetchEnv(RoboticsEnv):
    """The hand, a block (or none) and a red target. "agent_pos" [10]: place of the hand, fingers, and the velocities of
    both; "environment_state" [6]: the block (the hand, where there is none) and the target. Actions [4] in [-1, 1]: a
    move of up to 5 cm along each axis, and the fingers, which stay closed. Success within 5 cm."""

    name = "fetch"
    tasks = {
        "reach": Task("FetchReach-v4", 50, "move the hand to the red point"),
        "push": Task("FetchPush-v4", 50, "push the block to the red point"),
    }
    sizes = (10, 6)
    workspace = Box((1.0, 0.3, 0.405), (1.7, 1.2, 1.0))

    def slot(self) -> Any:
        model_env = self.shared.made
        return twin(model_env, data=self.shared.mujoco.MjData(model_env.model))

    def ahead(self) -> Any:
        return twin(self.inner, data=copy.copy(self.inner.data))

    def named(self, raw: Mapping[str, NDArray[np.float64]]) -> Seen:
        observation = raw["observation"]
        numbers = (
            observation
            if len(observation) == 10
            else np.concatenate([observation[:3], observation[9:11], observation[20:25]])
        )
        return {"agent_pos": numbers, "environment_state": np.concatenate([raw["achieved_goal"], raw["desired_goal"]])}

    def succeeded(self, info: Mapping[str, Any]) -> bool:
        return bool(info["is_success"])

    def mark(self) -> None:
        self.inner.data.site("target0").xpos[:] = self.inner.goal

    def view(self) -> View:
        """Looks from the front left and above, where the arm hides the least."""
        return View((1.34, 0.75, 0.47), 0.75, 135.0, -35.0)

    def expert(self, seen: Seen) -> NDArray[np.float64]:
        """Straight to the point; or over the block to behind it, down, and straight on."""
        hand, block, goal = seen["agent_pos"][:3], seen["environment_state"][:3], seen["environment_state"][3:]
        if not self.inner.has_object:
            aim = goal
        else:
            way = goal - block
            way = np.array([*way[:2], 0.0]) / max(float(np.linalg.norm(way[:2])), 1e-6)
            back = float(way @ (block - hand))
            aside = float(np.linalg.norm((hand - block)[:2] + back * way[:2]))
            start = block - BEHIND * way
            low = hand[2] < block[2] + 0.03
            if back > 0 and aside < BESIDE and low:
                aim = goal - 0.03 * way  # the hand stays behind the block
            elif np.linalg.norm((hand - start)[:2]) < BESIDE:
                aim = start
            elif hand[2] < block[2] + ABOVE / 2:
                aim = np.array([*hand[:2], start[2] + ABOVE])  # straight up, away from the block's side
            else:
                aim = start + (0.0, 0.0, ABOVE)
        move: NDArray[np.float64] = GAIN * (aim - hand)
        return np.array([*move, 0.0])


describe, demonstrate = partial(env.describe, FetchEnv), partial(env.demonstrate, FetchEnv)
