"""A room of 5 x 5 cells with blocks in it and a green goal, seen by who walks in it. No download, no dependency.

In the manner of MiniGrid: the agent turns left or right or goes forward, and is shown the 7 x 7 cells before it, itself
in the middle of the lowest row, looking up; what lies behind it is not in the picture. An episode ends at the goal
(1 - 0.9 t / limit after t steps) or, cut, after `limit` steps. Goal and blocks decide the split: every fourth layout is
held out for evaluation.

`Trajectories`: an expert's walks as an environment (UI-S1, arXiv 2509.11543): the policy acts, and what it sees next is
recorded.

A step shows the expert's picture and what was done before, in the policy's own words. An action that is the expert's
is paid and leads on. Another one is patched: the expert's action stands in the history in its place, and the episode
goes on, `patches` times; after that it ends. A held-out episode ends at the first.

Walks are rows of a .jsonl file, or, without one, a planner's in this room.

    {"instruction": "mute the alarm", "steps": [
        {"image": "0.png", "action": {"action": "click", "box": [10, 20, 90, 40]}, "thought": "the alarm is ..."},
        {"image": "1.png", "action": {"action": "type", "text": "7:30"}}]}

Pictures lie beside the file. An action is an object as the model is to write it in JSON, with `box` (left, top, right,
bottom) in place of `coordinate`, or a word.
"""

from __future__ import annotations

import json
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from genrl.vlm.environments.contract import Layout, Observation, Split
from genrl.vlm.environments.discrete import Misuse, named
from genrl_rewards.pictures import open_picture

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
        # Wide enough that the view stays inside of it wherever the agent stands and looks.
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


LONGEST = 8  # steps of a planner's walk
FORMAT, TYPE, RIGHT = 0.1, 0.4, 0.5  # UI-S1's weights of the reward's parts


class Step(NamedTuple):
    """What the expert saw, did, and thought."""

    picture: Image.Image | Path
    action: Any
    thought: str = ""


class Trajectories:
    """One episode. train, eval: .jsonl files; None = a planner's walks. patches: actions that are put right before an
    episode ends (UI-S1's code: 2); None = all. patch: what of the expert's step then stands in the history, its action
    alone or with its `thought`. history: last answers that are shown; None = all. expert: the history is the expert's
    throughout, as in plain offline training.

    An action in JSON is paid .1 for being one, .4 for the expert's kind, .5 for its place and text as well; a word .1
    for being one of the room's, .9 for being the expert's.
    """

    layout: Layout = "steps"
    begun = ""

    def __init__(
        self,
        train: str | None = None,
        eval: str | None = None,  # noqa: A002 - as `task` has it
        patches: int | None = 2,
        patch: Literal["action", "thought"] = "action",
        history: int | None = None,
        expert: bool = False,
    ) -> None:
        if patch not in ("action", "thought"):
            raise Misuse(f"trajectories: patch is action or thought, not {patch!r}")
        if eval is not None and train is None:
            raise Misuse("trajectories: eval is given without train; write both, or none for the room's own")
        self.walks: dict[Split, list[tuple[str, list[Step]]]] = {}
        if train is not None:
            self.walks = {"train": read(Path(train)), "eval": read(Path(eval or train))}
        self.patches, self.patch, self.history, self.expert = patches, patch, history, expert
        self.words = () if self.walks else Grid.action_words
        words = f"actions: {', '.join(self.words)}. answer with one of them"
        self.help = words if self.words else 'answer {"thoughts": "...", "action": "...", ...}'

    def reset(self, seed: int, split: Split) -> Observation:
        """The walk of this seed."""
        self.split, self.done, self.patched, self.right = split, 0, 0, 0
        self.said: list[str] = []
        if self.walks:
            rows = self.walks[split]
            self.instruction, self.steps = rows[seed % len(rows)]
        else:
            self.instruction, self.steps = Grid.mission, planned(seed, split)
        return self._shown()

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. info has `matched`: the action was the expert's."""
        expected = self.steps[self.done]
        valid, kind, right = judged(text, expected.action, self.words)
        reward = FORMAT * valid + TYPE * kind + RIGHT * right
        self.done += 1
        if right and not self.expert:
            self.said.append(text)
        else:
            action = expected.action if isinstance(expected.action, str) else json.dumps(written(expected.action))
            self.said.append(f"{expected.thought} {action}".strip() if self.patch == "thought" else action)
        self.right, self.patched = self.right + right, self.patched + (not right)
        most = 0 if self.split == "eval" else self.patches
        over = most is not None and self.patched > most and not (self.expert and self.split == "train")
        ended = over or self.done == len(self.steps)
        all_right = self.right == len(self.steps)
        info: dict[str, Any] = {"valid": bool(valid), "matched": right, "success": all_right}
        if ended:
            info["parts"] = {"progress": self.right / len(self.steps)}
        return ((f"{self.done} done",) if ended else self._shown()), reward, ended, False, info

    def render(self) -> NDArray[np.uint8]:
        """The picture of the step."""
        return np.asarray(open_picture(self.steps[min(self.done, len(self.steps) - 1)].picture))

    def close(self) -> None:
        """Nothing to close."""

    def _shown(self) -> Observation:
        history = self.said if self.history is None else self.said[len(self.said) - self.history :]
        past = ["done. " + " ".join(history)] if history else []
        return (open_picture(self.steps[self.done].picture), "\n".join([*past, self.instruction]))


def judged(text: str, wanted: Any, words: tuple[str, ...]) -> tuple[bool, bool, bool]:
    """Whether a text is an action, of the wanted kind, and the wanted one. words: of actions that are words."""
    if words:
        place = named(text, words, "plain")
        right = place is not None and words[place] == wanted
        return place is not None, right, right
    begin = text.find("{")
    try:
        parsed, _ = json.JSONDecoder().raw_decode(text[begin:]) if begin >= 0 else (None, 0)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("action"), str):
        return False, False, False
    wanted = {"action": wanted} if isinstance(wanted, str) else wanted
    kind = parsed["action"].strip().casefold() == str(wanted["action"]).casefold()
    inside = True
    if "box" in wanted:
        at, (left, top, right, bottom) = parsed.get("coordinate"), wanted["box"]
        if not (
            isinstance(at, list) and len(at) == 2 and all(isinstance(coordinate, int | float) for coordinate in at)
        ):
            at = [left - 1, top - 1]  # none
        inside = left <= at[0] <= right and top <= at[1] <= bottom
    extra_keys = [key for key in wanted if key not in ("action", "box")]
    same = all(str(parsed.get(key)).strip().casefold() == str(wanted[key]).strip().casefold() for key in extra_keys)
    return True, kind, bool(kind and inside and same)


def written(action: dict[str, Any]) -> dict[str, Any]:
    """An expert's action as a model writes it: the middle of its box as the coordinate."""
    shown_action = {key: value for key, value in action.items() if key != "box"}
    if "box" in action:
        left, top, right, bottom = action["box"]
        shown_action["coordinate"] = [round((left + right) / 2), round((top + bottom) / 2)]
    return shown_action


def planned(seed: int, split: Split) -> list[Step]:
    """A planner's walk to the goal, of 2 to `LONGEST` steps, in a room of this seed and split."""
    room, number = Grid(), np.random.default_rng(seed)
    while True:
        room.reset(seed=int(number.integers(2**31)), options={"split": split})
        if 2 <= room.ways()[room.pose] <= LONGEST:
            break
    steps = []
    while room.pose[0] != room.goal:
        action = room.shortest()[0]
        steps.append(Step(Image.fromarray(room.seen()), Grid.action_words[action]))
        room.step(action)
    return steps


def read(file: Path) -> list[tuple[str, list[Step]]]:
    """The walks of a .jsonl file. Raises Misuse, naming the row, for what is none."""
    if not file.is_file():
        raise Misuse(f"trajectories: there is no file {file}")
    actions = []
    for number, line in enumerate(filter(str.strip, file.read_text(encoding="utf-8").splitlines()), 1):
        try:
            row = json.loads(line)
            steps = [Step(file.parent / s["image"], s["action"], s.get("thought", "")) for s in row["steps"]]
            instruction = str(row["instruction"])
        except (ValueError, KeyError, TypeError) as error:
            raise Misuse(f"{file}, row {number}: no walk with instruction and steps: {error!r}") from error
        for k, step_data in enumerate(steps, 1):
            if not isinstance(step_data.action, str) and not (
                isinstance(step_data.action, dict) and "action" in step_data.action
            ):
                raise Misuse(f"{file}, row {number}, step {k}: {step_data.action!r} is no action: a word, or an object")
            if isinstance(step_data.picture, Path) and not step_data.picture.is_file():
                raise Misuse(f"{file}, row {number}, step {k}: there is no picture {step_data.picture}")
        if not steps:
            raise Misuse(f"{file}, row {number}: a walk needs a step")
        actions.append((instruction, steps))
    if not actions:
        raise Misuse(f"{file} has no walks")
    return actions
