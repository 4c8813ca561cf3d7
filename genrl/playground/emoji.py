"""A world of captioned pictures with 64 things: some of them, in some number, somewhere. NumPy and Pillow only.

`assets/tiny-emoji` is trained on it, prompt files come from it, and `genrl_rewards.scorers.objects.emoji` recognises
it. It has 1.1 million captions. Everything is a pure function of an explicit `numpy.random.Generator`.

    rng = numpy.random.default_rng(0)
    scene = sample_scene(rng)
    caption(scene), draw(scene)          # 'two cats above a drum', uint8 [64, 64, 3]

Splits. Held out are one in five of the combinations of a thing with a number, and of the pairs of two things
(`held_out`). A "train" scene has none of them, an "eval" scene at least one. The embedded model is taught by "train"
scenes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from genrl_rewards.scorers.objects.emoji import (
    BACKGROUND,
    GLYPH,
    OBJECTS,
    PICTURE,
    PLURALS,
    RELATIONS,
    Group,
    glyph,
    parse,
)

Split = Literal["train", "eval"]
Kind = Literal["single", "count", "two", "position", "three"]

KINDS: dict[Kind, float] = {"single": 1, "count": 2, "two": 2, "position": 3, "three": 2}
STEP = 8  # pixels: a thing's place is a multiple of it, as are the patches of the embedded model
CELL = 24  # pixels: a thing's square, its glyph in the middle
NUMBER_WORDS = {2: "two", 3: "three", 4: "four"}
# Every word of the captions but "a", which is a single byte. A plural comes after its singular.
WORDS = (
    *("an", "two", "three", "four", "and", "left", "right", "of", "above", "below"),
    *(word for name in OBJECTS for word in (name, PLURALS[name])),
)


@dataclass(frozen=True)
class Thing:
    """One thing: its name and the top left corner of its glyph, in pixels."""

    name: str
    x: int
    y: int


@dataclass(frozen=True)
class Scene:
    """A picture's content: `things` realise `groups` in order."""

    things: tuple[Thing, ...]
    groups: tuple[Group, ...]
    relation: str | None = None


def held_out(groups: tuple[Group, ...]) -> bool:
    """Whether a number of one thing, or a pair of things, is kept out of training."""
    numbers = [OBJECTS.index(group.name) for group in groups]
    counted = any((number + group.count) % 5 == 0 for number, group in zip(numbers, groups, strict=True))
    return counted or any((a + b) % 5 == 0 for a, b in combinations(numbers, 2))


def sample_scene(rng: np.random.Generator, kind: Kind | None = None, split: Split = "train") -> Scene:
    """Sample a scene; without `kind` in the proportions `KINDS`."""
    groups, relation = sample_groups(rng, kind, split)
    return Scene(place(rng, groups, relation), groups, relation)


def sample_groups(
    rng: np.random.Generator, kind: Kind | None = None, split: Split = "train"
) -> tuple[tuple[Group, ...], str | None]:
    """One to three groups of at most four things that belong to the split, and the relation where the kind has one."""
    if kind is None:
        weights = np.array(list(KINDS.values()))
        kind = list(KINDS)[rng.choice(len(weights), p=weights / weights.sum())]
    choices: dict[Kind, tuple[tuple[int, ...], ...]] = {
        "single": ((1,),),
        "count": ((2,), (3,), (4,)),
        "two": ((1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1)),
        "position": ((1, 1), (1, 1), (1, 2), (2, 1), (2, 2)),
        "three": ((1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)),
    }
    while True:
        counts = choices[kind][rng.integers(len(choices[kind]))]
        picks = rng.choice(len(OBJECTS), size=len(counts), replace=False)
        groups = tuple(Group(count, OBJECTS[pick]) for count, pick in zip(counts, picks, strict=True))
        if held_out(groups) == (split == "eval"):
            return groups, RELATIONS[rng.integers(len(RELATIONS))] if kind == "position" else None


def place(rng: np.random.Generator, groups: tuple[Group, ...], relation: str | None) -> tuple[Thing, ...]:
    """Random places inside the picture, apart from each other and as the relation wants."""
    names = [group.name for group in groups for _ in range(group.count)]
    across = (PICTURE - CELL) // STEP + 1
    while True:
        cells = rng.integers(across, size=(len(names), 2)) * STEP
        if any(np.abs(a - b).max() < CELL for a, b in combinations(cells, 2)):
            continue
        if relation:
            axis, sign = (0 if "of" in relation else 1), (1 if relation in ("right of", "below") else -1)
            ours, theirs = np.split(cells[:, axis] * sign, [groups[0].count])
            if ours.min() - theirs.max() < CELL:
                continue
        margin = (CELL - GLYPH) // 2
        return tuple(Thing(name, int(x) + margin, int(y) + margin) for name, (x, y) in zip(names, cells, strict=True))


def caption(scene: Scene) -> str:
    """What the scene shows, in words; `genrl_rewards.scorers.objects.emoji.parse` reads it back."""
    return caption_of(scene.groups, scene.relation)


def caption_of(groups: tuple[Group, ...], relation: str | None) -> str:
    phrases = [_phrase(group) for group in groups]
    if relation or len(phrases) == 1:
        return f" {relation} ".join(phrases)
    return f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def _phrase(group: Group) -> str:
    if group.count > 1:
        return f"{NUMBER_WORDS[group.count]} {PLURALS[group.name]}"
    return f"{'an' if group.name[0] in 'aeiou' else 'a'} {group.name}"


def kind_of(text: str) -> Kind | None:
    """The kind of scene that a caption of the world's grammar asks for; None for any other text."""
    request = parse(text)
    if request is None:
        return None
    if len(request.groups) == 1:
        return "single" if request.groups[0].count == 1 else "count"
    return "position" if request.relation else "two" if len(request.groups) == 2 else "three"


def draw(scene: Scene) -> np.ndarray:
    """The rendered picture, uint8 [64, 64, 3]."""
    picture = np.full((PICTURE, PICTURE, 3), BACKGROUND, dtype=np.uint8)
    for thing in scene.things:
        picture[thing.y : thing.y + GLYPH, thing.x : thing.x + GLYPH] = glyph(thing.name)
    return picture


def prompts(split: Split, number: int) -> list[str]:
    """Captions for RL, all different, kinds mixed evenly along the list in the proportions `KINDS`."""
    rng = np.random.default_rng([2026, split == "eval"])
    columns = []
    for kind, weight in KINDS.items():
        quota = round(number * weight / sum(KINDS.values()))
        unique: dict[str, None] = {}
        while len(unique) < min(quota, 10 if kind == "single" else quota):
            unique[caption_of(*sample_groups(rng, kind, split))] = None
        columns += [((i + 0.5) / len(unique), text) for i, text in enumerate(unique)]
    return [text for _, text in sorted(columns)]
