"""The embedded CLIP: small, in the true format, right about right and wrong pictures, with gradients."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import genrl_rewards
from genrl.playground import shapes as world
from genrl_rewards.scorers.objects.shapes import Group

FOLDER = Path(__file__).parents[4] / "assets" / "tiny-clip"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="assets/tiny-clip is not built")


def picture(*groups: Group, relation: str | None = None) -> torch.Tensor:
    things = world.place(np.random.default_rng(3), groups, relation)
    drawn = world.draw(world.Scene("two", things, groups, relation))
    return torch.from_numpy(drawn).permute(2, 0, 1)[None].float() / 255


def test_right_pictures_score_above_wrong_ones() -> None:
    reward = genrl_rewards.load("clipscore", {"model": str(FOLDER)})
    shown = picture(Group(2, "red", "circle"), Group(1, "blue", "square"))
    right = "two red circles and a blue square"
    wrong = ["a red circle and a blue square", "two green circles and a blue square", "two red stars and a blue square",
             "two blue circles and a red square", "three purple stars", 'a red sign that says "LAMP"']  # fmt: skip
    scores = genrl_rewards.score(reward, images=shown.repeat(7, 1, 1, 1), prompts=[right, *wrong]).values
    assert scores[0] > max(scores[1:])
    beside = picture(Group(1, "red", "star"), Group(1, "blue", "circle"), relation="to the left of")
    texts = [f"a red star {relation} a blue circle" for relation in ("to the left of", "to the right of", "above")]
    left, *others = genrl_rewards.score(reward, images=beside.repeat(3, 1, 1, 1), prompts=texts).values
    assert left > max(others)


def test_the_cells_of_a_grid_are_compared_with_their_own_parts() -> None:
    red, blue = picture(Group(2, "red", "circle")), picture(Group(1, "blue", "square"))
    grid = torch.cat([red, blue], dim=-1)
    reward = genrl_rewards.load("clip_grid", {"model": str(FOLDER), "grid": "1x2"})
    parts = ["two red circles", "a blue square"]
    prompts = [f"both of one style. [LEFT]: {parts[0]} [RIGHT]: {parts[1]}", f"[LEFT]:{parts[1]} [RIGHT]:{parts[0]}"]
    right, swapped = genrl_rewards.score(reward, images=grid.repeat(2, 1, 1, 1), prompts=prompts).values
    whole = genrl_rewards.load("clipscore", {"model": str(FOLDER)})
    own = genrl_rewards.score(whole, images=torch.cat([red, blue]), prompts=parts).values
    assert right == pytest.approx(sum(own) / 2, abs=1e-5) and right > swapped + 0.1
    reward = genrl_rewards.load("clip_grid", {"model": str(FOLDER), "grid": "layout"})
    assert genrl_rewards.needs(reward).columns == ("layout",)
    grids = {"layout": ["1x2", "2x2"]}
    images = picture(Group(2, "red", "circle")).repeat(2, 1, 1, 1)
    found = genrl_rewards.score(reward, images=images, prompts=["a red circle", "two stars"], columns=grids)
    assert not found.failures and all(map(math.isnan, found.values))
    labels = "[TOP]-[LEFT]: a [TOP]-[RIGHT]: b"
    found = genrl_rewards.score(reward, images=images, prompts=[labels, labels], columns=grids)
    assert "2 x 2 cells, and the prompt has 2 parts" in found.failures[0].traceback
