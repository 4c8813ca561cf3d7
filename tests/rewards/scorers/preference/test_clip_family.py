"""CLIPScore and PickScore: formulas against golden numbers, loaders on tiny checkpoints in the true format."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import genrl_rewards
from genrl.playground import shapes as world
from genrl_rewards.models.clip_model import ClipScorer, cosine
from genrl_rewards.scorers.objects.shapes import Group
from genrl_rewards.scorers.preference.clipscore import clipscore
from genrl_rewards.scorers.preference.imagereward import prepare
from genrl_rewards.scorers.preference.pickscore import pickscore
from tests.rewards import tiny_blip
from tests.rewards.asking import refused
from tests.rewards.tiny_clip import SIDE, save_tiny_clip

PROMPTS = ["a red circle", "two blue stars and a square", "a red circle"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(3, 3, 40, 24, generator=torch.Generator().manual_seed(0))


def test_scales_equal_the_golden_columns(golden: Callable[[str], Any]) -> None:
    for scale, column in (
        ("cosine", "cosine"),
        ("cosine", "clip_logits_over_100"),
        ("over_30", "clip_logits_over_30"),
        ("hessel", "clipscore_hessel"),
        ("torchmetrics", "clipscore_torchmetrics"),
        ("over_26", "pickscore_over_26"),
        ("raw", "pickscore_raw"),
        ("minus_18_over_8", "pickscore_mixgrpo"),
        ("cosine", "pickscore_dancegrpo"),
    ):
        data = golden("rewards_clip_family")
        cos = cosine(torch.from_numpy(data["image_embeds"]), torch.from_numpy(data["text_embeds"]))
        own = pickscore(cos, math.exp(data["logit_scale"]), scale) if "pick" in column else clipscore(cos, scale)
        np.testing.assert_allclose(own, data[column], rtol=0, atol=1e-9)


def test_preprocessing_equals_the_golden_pixels(golden: Callable[[str], Any], checkpoint: Path) -> None:
    data = golden("rewards_preprocess")
    processor = ClipScorer(str(checkpoint), str(checkpoint), "cpu").image_processor
    names = [name for name in data.files if name.endswith(f"_clip_pil_{SIDE}")]
    assert names
    for name in names:
        image = Image.fromarray(data[name.removesuffix(f"_clip_pil_{SIDE}")])
        pixels = processor(images=[image], return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(pixels, data[name], rtol=0, atol=1e-4)


def test_scores_agree_with_the_models_own_forward(checkpoint: Path, images: torch.Tensor) -> None:
    """`forward` projects, normalises and multiplies by itself: it knows nothing of our helpers."""
    reward = genrl_rewards.load("pickscore", {"model": str(checkpoint), "processor": str(checkpoint), "scale": "raw"})
    scores = genrl_rewards.score(reward, images=images, prompts=PROMPTS).values
    scorer = reward.scorer
    pixels = scorer.image_processor(images=genrl_rewards.to_pil(images), return_tensors="pt")["pixel_values"]
    tokens = scorer.tokenizer(PROMPTS, padding="max_length", max_length=77, return_tensors="pt")
    with torch.no_grad():
        own = scorer.model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], pixel_values=pixels)
    assert scores == pytest.approx(own.logits_per_image.diag().tolist(), abs=1e-5)
    assert np.ptp(scores) > 0.01, "three different pairs should not score the same"

    def values(name: str, **args: str) -> np.ndarray:
        made = genrl_rewards.load(name, {"model": str(checkpoint), "processor": str(checkpoint)} | args)
        return np.array(genrl_rewards.score(made, images=images, prompts=PROMPTS).values)

    cos, raw = values("clipscore"), values("pickscore", scale="raw")
    assert np.allclose(values("clipscore", scale="cosine"), cos)
    assert np.allclose(values("clipscore", scale="hessel"), 2.5 * cos.clip(min=0))
    assert np.allclose(values("pickscore"), raw / 26)
    assert np.allclose(raw / cos, math.exp(2.6592), rtol=1e-4), "a new CLIPModel's logit scale"


def test_long_prompts_are_cut_and_the_pillow_backend_is_said(checkpoint: Path, images: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="genrl_rewards.models.clip_model"):
        reward = genrl_rewards.load("clipscore", {"model": str(checkpoint)})
    assert "CLIPImageProcessorPil" in caplog.text and str(checkpoint) in caplog.text
    assert genrl_rewards.score(reward, images=images[:2], prompts=["x" * 75, "x" * 500]).failed == 0
    texts = reward.scorer.embed_texts(["x" * 75 + "y" * 10, "x" * 500])
    assert torch.equal(texts[0], texts[1])


def test_a_checkpoint_of_another_architecture_or_without_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    def other(words: str, model: str = str(tmp_path)) -> None:
        refused(words, "clipscore", {"model": model, "processor": str(checkpoint)})

    for name in ("clipscore", "pickscore"):  # before anything is loaded
        refused(f"{name}: unknown scale 'cosin'. Did you mean 'cosine'", name, {"model": "no/such", "scale": "cosin"})
    other("clipscore: .* has no config.json. It holds nothing: the folder is empty")
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    other("is a 'siglip' model; this reward needs 'clip'")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    held = load_file(checkpoint / "model.safetensors")
    del held["visual_projection.weight"]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    other("lacks 1 weights of CLIPModel .visual_projection.weight")
    other("there is no folder './nowhere'", "./nowhere")
    other("is not a folder here, and its file 'config.json' is neither in the hub's cache", "no-such-user/no-such")


# -- ImageReward: transformers' BLIP with the published weights' names against the published equations
RED = ["red circles", "a b c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_blip.save(tmp_path_factory.mktemp("imagereward"))


@pytest.fixture(scope="module")
def reward(folder: Path) -> genrl_rewards.Reward:
    return genrl_rewards.load("imagereward", {"model": str(folder), "tokenizer": str(folder)})


def test_scores_follow_the_published_equations(reward: genrl_rewards.Reward) -> None:
    images = torch.rand(2, 3, 41, 33, generator=torch.Generator().manual_seed(3))
    scores = genrl_rewards.score(reward, images=images, prompts=RED)
    # By the published equations, written out over the published names of these weights, in float64
    assert scores.values == pytest.approx([0.496617, 0.761939], abs=1e-4)
    same = images[:1].repeat(3, 1, 1, 1)
    long = genrl_rewards.score(reward, images=same, prompts=["a " * 40, "a " * 60, "b"]).values  # cut
    assert long[0] == pytest.approx(long[1], abs=1e-6)
    assert abs(scores.values[0] - scores.values[1]) > 1e-3 and abs(long[0] - long[2]) > 1e-3
    wide = torch.zeros(1, 3, 32, 96)
    wide[..., 32:64] = 1.0  # the crop is central
    assert prepare(wide, 32)[..., 1:-1].min() > 1.5 and prepare(wide, 32).shape == (1, 3, 32, 32)


def test_other_checkpoints_are_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    def other(words: str) -> None:
        refused(words, "imagereward", {"model": str(tmp_path), "tokenizer": str(folder)})

    (tmp_path / "med_config.json").write_text((folder / "med_config.json").read_text())
    torch.save({"layers.0.weight": torch.zeros(1024, 768)}, tmp_path / "ImageReward.pt")
    other("is not an ImageReward")
    held = tiny_blip.weights()
    del held["blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"]
    torch.save(held, tmp_path / "ImageReward.pt")
    other("another architecture: it lacks 1 weights .*crossattention.self.key")


# -- The embedded CLIP: right about right and wrong pictures, whole and in the cells of a grid
FOLDER = Path(__file__).parents[4] / "assets" / "tiny-clip"


def picture(*groups: Group, relation: str | None = None) -> torch.Tensor:
    things = world.place(np.random.default_rng(3), groups, relation)
    sampled = world.draw(world.Scene("two", things, groups, relation))
    return torch.from_numpy(sampled).permute(2, 0, 1)[None].float() / 255


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
    result = genrl_rewards.score(reward, images=images, prompts=["a red circle", "two stars"], columns=grids)
    assert not result.failures and all(map(math.isnan, result.values))
    labels = "[TOP]-[LEFT]: a [TOP]-[RIGHT]: b"
    result = genrl_rewards.score(reward, images=images, prompts=[labels, labels], columns=grids)
    assert "2 x 2 cells, and the prompt has 2 parts" in result.failures[0].traceback
