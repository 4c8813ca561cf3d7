"""The emoji questions: answers follow from what is drawn, and the held-out pairs are held out."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from genrl.playground.tasks import emoji
from genrl.playground.tasks.emoji import ASKS, CELL, EACH, KINDS, NAMES
from genrl.vlm import tasks
from genrl.vlm.tasks import Split


def asked(name: str, split: Split, number: int) -> emoji.Asked:
    return ASKS[name](np.random.default_rng(number), split)


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_held_out_pictures_and_no_others_show_a_held_out_pair(name: str, split: Split) -> None:
    for number in range(100):
        things = set(asked(name, split, number)[0].values())
        pairs = [(a, b) for a in things for b in things if a < b and (a + b) % 5 == 0]
        assert bool(pairs) == (split == "eval")


def test_answers_are_what_the_cells_hold() -> None:
    for number in range(150):
        for split in ("train", "eval"):
            kinds = Counter(KINDS[k // EACH] for k in asked("category", split, number)[0].values())
            (first, many), (_, fewer) = kinds.most_common()
            assert asked("category", split, number)[2] == first and many > fewer
            cells, question, answer, _ = asked("count", split, number)
            assert sum(KINDS[k // EACH] == question.split()[2] for k in cells.values()) == int(answer)
            cells, question, answer, _ = asked("place", split, number)
            (cell,) = [c for c, k in cells.items() if NAMES[k] == question.split()[3]]
            row, column = answer.split()
            assert (cell // 3, cell % 3) == (emoji.ROWS.index(row), emoji.COLUMNS.index(column))
            cells, question, answer, _ = asked("combination", split, number)
            where = {NAMES[k]: divmod(c, 3) for c, k in cells.items()}
            off = np.subtract(where[answer], where[question.split()[-2]]).tolist()
            steps = {"left": [0, -1], "right": [0, 1], "above": [-1, 0], "below": [1, 0]}
            assert off == steps[question.split()[2]]


def test_what_is_held_out_tells_no_answer() -> None:
    """The thing asked for and the thing that is the answer are no held-out pair in either split."""
    for number in range(200):
        _, question, answer, _ = asked("combination", "eval", number)
        assert (NAMES.index(question.split()[-2]) + NAMES.index(answer)) % 5
    answers = defaultdict(Counter)
    for split in ("train", "eval"):
        for number in range(400):
            answers[split][asked("place", split, number)[2]] += 1
        assert len(answers[split]) == 9 and max(answers[split].values()) < 80


def test_a_glyph_stands_in_its_cell_and_nothing_elsewhere() -> None:
    for thing in range(0, len(NAMES), 7):
        shown = np.array(emoji.picture(np.random.default_rng(thing), {5: thing})).astype(int)
        off = np.abs(shown - shown[0, 0]).sum(-1) > 0
        inside = np.zeros_like(off)
        inside[CELL : 2 * CELL, 2 * CELL :] = True
        assert off[inside].mean() > 0.1 and not off[~inside].any()
    assert len({glyph.tobytes() for glyph in emoji.sheet_glyphs()}) == len(NAMES) == len(set(NAMES)) == 96


def test_levels_grow_with_the_kind_of_question() -> None:
    levels = [tasks.row(f"emoji_{name}", "train", 0).columns["level"] for name in ASKS]
    assert levels == [1, 2, 3, 4]
    assert {tasks.row("emoji", "train", k).columns["level"] for k in range(40)} == {1, 2, 3, 4}
