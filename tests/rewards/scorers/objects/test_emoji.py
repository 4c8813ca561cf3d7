"""The checker of emoji: right about drawn pictures, wherever the glyphs lie, and not to be talked round."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from genrl.playground import emoji as world
from genrl_rewards.scorers.objects import emoji
from genrl_rewards.scorers.objects.emoji import BACKGROUND, GLYPH, OBJECTS, Emoji, Group, check, find, glyph, parse


def picture(*things: tuple[str, int, int]) -> np.ndarray:
    """Glyphs by their top left corners."""
    return world.draw(world.Scene(tuple(world.Thing(*thing) for thing in things), ()))


def scored(image: np.ndarray, caption: str) -> dict[str, float]:
    asked = parse(caption)
    assert asked is not None
    return check(image, asked)


def test_drawn_pictures_are_wholly_right() -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        scene = world.sample_scene(rng, split="train" if rng.random() < 0.5 else "eval")
        assert scored(world.draw(scene), world.caption(scene))["strict"] == 1.0, world.caption(scene)


def test_every_glyph_is_known_at_any_place_and_blurred() -> None:
    rng = np.random.default_rng(1)
    for name in OBJECTS:
        x, y = (int(corner) for corner in rng.integers(world.PICTURE - GLYPH + 1, size=2))
        image = picture((name, x, y))
        (thing,) = find(image)
        assert (thing.name, thing.x, thing.y) == (name, x + 10.5, y + 10.5) and thing.match == pytest.approx(1)
        blurred = np.array(Image.fromarray(image).filter(ImageFilter.GaussianBlur(0.7)))
        noisy = np.clip(blurred + rng.normal(0, 8, blurred.shape), 0, 255).astype(np.uint8)
        assert [thing.name for thing in find(noisy)] == [name]


def test_partial_credit() -> None:
    image = picture(("cat", 1, 1), ("cat", 33, 1), ("dog", 33, 33))
    assert scored(image, "three cats")["soft"] == pytest.approx(2 / 3 * 3 / 4)  # one is missing, a dog too many
    assert scored(image, "two cats and a pig")["soft"] == pytest.approx(1 / 2 * 3 / 4)
    assert scored(image, "two cats and a pig")["count"] == 1.0
    assert scored(image, "two cats and a pig")["objects"] == pytest.approx(2 / 3)
    assert scored(image, "two cats below a dog")["soft"] == pytest.approx(0.6)  # all but the position
    assert scored(image, "two cats above a dog")["strict"] == 1.0
    assert scored(image, "a dog left of two cats")["position"] == 0.0
    assert math.isnan(scored(image, "three cats")["position"])
    image = picture(("cat", 1, 1), ("dog", 33, 1))
    assert scored(image, "a cat and a dog") == scored(image, "a dog and a cat")
    assert scored(image, "a cat left of a dog")["strict"] == 1.0
    for caption in ("a cat", "two cats and a dog", "a cat and a pig", "a cat right of a dog", "a cat above a dog"):
        assert scored(image, caption)["strict"] == 0.0, caption


def test_ink_that_is_no_glyph_counts_as_something_else_and_an_outline_is_none() -> None:
    image = picture(("cat", 1, 1))
    assert scored(image, "a cat")["strict"] == 1.0
    image[40:60, 40:60] = (40, 86, 214)
    assert scored(image, "a cat")["strict"] == 0.0
    assert scored(image, "a cat")["soft"] == pytest.approx(1 / 5)  # 400 pixels: four unknown things
    assert scored(np.full((64, 64, 3), BACKGROUND, np.uint8), "a cat")["soft"] == 0.0
    image = picture(("car", 20, 20)).astype(float)
    assert find((image + 2 * (BACKGROUND - image) / 3).astype(np.uint8)) == []
    for name in OBJECTS:
        own, image = glyph(name), picture((name, 20, 20))
        ink = np.linalg.norm(own.astype(float) - BACKGROUND, axis=-1) > emoji.INK
        image[20 : 20 + GLYPH, 20 : 20 + GLYPH][ink] = own[ink].mean(0)
        assert find(image) == [], name
        assert emoji.unknown(image, []) >= 1


def test_the_grammar_and_what_is_not_of_it_has_no_score() -> None:
    cat, dogs, egg = Group(1, "cat"), Group(2, "dog"), Group(1, "egg")
    assert parse("an apple") == emoji.Asked((Group(1, "apple"),), None)
    assert parse("Four buses.") == emoji.Asked((Group(4, "bus"),), None)
    assert parse("a cat and two dogs") == emoji.Asked((cat, dogs), None)
    assert parse("a cat left of two dogs") == emoji.Asked((cat, dogs), "left of")
    assert parse("a cat, two dogs and an egg") == emoji.Asked((cat, dogs, egg), None)
    wrong = ["two cat", "a cats", "a cat and a cat", "a red circle", "a cat, a dog", "five cats"]
    assert [parse(caption) for caption in wrong] == [None] * 6
    for strict, expected in ((False, 0.5), (True, 0.0)):
        images = torch.from_numpy(picture(("cat", 1, 1), ("dog", 33, 33))).permute(2, 0, 1)[None] / 255
        scores, parts = Emoji(strict=strict)(images.expand(7, -1, -1, -1), [*wrong, "a cat"])
        assert all(map(math.isnan, [*scores[:6], *parts["strict"][:6]]))
        assert scores[6] == expected and parts["soft"][6] == 0.5 and parts["strict"][6] == 0.0
