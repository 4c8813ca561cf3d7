"""PointMaze of gymnasium-robotics: a ball that is pushed through a maze by forces, and an expert that plans its way."""

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

Cell = tuple[int, int]

SPEED, PULL, FORCE = 5.0, 6.0, 0.5
"""The expert's: greatest speed in m/s, wanted speed per metre of distance, force per m/s that is missing."""


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
        wanted = PULL * (aim - place)
        wanted *= min(1.0, SPEED / max(float(np.linalg.norm(wanted)), 1e-6))
        force: NDArray[np.float64] = FORCE * (wanted - velocity)
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


describe, demonstrate = partial(env.describe, PointMazeEnv), partial(env.demonstrate, PointMazeEnv)
