"""A room of 5 x 5 cells with blocks in it and a green goal, seen by who walks in it. No download, no dependency.

In the manner of MiniGrid: the agent turns left or right or goes forward, and is shown the 7 x 7 cells before it, itself
in the middle of the lowest row, looking up; what lies behind it is not in the picture. An episode ends at the goal
(1 - 0.9 t / limit after t steps) or, cut, after `limit` steps. Goal and blocks decide the split: every fourth layout is
held out for evaluation.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from genrl.vlm.environments.contract import Split

SIDE = 5  # cells of the room
VIEW = 7  # cells of a picture
CELL = 8  # pixels
FLOOR, WALL, BLOCK, GOAL = range(4)
COLOURS = np.array([(76, 76, 76), (146, 146, 146), (172, 116, 60), (76, 255, 76)], np.uint8)
LINE, AGENT = 104, (255, 76, 76)
AHEAD = ((-1, 0), (0, 1), (1, 0), (0, -1))  # (row, column) by the number of right turns from looking up

Cell = tuple[int, int]
Pose = tuple[Cell, int]


def held_out(goal: Cell, blocks: frozenset[Cell]) -> bool:
    """Whether a room that is so furnished is for evaluation only."""
    return sum(row * SIDE + column for row, column in (goal, *blocks)) % 4 == 0


class Grid(gymnasium.Env[NDArray[np.uint8], Any]):
    """Actions 0 to 2 are left, right, forward; a step against a block stays where it is. Pictures [56, 56, 3] uint8.

    options of `reset`: `split`, "train" or "eval".
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    action_words = ("left", "right", "forward")
    mission = "get to the green goal square"

    def __init__(self, blocks: int = 5, limit: int = 30) -> None:
        """blocks: 0 to 12; in an empty room one finds the goal by following its walls. Raises ValueError for others."""
        if not 0 <= blocks <= SIDE**2 // 2:
            raise ValueError(f"blocks are 0 to {SIDE**2 // 2} of the {SIDE**2} cells, got {blocks}")
        self.number, self.max_steps = blocks, limit
        self.action_space = spaces.Discrete(len(self.action_words))
        self.observation_space = spaces.Box(0, 255, (VIEW * CELL, VIEW * CELL, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Draw a room in which there is a way of more than one step."""
        super().reset(seed=seed)
        split = cast(Split, (options or {}).get("split", "train"))
        while True:
            cells = [divmod(int(c), SIDE) for c in self.np_random.permutation(SIDE**2)]
            self.goal, self.blocks = cells[1], frozenset(cells[2 : 2 + self.number])
            self.pose: Pose = (cells[0], int(self.np_random.integers(4)))
            if held_out(self.goal, self.blocks) == (split == "eval") and self.ways().get(self.pose, 0) > 1:
                break
        self.elapsed = 0
        return self.seen(), {}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """See gymnasium; info has `success`."""
        self.elapsed += 1
        self.pose = self.moved(self.pose, action)
        success = self.pose[0] == self.goal
        reward = 1.0 - 0.9 * self.elapsed / self.max_steps if success else 0.0
        return self.seen(), reward, success, self.elapsed >= self.max_steps and not success, {"success": success}

    def moved(self, pose: Pose, action: int) -> Pose:
        """Pose to which an action leads."""
        (row, column), facing = pose
        if action < 2:
            return (row, column), (facing + (-1, 1)[action]) % 4
        target = (row + AHEAD[facing][0], column + AHEAD[facing][1])
        return (target if self._free(target) else (row, column)), facing

    def ways(self) -> dict[Pose, int]:
        """Steps to the goal from every pose that has a way."""
        distances: dict[Pose, int] = {(self.goal, facing): 0 for facing in range(4)}
        queue = deque(distances)
        while queue:
            (row, column), facing = pose = queue.popleft()
            back = (row - AHEAD[facing][0], column - AHEAD[facing][1])
            turned = [((row, column), (facing + turn) % 4) for turn in (1, 3)]
            for before in [*turned, (back, facing)]:
                if before not in distances and self._free(before[0]):
                    distances[before] = distances[pose] + 1
                    queue.append(before)
        return distances

    def shortest(self) -> list[int]:
        """The actions that lead nearer to the goal: what a planner would do."""
        ways = self.ways()
        return [action for action in range(3) if ways[self.moved(self.pose, action)] < ways[self.pose]]

    def view(self) -> NDArray[np.int64]:
        """Kinds of the 7 x 7 cells that the agent sees."""
        (row, column), facing = self.pose
        around = np.pad(self._cells(), VIEW, constant_values=WALL)
        far, top, left = VIEW - 1, VIEW + 1 + row, VIEW + 1 + column  # how far it sees; its place in `around`
        square = around[top - far : top + far + 1, left - far : left + far + 1]
        return np.rot90(square, facing)[:VIEW, far // 2 : far // 2 + VIEW]

    def seen(self) -> NDArray[np.uint8]:
        """Picture of it as pixels."""
        pixels, left = _painted(self.view()), VIEW // 2 * CELL
        pixels[-CELL:, left : left + CELL] = _agent(0)
        return pixels

    def render(self) -> NDArray[np.uint8]:
        """The room from above."""
        (row, column), facing = self.pose
        pixels = _painted(self._cells())
        pixels[(row + 1) * CELL : (row + 2) * CELL, (column + 1) * CELL : (column + 2) * CELL] = _agent(facing)
        return pixels

    def _cells(self) -> NDArray[np.int64]:
        """Kinds of the cells of the room and of the walls around it, by rows."""
        cells = np.full((SIDE + 2, SIDE + 2), WALL)
        cells[1:-1, 1:-1] = FLOOR
        for kind, places in ((GOAL, [self.goal]), (BLOCK, self.blocks)):
            for row, column in places:
                cells[row + 1, column + 1] = kind
        return cells

    def _free(self, cell: Cell) -> bool:
        return 0 <= cell[0] < SIDE and 0 <= cell[1] < SIDE and cell not in self.blocks


def _painted(cells: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Cells [H, W] as pixels, with a thin line between floors."""
    pixels = COLOURS[cells].repeat(CELL, 0).repeat(CELL, 1)
    lines = (cells == FLOOR).repeat(CELL, 0).repeat(CELL, 1)
    lines &= (np.arange(len(pixels))[:, None] % CELL == 0) | (np.arange(pixels.shape[1]) % CELL == 0)
    pixels[lines] = LINE
    return pixels


@cache
def _agent(facing: int) -> NDArray[np.uint8]:
    """A triangle that points where the agent looks, drawn at four times the size, then reduced."""
    size = 4 * CELL
    canvas = Image.new("RGB", (size, size), tuple(map(int, COLOURS[FLOOR])))
    ImageDraw.Draw(canvas).polygon([(size // 2, 3), (size - 5, size - 4), (4, size - 4)], fill=AGENT)
    return np.array(canvas.reduce(4).rotate(-90 * facing))
