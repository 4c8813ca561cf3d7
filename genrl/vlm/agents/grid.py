"""A room of 3 x 3 cells with walls and two things: "go to the red circle". No download, and no dependency.

An episode ends at the thing that is asked for (1 - 0.9 t / limit after t steps, as in MiniGrid), at the other one (-1),
or, cut, after `limit` steps. Which pair of cells the agent begins in and has to reach decides the split: every fourth
pair is held out, so in held-out episodes no way leads from where to where it led in training.
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

from genrl.vlm.agents.contract import Split
from rewards.shapes import COLOURS, PALETTE, SHAPES, outline

SIDE = 3
CELL = 16  # pixels
WALLS = 2
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
FLOOR, WALL, AGENT = (244, 243, 238), (90, 92, 104), (16, 16, 20)
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]

Cell = tuple[int, int]


def held_out(start: Cell, goal: Cell) -> bool:
    """Whether ways from one cell to the other are for evaluation only."""
    return (start[0] * SIDE + start[1] + goal[0] * SIDE + goal[1]) % 4 == 0


class Grid(gymnasium.Env[NDArray[np.uint8], Any]):
    """Actions 0 to 3 are left, right, up, down; a move against a wall stays where it is. Pictures [48, 48, 3] uint8.

    options of `reset`: `split`, "train" or "eval".
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    action_words = tuple(MOVES)

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self.action_space = spaces.Discrete(len(MOVES))
        side = SIDE * CELL
        self.observation_space = spaces.Box(0, 255, (side, side, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Draw a room in which there is a way, past walls and the other thing."""
        super().reset(seed=seed)
        split = cast(Split, (options or {}).get("split", "train"))
        while True:
            cells = [divmod(int(c), SIDE) for c in self.np_random.permutation(SIDE**2)]
            self.agent, self.goal, self.other = cells[:3]
            self.walls = frozenset(cells[3 : 3 + WALLS])
            if held_out(self.agent, self.goal) == (split == "eval") and self.ways().get(self.agent, 0) > 1:
                break
        asked, else_ = (KINDS[k] for k in self.np_random.permutation(len(KINDS))[:2])
        self.kinds = {self.goal: asked, self.other: else_}
        self.mission = "go to the " + " ".join(asked)
        self.elapsed = 0
        return self.render(), {}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """See gymnasium; info has `success`."""
        self.elapsed += 1
        move = list(MOVES.values())[action]
        there = (self.agent[0] + move[0], self.agent[1] + move[1])
        if _inside(there) and there not in self.walls:
            self.agent = there
        success, wrong = self.agent == self.goal, self.agent == self.other
        reward = 1.0 - 0.9 * self.elapsed / self.limit if success else -1.0 if wrong else 0.0
        ended = success or wrong
        return self.render(), reward, ended, self.elapsed >= self.limit and not ended, {"success": success}

    def ways(self) -> dict[Cell, int]:
        """Steps to the goal from every cell that has a way."""
        found, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            cell = queue.popleft()
            for move in MOVES.values():
                near = (cell[0] + move[0], cell[1] + move[1])
                if _inside(near) and near not in self.walls and near != self.other and near not in found:
                    found[near] = found[cell] + 1
                    queue.append(near)
        return found

    def shortest(self) -> list[str]:
        """The moves that lead nearer to the goal: what a planner would do."""
        ways, (row, column) = self.ways(), self.agent
        near = {word: ways.get((row + dr, column + dc)) for word, (dr, dc) in MOVES.items()}
        return [word for word, steps in near.items() if steps is not None and steps < ways[self.agent]]

    def render(self) -> NDArray[np.uint8]:
        """The room from above."""
        shown = np.empty((SIDE, CELL, SIDE, CELL, 3), dtype=np.uint8)
        shown[:] = tile("floor")[None, :, None]
        for cell, (colour, shape) in self.kinds.items():
            shown[cell[0], :, cell[1]] = tile(shape, PALETTE[colour])
        for cell in self.walls:
            shown[cell[0], :, cell[1]] = tile("wall")
        shown[self.agent[0], :, self.agent[1]] = tile("agent")
        return shown.reshape(SIDE * CELL, SIDE * CELL, 3)


@cache
def tile(kind: str, colour: tuple[int, int, int] = AGENT) -> NDArray[np.uint8]:
    """A cell, drawn at four times the size, then reduced: floor, wall, agent (a cross), or a shape of a colour."""
    size = 4 * CELL
    canvas = Image.new("RGB", (size, size), WALL if kind == "wall" else FLOOR)
    pen = ImageDraw.Draw(canvas)
    if kind == "agent":
        pen.line((12, 12, size - 13, size - 13), fill=colour, width=10)
        pen.line((12, size - 13, size - 13, 12), fill=colour, width=10)
    elif kind in SHAPES:
        corners = 0.42 * size * outline(kind) + size / 2
        pen.polygon([(float(x), float(y)) for x, y in corners], fill=colour)
    return np.array(canvas.reduce(4))


def _inside(cell: Cell) -> bool:
    return 0 <= cell[0] < SIDE and 0 <= cell[1] < SIDE
