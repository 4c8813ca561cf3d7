"""The drawn world: deterministic, within its rules, and its splits disjoint; the embedded pipelines made from it."""

import numpy as np
import pytest

from genrl.playground import shapes as world
from genrl_rewards.scorers.objects.shapes import parse

KINDS = [*world.SHAPE_KINDS, "word"]


def scenes(kind: str, split: str, number: int, seed: int = 0) -> list[world.Scene]:
    rng = np.random.default_rng([seed, KINDS.index(kind), split == "eval"])
    return [world.sample_scene(rng, kind, split) for _ in range(number)]  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_scenes_and_signs_for_training_no_held_out_word() -> None:
    first, second = ([world.sample_scene(np.random.default_rng([7, k])) for k in range(300)] for _ in range(2))
    assert first == second and np.array_equal(world.draw(first[0]), world.draw(second[0]))
    kinds = [scene.kind for scene in first]
    assert kinds.count("word") / 300 == pytest.approx(world.WORD_SHARE, abs=0.08)
    assert kinds.count("position") / 300 == pytest.approx(0.3 * (1 - world.WORD_SHARE), abs=0.08)
    small, large = world.draw(first[0]), world.draw(first[0], 128)
    assert small.shape == (64, 64, 3) and large.shape == (128, 128, 3) and small.dtype == np.uint8
    assert np.abs(large.reshape(64, 2, 64, 2, 3).mean((1, 3)) - small).mean() < 3  # the same picture, drawn finer
    kept_out = set(world.words("eval"))
    assert len(kept_out) == 29 and kept_out.isdisjoint(world.words("train"))
    for split in ("train", "all"):
        assert kept_out.isdisjoint(scene.sign.text for scene in scenes("word", split, 500) if scene.sign)
    assert {scene.sign.text for scene in scenes("word", "eval", 200) if scene.sign} <= kept_out


@pytest.mark.parametrize("kind", KINDS)
def test_captions_are_read_back_and_things_lie_inside_and_apart(kind: world.Kind) -> None:
    for scene in scenes(kind, "all", 40):
        assert world.kind_of(world.caption(scene)) == kind
        asked = parse(world.caption(scene))
        if kind != "word":
            assert asked is not None and (asked.groups, asked.relation) == (scene.groups, scene.relation)
            each = [(g.colour, g.shape) for g in scene.groups for _ in range(g.count)]
            assert [(t.colour, t.shape) for t in scene.things] == each
        for i, a in enumerate(scene.things):
            assert 1.2 * a.radius < a.x < 64 - 1.2 * a.radius and 1.2 * a.radius < a.y < 64 - 1.2 * a.radius
            for b in scene.things[:i]:
                assert np.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius + 4
    assert world.kind_of("a cat") is None


@pytest.mark.parametrize("kind", world.SHAPE_KINDS)
def test_a_train_scene_has_no_held_out_combination_and_an_eval_scene_has_one(kind: world.Kind) -> None:
    assert not any(world.held_out(g) for scene in scenes(kind, "train", 10) for g in scene.groups)
    assert all(any(map(world.held_out, scene.groups)) for scene in scenes(kind, "eval", 10))


def test_prompt_files_are_what_the_world_writes(root) -> None:
    for split in ("train", "eval"):
        for name, prompts in (("shapes", world.shapes_prompts), ("words", world.words_prompts)):
            written = (root / "assets" / "prompts" / f"{name}_{split}.txt").read_text().splitlines()
            assert written == prompts(split)
            assert len(set(written)) == len(written)
