"""Fetch and PointMaze of gymnasium-robotics and Reacher of gymnasium: an arm that reaches a point or pushes a block to
one, a ball that is pushed through a maze, an arm of two links; and an expert for each."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.mujoco_scenes import Box
from genrl.vla.simulators.robotics import env
from genrl.vla.simulators.robotics.env import FIELD_OF_VIEW, RoboticsEnv, Seen, Task, View, twin

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


describe_fetch, demonstrate_fetch = partial(env.describe, FetchEnv), partial(env.demonstrate, FetchEnv)


WITHIN = 0.03
"""Success, in metres from the middle of the fingertip to that of the target. The package defines none."""
UPPER, FORE, BENT = 0.1, 0.11, 3.0
"""Lengths from joint to joint and from there to the fingertip, in metres; the second joint's range, +- radians."""


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
        # The wanted speed: 10 radian/s per radian of distance, 8 radian/s at most; .2 of torque per missing radian/s.
        torque: NDArray[np.float64] = 0.2 * (np.clip(10.0 * way, -8.0, 8.0) - seen["agent_pos"][4:])
        return torque


def posture(target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Angles [2] of the joints by which the fingertip is at a place [2], or as near as it comes; bent to the left."""
    cosine = (target @ target - UPPER**2 - FORE**2) / (2 * UPPER * FORE)
    bend = np.arccos(np.clip(cosine, np.cos(BENT), 1.0))
    turned = np.arctan2(FORE * np.sin(bend), UPPER + FORE * np.cos(bend))
    return np.array([np.arctan2(target[1], target[0]) - turned, bend])


describe_reacher, demonstrate_reacher = partial(env.describe, ReacherEnv), partial(env.demonstrate, ReacherEnv)


Cell = tuple[int, int]


class PointMazeEnv(RoboticsEnv):
    """A green ball in a maze, seen from above. "agent_pos" [4]: its place and velocity; "environment_state" [2]: the
    target. Actions [2] in [-1, 1]: forces; success within 0.45 of the target, whose cell is 1 wide."""

    name = "point_maze"
    tasks = {
        kind.lower(): Task(f"PointMaze_{kind}-v3", limit, f"roll the green ball to the red one in the {which} maze")
        for kind, limit, which in (
            ("UMaze", 300, "bent"),
            ("Open", 300, "open"),
            ("Medium", 600, "medium"),
            ("Large", 800, "large"),
        )
    }
    sizes = (4, 2)
    workspace = Box((-10.0, -10.0, 0.01), (10.0, 10.0, 1.0))

    def slot(self) -> Any:
        """The maze and the ball in it have a class each."""
        model_env = self.shared.made
        parts = {"data": self.shared.mujoco.MjData(model_env.model), "init_qpos": model_env.point_env.init_qpos.copy()}
        ball = twin(model_env.point_env, **parts)
        return twin(model_env, point_env=ball)

    def ahead(self) -> Any:
        ball = self.inner.point_env
        return twin(self.inner, point_env=twin(ball, data=copy.copy(ball.data)))

    def named(self, raw: Mapping[str, NDArray[np.float64]]) -> Seen:
        return {"agent_pos": raw["observation"], "environment_state": raw["desired_goal"]}

    def succeeded(self, info: Mapping[str, Any]) -> bool:
        return bool(info["success"])

    def mark(self) -> None:
        self.inner.data.site("target").xpos[:] = [*self.inner.goal, self.inner.maze.maze_height / 2]

    def view(self) -> View:
        """Looks from straight above, with no more of the outer walls than shows where they are."""
        maze = self.inner.maze
        half = max(maze.map_length, maze.map_width) / 2 - 0.8
        return View((0.0, 0.0, 0.0), half / np.tan(FIELD_OF_VIEW / 2), 90.0, -90.0)

    def expert(self, seen: Seen) -> NDArray[np.float64]:
        """Moves to the middle of the next cell of a shortest way, or to the target once it is in the same one."""
        maze, place, velocity = self.inner.maze, seen["agent_pos"][:2], seen["agent_pos"][2:]
        here, goal = (tuple(maze.cell_xy_to_rowcol(xy).tolist()) for xy in (place, seen["environment_state"]))
        walls = tuple(tuple(cell == 1 for cell in row) for row in maze.maze_map)
        following = steps_to(walls, goal)[here]
        aim = seen["environment_state"] if following == goal else maze.cell_rowcol_to_xy(following)
        # The wanted speed: 6 m/s per metre of distance, 5 m/s at most; half a unit of force per m/s that is missing.
        wanted = 6.0 * (aim - place)
        wanted *= min(1.0, 5.0 / max(float(np.linalg.norm(wanted)), 1e-6))
        force: NDArray[np.float64] = 0.5 * (wanted - velocity)
        return force


@cache
def steps_to(walls: tuple[tuple[bool, ...], ...], goal: Cell) -> dict[Cell, Cell]:
    """Every free cell that leads to the goal -> the next cell of a shortest way there, by breadth-first search."""
    previous, queue = {goal: goal}, deque([goal])
    while queue:
        row, column = cell = queue.popleft()
        for beside in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if beside not in previous and not walls[beside[0]][beside[1]]:
                previous[beside] = cell
                queue.append(beside)
    return previous


describe_point_maze, demonstrate_point_maze = (
    partial(env.describe, PointMazeEnv),
    partial(env.demonstrate, PointMazeEnv),
)
