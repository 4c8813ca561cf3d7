"""The drawn world: deterministic, within its rules, and its splits disjoint; the embedded pipelines made from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genrl.data import world
from rewards.scorers.objects.shapes import parse

KINDS = [*world.SHAPE_KINDS, "word"]


def scenes(kind: str, split: str, number: int, seed: int = 0) -> list[world.Scene]:
    rng = np.random.default_rng([seed, KINDS.index(kind), split == "eval"])
    return [world.sample_scene(rng, kind, split) for _ in range(number)]  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_scenes_and_pictures() -> None:
    first, second = (np.random.default_rng(7) for _ in range(2))
    for _ in range(30):
        a, b = world.sample_scene(first), world.sample_scene(second)
        assert a == b
        assert np.array_equal(world.draw(a), world.draw(b))


def test_pictures_have_the_asked_size() -> None:
    scene = scenes("mixed", "all", 1)[0]
    assert world.draw(scene).shape == (64, 64, 3) and world.draw(scene).dtype == np.uint8
    large = world.draw(scene, 128)
    assert large.shape == (128, 128, 3)
    small = large.reshape(64, 2, 64, 2, 3).mean((1, 3))
    assert np.abs(small - world.draw(scene)).mean() < 3  # the same picture, drawn finer


def test_unforced_kinds_come_in_their_shares() -> None:
    rng = np.random.default_rng(0)
    kinds = [world.sample_scene(rng).kind for _ in range(600)]
    assert kinds.count("word") / 600 == pytest.approx(world.WORD_SHARE, abs=0.06)
    assert kinds.count("position") / 600 == pytest.approx(0.3 * (1 - world.WORD_SHARE), abs=0.06)


@pytest.mark.parametrize("kind", world.SHAPE_KINDS)
def test_captions_of_shapes_are_read_back(kind: world.Kind) -> None:
    for scene in scenes(kind, "all", 40):
        asked = parse(world.caption(scene))
        assert asked is not None
        assert (asked.groups, asked.relation) == (scene.groups, scene.relation)
        assert [(t.colour, t.shape) for t in scene.things] == [
            (g.colour, g.shape) for g in scene.groups for _ in range(g.count)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_scene_is_read_from_its_caption(kind: world.Kind) -> None:
    assert {world.kind_of(world.caption(scene)) for scene in scenes(kind, "all", 40)} == {kind}
    assert world.kind_of("a cat") is None


def test_things_lie_inside_and_apart() -> None:
    for scene in scenes("mixed", "all", 60):
        for i, a in enumerate(scene.things):
            assert 1.2 * a.radius < a.x < 64 - 1.2 * a.radius and 1.2 * a.radius < a.y < 64 - 1.2 * a.radius
            for b in scene.things[:i]:
                assert np.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius + 4


def test_a_train_scene_has_no_held_out_combination_and_an_eval_scene_has_one() -> None:
    for kind in world.SHAPE_KINDS:
        assert not any(world.held_out(g) for scene in scenes(kind, "train", 40) for g in scene.groups)
        assert all(any(map(world.held_out, scene.groups)) for scene in scenes(kind, "eval", 40))


def test_train_and_pretraining_signs_never_show_a_held_out_word() -> None:
    kept_out = set(world.words("eval"))
    assert len(kept_out) == 29 and kept_out.isdisjoint(world.words("train"))
    for split in ("train", "all"):
        assert kept_out.isdisjoint(scene.sign.text for scene in scenes("word", split, 2000) if scene.sign)
    assert {scene.sign.text for scene in scenes("word", "eval", 200) if scene.sign} <= kept_out


def test_words_are_spelt_in_letters_not_in_words_of_the_grammar() -> None:
    tokens = {word.upper() for word in world.GRAMMAR}
    assert tokens.isdisjoint(world.WORDS)
    assert tokens.isdisjoint(scene.sign.text for scene in scenes("word", "all", 500) if scene.sign)
    assert all(3 <= len(word) <= 4 and word.isalpha() for word in world.WORDS)


def test_prompt_files_are_what_the_world_writes(root) -> None:
    for split in ("train", "eval"):
        for name, prompts in (("shapes", world.shapes_prompts), ("words", world.words_prompts)):
            written = (root / "assets" / "prompts" / f"{name}_{split}.txt").read_text().splitlines()
            assert written == prompts(split)
            assert len(set(written)) == len(written)


def test_held_out_prompts_share_no_combination_and_no_word_with_training_prompts(root) -> None:
    def read(name: str) -> list[str]:
        return (root / "assets" / "prompts" / name).read_text().splitlines()

    def combinations(prompt: str) -> set:
        asked = parse(prompt)
        assert asked is not None, prompt
        return set(asked.groups)

    trained = set().union(*map(combinations, read("shapes_train.txt")))
    assert all(combinations(prompt) - trained for prompt in read("shapes_eval.txt"))  # each holds something unseen
    spelt = {prompt.split('"')[1] for prompt in read("words_train.txt")}
    assert spelt.isdisjoint(prompt.split('"')[1] for prompt in read("words_eval.txt"))


def test_every_kind_appears_early_in_the_shape_prompts() -> None:
    """Evaluation may take only the first lines; they must be a fair sample."""
    for split in ("train", "eval"):
        asked = [parse(prompt) for prompt in world.shapes_prompts(split)[:32]]
        assert any(a and a.relation for a in asked)
        assert any(a and len(a.groups) == 1 and a.groups[0].count == 1 for a in asked)
        assert any(a and len(a.groups) == 1 and a.groups[0].count > 1 for a in asked)
        assert any(a and len(a.groups) == 2 and not a.relation for a in asked)


SIZES = {"tiny-t2i": 8, "tiny-sd": 4}  # MB


@pytest.mark.parametrize("name", SIZES)
def test_embedded_pipelines_are_small_and_hold_no_pickle(root, name: str) -> None:
    files = [path for path in (root / "assets" / name).rglob("*") if path.is_file()]
    assert 1e6 < sum(path.stat().st_size for path in files) <= SIZES[name] * 1e6
    assert {path.suffix for path in files} <= {".json", ".txt", ".safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_plain_call_of_plain_diffusers_draws_the_caption(root, name: str) -> None:
    import torch
    from diffusers import DiffusionPipeline

    from rewards.scorers.objects.shapes import Shapes

    pipeline = DiffusionPipeline.from_pretrained(root / "assets" / name)
    pipeline.set_progress_bar_config(disable=True)
    prompts = ["a red circle", "a blue square", "a green star", "two yellow circles"]
    images = pipeline(prompts, generator=torch.Generator().manual_seed(0), output_type="pt").images
    assert images.shape == (4, 3, 64, 64) and images.min() >= 0 and images.max() <= 1
    own, _ = Shapes()(images, prompts)
    others, _ = Shapes()(images, prompts[::-1])
    assert np.mean(own) > np.mean(others) + 0.2


@pytest.mark.parametrize("name", SIZES)
def test_the_tokenizer_has_one_token_per_grammar_word_and_letters_for_the_rest(root, name: str) -> None:
    from transformers import AutoTokenizer, CLIPTokenizer

    folder = root / "assets" / name / "tokenizer"
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("three red stars") == ["three", "red", "stars"]
    assert tokenizer.tokenize('"LAMP"') == ['"</w>', "l", "a", "m", "p</w>", '"</w>']
    longest = ['a yellow sign that says "WORK"', "a purple triangle to the right of a yellow square"]
    for caption in longest:
        assert len(tokenizer(caption).input_ids) <= tokenizer.model_max_length == 16
        assert AutoTokenizer.from_pretrained(folder)(caption).input_ids == tokenizer(caption).input_ids


def test_embedded_models_do_not_say_where_they_were_built() -> None:
    configs = [path for path in Path("assets").rglob("*.json") if path.parent != Path("assets")]
    assert len(configs) > 20
    assert not [path for path in configs if '"_name_or_path": "/' in path.read_text(encoding="utf-8")]
