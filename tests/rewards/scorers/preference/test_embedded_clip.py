"""The embedded CLIP: small, in the true format, right about right and wrong pictures, with gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import rewards
from genrl.data import world
from rewards.scorers.objects.shapes import Group

FOLDER = Path(__file__).parents[4] / "assets" / "tiny-clip"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="assets/tiny-clip is not built")


def picture(*groups: Group, relation: str | None = None) -> torch.Tensor:
    things = world.place(np.random.default_rng(3), groups, relation)
    drawn = world.draw(world.Scene("two", things, groups, relation))
    return torch.from_numpy(drawn).permute(2, 0, 1)[None].float() / 255


def test_it_is_small_and_holds_no_pickle() -> None:
    files = list(FOLDER.iterdir())
    assert 1e6 < sum(file.stat().st_size for file in files) <= 3e6
    assert {file.suffix for file in files} <= {".json", ".txt", ".safetensors"}


@pytest.mark.parametrize("name", ["clipscore", "pickscore"])
def test_right_pictures_score_above_wrong_ones(name: str) -> None:
    processor = {"processor": str(FOLDER)} if name == "pickscore" else {}
    reward = rewards.load(name, {"model": str(FOLDER), **processor})
    shown = picture(Group(2, "red", "circle"), Group(1, "blue", "square"))
    right = "two red circles and a blue square"
    wrong = ["a red circle and a blue square", "two green circles and a blue square", "two red stars and a blue square",
             "two blue circles and a red square", "three purple stars", 'a red sign that says "LAMP"']  # fmt: skip
    scores = rewards.score(reward, images=shown.repeat(7, 1, 1, 1), prompts=[right, *wrong]).values
    assert scores[0] > max(scores[1:])
    beside = picture(Group(1, "red", "star"), Group(1, "blue", "circle"), relation="to the left of")
    texts = [f"a red star {relation} a blue circle" for relation in ("to the left of", "to the right of", "above")]
    left, *others = rewards.score(reward, images=beside.repeat(3, 1, 1, 1), prompts=texts).values
    assert left > max(others)


def test_its_gradient_is_that_of_differences() -> None:
    reward = rewards.load("clipscore", {"model": str(FOLDER)})
    images = (0.1 + 0.8 * picture(Group(2, "red", "circle"))).requires_grad_()
    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).sign()

    def value(shift: float) -> torch.Tensor:
        moved = images + shift * direction
        return rewards.score_with_gradients(reward, images=moved, prompts=["a red circle"])

    (gradient,) = torch.autograd.grad(value(0.0).sum(), images)
    slope = float((value(1e-3) - value(-1e-3)).detach()) / 2e-3
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=0.02, abs=1e-3)
