"""The rule-based checker: perfect scenes are perfect, every mistake costs, an unknown caption has no score."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage

import genrl_rewards
from genrl.playground import shapes as world
from genrl_rewards.scorers.objects.shapes import (
    BACKGROUND,
    PALETTE,
    Asked,
    Detection,
    Group,
    Shapes,
    alike,
    check,
    find,
    parse,
)


def scene(*things: tuple[str, str, float, float]) -> np.ndarray:
    """A picture of (colour, shape, x, y), radius 9."""
    placed = tuple(world.Thing(colour, shape, x, y, 9.0) for colour, shape, x, y in things)
    return world.draw(world.Scene("mixed", placed))


def ask(caption: str) -> Asked:
    asked = parse(caption)
    assert asked is not None
    return asked


def as_tensor(*pictures: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


@pytest.mark.parametrize("kind", world.SHAPE_KINDS)
@pytest.mark.parametrize("size", [64, 96, 128])
def test_perfect_scenes_score_one(kind: world.Kind, size: int) -> None:
    rng = np.random.default_rng([size, list(world.SHAPE_KINDS).index(kind)])
    for _ in range(80 if size == 64 else 20):
        sampled = world.sample_scene(rng, kind, "all")
        parts = check(world.draw(sampled, size), ask(world.caption(sampled)))
        assert parts["soft"] == parts["strict"] == parts["count"] == parts["colour"] == parts["shape"] == 1.0
        assert parts["position"] == 1.0 if kind == "position" else math.isnan(parts["position"])


def test_a_wrong_colour_or_shape_costs_just_that_and_a_wrong_number_its_share() -> None:
    parts = check(scene(("red", "star", 20, 20), ("blue", "star", 44, 44)), ask("two red stars"))
    # one of two: 1/2, and one thing too many of another kind: times 2/3
    wanted = {"soft": 1 / 3, "strict": 0, "count": 1, "colour": 0.5, "shape": 1, "position": math.nan}
    assert parts == pytest.approx(wanted, nan_ok=True)
    parts = check(scene(("red", "star", 20, 20), ("red", "circle", 44, 44)), ask("two red stars"))
    assert (parts["strict"], parts["count"], parts["colour"], parts["shape"]) == (0, 1, 1, 0.5)
    picture = scene(("green", "square", 16, 16), ("green", "square", 48, 16), ("green", "square", 16, 48))
    assert check(picture, ask("three green squares"))["strict"] == 1
    assert check(picture, ask("four green squares"))["soft"] == pytest.approx(3 / 4)
    assert check(picture, ask("two green squares"))["soft"] == pytest.approx(1 / 2)
    assert check(picture, ask("a green square"))["soft"] == 0
    parts = check(scene(("green", "square", 16, 16), ("red", "circle", 48, 48)), ask("a green square"))
    assert parts["soft"] == pytest.approx(1 / 2) and parts["strict"] == 0


def test_a_relation_must_hold() -> None:
    for caption, position in (
        ("a red circle to the left of a blue star", 1),
        ("a red circle to the right of a blue star", 0),
        ("a blue star to the right of a red circle", 1),
        ("a red circle above a green star", 1),  # a smaller row
        ("a red circle below a green star", 0),
        ("a green star below a red circle", 1),
    ):
        other = ("blue", "star", 48, 36) if "blue" in caption else ("green", "star", 18, 52)
        parts = check(scene(("red", "circle", 14, 18), other), ask(caption))
        assert parts["position"] == parts["strict"] == position
        assert parts["soft"] == pytest.approx(1.0 if position else 0.6)
        gone = check(scene(("red", "circle", 14, 18)), ask(caption))
        assert gone["position"] == 0 and gone["soft"] == pytest.approx(0.6 * 0.5)


def test_blank_noise_and_floods_score_zero() -> None:
    rng = np.random.default_rng(0)
    blank = np.full((64, 64, 3), BACKGROUND, dtype=np.uint8)
    for picture in [blank, np.zeros_like(blank), *rng.integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)]:
        for caption in ("a red circle", "two blue stars and a green square", "a red star above a blue circle"):
            parts = check(picture, ask(caption))
            assert parts["soft"] == parts["strict"] == 0
    for colour, level in PALETTE.items():  # one square at most: it earns no several things, nor another shape
        flooded = np.full((64, 64, 3), level, dtype=np.uint8)
        assert check(flooded, ask(f"three {colour} stars"))["soft"] == 0 and len(find(flooded)) == 1


def test_specks_are_not_things_and_components_those_of_flood_fill() -> None:
    picture = scene(("red", "circle", 30, 30))
    picture[2:6, 2:8] = PALETTE["blue"]  # 24 pixels
    assert check(picture, ask("a red circle"))["strict"] == 1
    picture[2:10, 2:10] = PALETTE["blue"]  # 64 pixels
    assert check(picture, ask("a red circle"))["strict"] == 0
    stretched = np.full((64, 64, 3), BACKGROUND, dtype=np.uint8)
    stretched[10:20, 10:50] = PALETTE["red"]
    assert [f.shape for f in find(stretched)] == [None]
    rng = np.random.default_rng(1)
    picture = np.full((40, 40, 3), BACKGROUND, dtype=np.uint8)
    blocks = rng.integers(0, len(PALETTE) + 2, size=(10, 10)).repeat(4, 0).repeat(4, 1)
    expected = []
    for i, name in enumerate(PALETTE):
        picture[blocks == i] = PALETTE[name]
        areas = np.bincount(ndimage.label(blocks == i)[0].ravel())[1:]  # by their four neighbours
        expected += [(name, area) for area in areas if area >= 40 / 4096 * 1600]
    assert sorted((f.colour, f.area) for f in find(picture)) == sorted(expected)


def test_captions_outside_the_grammar_have_no_score() -> None:
    wrong = ["a photo of a horse", 'a red sign that says "LAMP"', "", "a red", "two red star", "a red stars",
             "a red circle and",
             "a red circle beside a blue star", "a red circle and a red circle", "five red circles",
             "a red circle and a blue star and a green square"]  # fmt: skip
    assert [parse(caption) for caption in wrong] == [None] * len(wrong)
    scores, parts = Shapes()(as_tensor(*[scene(("red", "circle", 30, 30))] * len(wrong)), wrong)
    assert all(map(math.isnan, scores)) and all(math.isnan(value) for part in parts.values() for value in part)
    asked = Asked((Group(2, "red", "circle"), Group(1, "blue", "square")))
    assert parse("  Two RED circles  and a Blue square. ") == asked and parse("one red star") == parse("a red star")
    with pytest.raises(ValueError):
        Shapes()(as_tensor(scene(("red", "star", 20, 20))), ["a red star", "a red star"])
    pictures = as_tensor(scene(("red", "star", 20, 20)), scene(("red", "star", 20, 20), ("red", "star", 44, 44)))
    soft, parts = Shapes()(pictures, ["two red stars"] * 2)
    strict, _ = Shapes(strict=True)(pictures, ["two red stars"] * 2)
    assert soft == parts["soft"] == [0.5, 1.0] and strict == parts["strict"] == [0.0, 1.0]
    assert set(parts) == {"soft", "strict", "count", "colour", "shape", "position"}


def things(*sizes: tuple[str, str, int]) -> list[Detection]:
    return [Detection(colour, shape, 0.0, 0.0, area) for colour, shape, area in sizes]


def test_pictures_of_the_same_things_are_alike() -> None:
    """Places do not count; a size counts by its ratio, a thing too many or of another kind by its share."""
    one = things(("red", "circle", 100), ("blue", "star", 60))
    assert alike(one, one[::-1]) == 1.0
    assert alike(one, things(("red", "circle", 50), ("blue", "star", 60))) == pytest.approx((0.5 + 1) / 2)
    assert alike(one, things(("red", "circle", 100))) == 0.5
    assert alike(one, things(("red", "circle", 100), ("red", "star", 60))) == 0.5
    many = things(("red", "circle", 80), ("red", "circle", 100), ("red", "circle", 20))
    assert alike(many, things(("red", "circle", 40), ("red", "circle", 100))) == pytest.approx((1 + 0.5) / 3)
    assert alike(one, []) == 0.0 and math.isnan(alike([], []))
    assert alike(many, one) == alike(one, many) and alike([], one) == 0.0
    same, other = world.Thing("red", "circle", 20, 20, 9), world.Thing("blue", "star", 40, 40, 9)
    pictures = [world.draw(world.Scene("single", (thing,))) for thing in (same, replace(same, x=40), other)]
    images = as_tensor(*pictures)
    result = genrl_rewards.score(genrl_rewards.load("same_shapes"), images=images, prompts=["p"] * 3, group=[0, 0, 0])
    assert result.values == pytest.approx([0.5, 0.5, 0.0], abs=0.01)
