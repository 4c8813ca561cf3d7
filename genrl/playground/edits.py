"""Edits of the small world: a picture with one or two shapes, and an instruction to move or to resize one of them.

    rng = numpy.random.default_rng(0)
    edit = sample_edit(rng, "move")
    edit.instruction                      # 'move the red circle to the left'
    draw(edit.scene), draw(carry_out(rng, edit))

The embedded editing model is trained on such pairs, `assets/edits` holds the instructions for reinforcement learning.
`genrl_rewards.scorers.objects.spatial_edit` detects the shapes in the edited picture and judges their positions and
sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from genrl.playground.shapes import SIZE, Scene, Split, Thing, held_out, sample_scene

Task = Literal["move", "scale"]

WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
PHRASES = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
FACTORS = {"bigger": 1.4, "smaller": 0.7}  # that the prompt files ask for
RANGES = {"bigger": (1.2, 1.6), "smaller": (0.6, 0.85)}  # of the factors in the training pairs
SHORTEST, LONGEST = 10.0, 26.0  # pixels by which a thing is moved
EDIT_WORDS = ("bigger", "down", "make", "move", "smaller", "up")


@dataclass(frozen=True)
class Edit:
    """A picture, and what is asked of its first thing."""

    scene: Scene
    task: Task
    asked: str
    """A key of `WAYS` (move) or of `FACTORS` (scale)."""

    @property
    def object(self) -> str:
        """The thing's name: `red circle`."""
        return f"{self.scene.things[0].colour} {self.scene.things[0].shape}"

    @property
    def instruction(self) -> str:
        """What is asked, in words."""
        if self.task == "move":
            return f"move the {self.object} {PHRASES[self.asked]}"
        return f"make the {self.object} {self.asked}"

    @property
    def columns(self) -> dict[str, str | float]:
        """Columns of a prompt file beside the prompt and the picture, as `genrl_rewards.scorers.objects.spatial_edit`
        asks
        for them."""
        wanted: str | float = self.asked if self.task == "move" else FACTORS[self.asked]
        return {"object": self.object, "direction" if self.task == "move" else "factor": wanted}


def sample_edit(rng: np.random.Generator, task: Task, split: Split = "train") -> Edit:
    """Sample an edit that can be carried out. Half of the pictures have a second thing, which is to stay as it is."""
    while True:
        scene = sample_scene(rng, "single" if rng.random() < 0.5 else "two", split)
        if split == "eval" and not held_out(scene.groups[0]):
            continue  # the held-out combination is that of the second thing, which is not edited
        choices = list(WAYS if task == "move" else FACTORS)
        edit = Edit(scene, task, choices[rng.integers(len(choices))])
        if any(_ends(edit, edit.asked, amount) for amount in _amounts(task, edit.asked)):
            return edit


def carry_out(rng: np.random.Generator, edit: Edit, sloppiness: float = 0.0) -> Scene:
    """The scene after the edit, its distance or factor sampled. With probability `sloppiness` it is another edit of the
    same task than the one asked for (another direction, or the other change of size), where one is possible."""
    asked = edit.asked
    if rng.random() < sloppiness:
        others = [way for way in (WAYS if edit.task == "move" else FACTORS) if way != asked]
        others = [way for way in others if any(_ends(edit, way, amount) for amount in _amounts(edit.task, way))]
        asked = others[rng.integers(len(others))] if others else asked
    amounts = [amount for amount in _amounts(edit.task, asked) if _ends(edit, asked, amount)]
    thing = _ends(edit, asked, amounts[rng.integers(len(amounts))])
    assert thing is not None
    return replace(edit.scene, things=(thing, *edit.scene.things[1:]))


def _amounts(task: Task, asked: str) -> list[float]:
    """The distances in pixels, or the factors, to choose from."""
    low, high = (SHORTEST, LONGEST) if task == "move" else RANGES[asked]
    return [float(amount) for amount in np.linspace(low, high, 17)]


def _ends(edit: Edit, asked: str, amount: float) -> Thing | None:
    """The first thing after the edit; None where it would leave the picture or touch the other one."""
    thing, others = edit.scene.things[0], edit.scene.things[1:]
    if edit.task == "move":
        x, y = WAYS[asked]
        moved = replace(thing, x=thing.x + x * amount, y=thing.y + y * amount)
    else:
        moved = replace(thing, radius=thing.radius * amount)
    margin = 1.2 * moved.radius + 1
    inside = all(margin <= place <= SIZE - margin for place in (moved.x, moved.y))
    apart = all(np.hypot(moved.x - o.x, moved.y - o.y) > 1.2 * (moved.radius + o.radius) + 1 for o in others)
    return moved if inside and apart else None


def edits(task: Task, split: Split) -> list[Edit]:
    """The edits of a prompt file: 160 to train on, or 64 held out (of combinations absent from training), with each
    direction or change of size equally often."""
    # A stream of its own per file: more training edits would leave the held-out ones as they are.
    rng = np.random.default_rng([2026, task == "scale", split == "eval"])
    number, choices = (64 if split == "eval" else 160), list(WAYS if task == "move" else FACTORS)
    each = number // len(choices)
    by_way: dict[str, list[Edit]] = {way: [] for way in choices}
    while any(len(of_way) < each for of_way in by_way.values()):
        edit = sample_edit(rng, task, split)
        if len(by_way[edit.asked]) < each:
            by_way[edit.asked].append(edit)
    return [by_way[way][k] for k in range(each) for way in choices]
