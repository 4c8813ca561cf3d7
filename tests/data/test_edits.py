"""Edits of the small world: what is asked can be done, is done, and touches nothing else; files are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl.data.edits import FACTORS, LONGEST, RANGES, SHORTEST, WAYS, Task, carry_out, edits, sample_edit
from genrl.playground.shapes import SIZE, draw, held_out
from genrl_rewards.scorers.objects.shapes import find


@pytest.mark.parametrize("task", ["move", "scale"])
def test_an_edit_changes_the_named_thing_as_asked_and_no_other(task: Task) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        edit = sample_edit(rng, task, "all")
        after = carry_out(rng, edit)
        old, new = edit.scene.things[0], after.things[0]
        assert after.things[1:] == edit.scene.things[1:] and (new.colour, new.shape) == (old.colour, old.shape)
        assert edit.object in edit.instruction
        if task == "move":
            x, y = WAYS[edit.asked]
            along, across = (new.x - old.x) * x + (new.y - old.y) * y, (new.x - old.x) * y + (new.y - old.y) * x
            assert SHORTEST - 1e-9 <= along <= LONGEST + 1e-9
            assert across == pytest.approx(0) and new.radius == old.radius
        else:
            low, high = RANGES[edit.asked]
            assert low <= new.radius / old.radius <= high + 1e-9 and (new.x, new.y) == (old.x, old.y)
            assert (FACTORS[edit.asked] > 1) == (edit.asked == "bigger")
        margin = 1.2 * new.radius
        assert margin <= min(new.x, new.y) and max(new.x, new.y) <= SIZE - margin


def test_sloppy_edits_go_another_way_as_often_as_told() -> None:
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(600):
        edit = sample_edit(rng, "move", "all")
        old, new = edit.scene.things[0], carry_out(rng, edit, sloppiness=0.4).things[0]
        x, y = WAYS[edit.asked]
        wrong += (new.x - old.x) * x + (new.y - old.y) * y <= 0
    assert 0.3 < wrong / 600 < 0.45  # a little less than .4: some things can go nowhere else


@pytest.mark.parametrize("task", ["move", "scale"])
def test_the_shipped_files_are_the_drawn_ones(task: Task, root: Path) -> None:
    """Held-out instructions are of combinations that training has not; the pictures show the named things."""
    prompts: dict[str, set[str]] = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in (root / "assets/edits" / f"{task}_{split}.jsonl").read_text().splitlines()]
        drawn = edits(task, split)  # type: ignore[arg-type]
        assert [row["prompt"] for row in rows] == [edit.instruction for edit in drawn]
        prompts[split] = {row["prompt"] for row in rows}
        for row, edit in zip(rows, drawn, strict=True):
            assert held_out(edit.scene.groups[0]) == (split == "eval")
            picture = np.array(Image.open(root / "assets/edits" / row["source_image"]))
            assert row["object"] == edit.object and row.get("direction", edit.asked) == edit.asked
            assert np.array_equal(picture, draw(edit.scene))
            assert edit.object in {f"{found.colour} {found.shape}" for found in find(picture)}
    assert not prompts["train"] & prompts["eval"]


def test_the_shipped_pairs_are_the_edits_carried_out_as_asked(root: Path) -> None:
    """Targets of the first moves to train on, as the rules of the small world judge them."""
    folder = root / "assets/edits"
    rows, known = (
        [json.loads(line) for line in (folder / f"move_{part}.jsonl").read_text().splitlines()]
        for part in ("pairs", "train")
    )
    blank = {"target_image": None}
    assert len(rows) == 96 and [row | blank for row in rows] == [row | blank for row in known[:96]]
    before, after = (
        [Image.open(folder / row[f"{k}_image"]).convert("RGB") for row in rows] for k in ("source", "target")
    )
    images = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255 for picture in after])
    columns = {"source_image": before} | {name: [row[name] for row in rows] for name in ("object", "direction")}
    for name, least in (("edit_move", 0.4), ("edit_keep", 0.93)):
        reward = genrl_rewards.load(name, {"detector": "shapes"})
        assert min(genrl_rewards.score(reward, images=images, prompts=[""] * 96, columns=columns).values) > least
