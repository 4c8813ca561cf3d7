"""An expert's walks as an environment (UI-S1, arXiv 2509.11543): the policy acts, and what it sees next is recorded.

A step shows the expert's picture and what was done before, in the policy's own words. An action that is the expert's
is paid and leads on. Another one is patched: the expert's action stands in the history in its place, and the episode
goes on, `patches` times; after that it ends. A held-out episode ends at the first.

Walks are rows of a .jsonl file, or, without one, a planner's in the room of `grid`.

    {"instruction": "mute the alarm", "steps": [
        {"image": "0.png", "action": {"action": "click", "box": [10, 20, 90, 40]}, "thought": "the alarm is ..."},
        {"image": "1.png", "action": {"action": "type", "text": "7:30"}}]}

Pictures lie beside the file. An action is an object as the model is to write it in JSON, with `box` (left, top, right,
bottom) in place of `coordinate`, or a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from genrl.playground.grid import Grid
from genrl.vlm.environments.contract import Layout, Observation, Split
from genrl.vlm.environments.discrete import Misuse, named
from genrl_rewards.pictures import open_picture

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
