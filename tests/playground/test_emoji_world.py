"""The drawn world of emoji: within its rules, its splits disjoint, its prompt files and its pipeline made from it."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from genrl.playground import emoji as world
from genrl_rewards.scorers.objects.emoji import OBJECTS, Emoji, Group, parse

PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts"


def scenes(kind: world.Kind, split: world.Split, number: int) -> list[world.Scene]:
    rng = np.random.default_rng([list(world.KINDS).index(kind), split == "eval"])
    return [world.sample_scene(rng, kind, split) for _ in range(number)]


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("kind", world.KINDS)
def test_captions_are_read_back_and_things_are_apart(kind: world.Kind, split: world.Split) -> None:
    for scene in scenes(kind, split, 60):
        text = world.caption(scene)
        asked = parse(text)
        assert asked is not None and (asked.groups, asked.relation) == (scene.groups, scene.relation)
        assert world.kind_of(text) == kind
        assert [thing.name for thing in scene.things] == [g.name for g in scene.groups for _ in range(g.count)]
        assert set(text.replace(",", "").split()) <= {"a", *world.WORDS}
        corners = np.array([(thing.x, thing.y) for thing in scene.things])
        assert corners.min() >= 0 and corners.max() <= world.PICTURE - world.GLYPH
        for i, j in zip(*np.triu_indices(len(corners), 1), strict=True):
            assert np.abs(corners[i] - corners[j]).max() >= world.CELL


@pytest.mark.parametrize(("relation", "axis", "sign"), [("left of", 0, -1), ("right of", 0, 1), ("above", 1, -1)])
def test_relations_hold_for_all_things(relation: str, axis: int, sign: int) -> None:
    groups = parse("two cats above two dogs").groups  # type: ignore[union-attr]
    for seed in range(20):
        things = world.place(np.random.default_rng(seed), groups, relation)
        along = [sign * (thing.x, thing.y)[axis] for thing in things]
        assert min(along[:2]) - max(along[2:]) >= world.CELL


def test_one_in_five_combinations_is_held_out() -> None:
    """Of every thing some numbers or pairs, so that held-out prompts are about all 64."""
    counts = [(Group(number, name),) for name in OBJECTS for number in (1, 2, 3, 4)]
    assert np.mean([*map(world.held_out, counts)]) == pytest.approx(0.2, abs=0.02)
    trained = {group.name: group for (group,) in counts if not world.held_out((group,))}
    pairs = [*itertools.combinations(trained.values(), 2)]
    assert len(trained) == 64 and np.mean([*map(world.held_out, pairs)]) == pytest.approx(0.2, abs=0.02)
    rng = np.random.default_rng(0)
    held = [world.sample_groups(rng, split="eval")[0] for _ in range(600)]
    trained = [world.sample_groups(rng, split="train")[0] for _ in range(600)]
    assert all(map(world.held_out, held)) and not any(map(world.held_out, trained))
    assert {group.name for groups in held for group in groups} == set(OBJECTS)
    assert {group.name for groups in trained for group in groups} == set(OBJECTS)


def test_prompt_files_are_those_of_the_world() -> None:
    files = {split: (PROMPTS / f"emoji_{split}.txt").read_text().splitlines() for split in ("train", "eval")}
    assert files == {"train": world.prompts("train", 512), "eval": world.prompts("eval", 160)}
    assert len(set(files["train"])) == len(files["train"]) and not set(files["train"]) & set(files["eval"])
    assert {world.kind_of(line) for line in files["eval"]} == set(world.KINDS)


def test_a_plain_call_of_plain_diffusers_draws_the_caption(root: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(root / "assets" / "tiny-emoji")
    pipeline.set_progress_bar_config(disable=True)
    captions = ["a carrot", "two frogs", "a kiwi", "four crowns"]
    generator = torch.Generator().manual_seed(0)
    images = pipeline(captions, generator=generator, num_inference_steps=8, guidance_scale=4.0, output_type="pt").images
    own, _ = Emoji()(images, captions)
    others, _ = Emoji()(images, captions[::-1])
    assert np.mean(own) > np.mean(others) + 0.2
