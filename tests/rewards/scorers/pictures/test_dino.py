"""DINO features and similarity on small checkpoints of all three architectures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import genrl_rewards
from genrl_rewards.models.pixels import normalise
from genrl_rewards.scorers.pictures.dino import MEAN, STD, DinoFeatures, patch_similarity
from tests.rewards import tiny_vlm
from tests.rewards.asking import refused, scored

from transformers import Dinov2Config, Dinov2Model, DINOv3ViTConfig, DINOv3ViTModel  # isort: skip
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel  # isort: skip

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": 32}
BUILDERS = {
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SIZES)),
    "registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES, num_register_tokens=3)),
    "dinov3": lambda: DINOv3ViTModel(DINOv3ViTConfig(**SIZES, intermediate_size=64, num_register_tokens=4)),
}


@pytest.fixture(scope="module", params=BUILDERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_vlm.randomise(model := BUILDERS[request.param]())
    model.save_pretrained(folder)
    return request.param, folder


def picture(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC)


def as_tensor(*pictures: Image.Image) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) / 255 for p in pictures])


def test_features_are_the_models_own_tokens_without_registers(saved: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = saved
    dino = DinoFeatures(str(folder), size=32)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    result = dino.features(images)
    own = BUILDERS[name]().from_pretrained(folder).eval()(pixel_values=normalise(images, MEAN, STD))
    assert result.class_token.shape == (2, 32) and result.patches.shape == (2, 16, 32)
    torch.testing.assert_close(result.class_token, own.pooler_output)
    torch.testing.assert_close(result.patches, own.last_hidden_state[:, -16:])
    assert dino.features(torch.rand(1, 3, 50, 70)).patches.shape == (1, 16, 32)
    assert DinoFeatures(str(folder), size=48).features(images).patches.shape == (2, 36, 32)
    _, folder = saved
    refused("dino: size 30 is not a multiple of the patch of .*, 8: 32?", "dino", {"model": str(folder), "size": 30})
    refused("unknown tokens 'patch'. Did you mean 'patches'", "dino", {"model": str(folder), "tokens": "patch"})
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    refused("is a 'vit' model; this reward needs 'dinov2' or", "dino", {"model": str(tmp_path)})


def test_features_and_scores_are_differentiable(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    picture(1).save(tmp_path / "a.png")
    reward = genrl_rewards.load("dino", {"model": str(folder), "size": 32, "tokens": "patches"})
    columns = {"reference_image": [str(tmp_path / "a.png")]}
    leaf = torch.rand(1, 3, 40, 40).requires_grad_()
    genrl_rewards.score_with_gradients(reward, images=leaf, prompts=[""], columns=columns).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert not any(parameter.requires_grad for parameter in reward.dino.model.parameters())


def test_a_picture_is_most_like_itself(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    for seed in (1, 2):
        picture(seed).save(tmp_path / f"{seed}.png")
    files, images = [str(tmp_path / f"{seed}.png") for seed in (1, 1, 2)], as_tensor(*map(picture, (1, 2, 2)))
    reward = genrl_rewards.load("dino", {"model": str(folder), "size": 32})
    scores = scored(reward, images=images, prompts=[""] * 3, columns={"reference_image": files})
    assert [scores.values[0], scores.values[2], scores.parts["patches"][0]] == pytest.approx([1] * 3, abs=1e-5)
    assert scores.values[1] < 0.999 and scores.parts["patches"][1] < 0.999 and scores.parts["class"] == scores.values
    video, columns = torch.stack([images[:2], images[1:]]), {"reference_image": files[::2]}
    videos = genrl_rewards.score(reward, images=video, prompts=[""] * 2, columns=columns).values
    assert videos == pytest.approx([(scores.values[0] + scores.values[1]) / 2, 1], abs=1e-5)


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_patch_similarity_does_not_care_where_things_stand(seed: int, n: int, m: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(2, k, 5, generator=generator, dtype=torch.float64) for k in (n, m))
    value = patch_similarity(a, b)
    assert ((value >= -1 - 1e-9) & (value <= 1 + 1e-9)).all()
    torch.testing.assert_close(patch_similarity(3 * a[:, torch.randperm(n)], b[:, torch.randperm(m)]), value)
    torch.testing.assert_close(patch_similarity(a, torch.cat([b, a], 1)), torch.ones(2, dtype=torch.float64))


def test_diversity_is_of_the_others_of_a_group(saved: tuple[str, Path]) -> None:
    _, folder = saved
    images = as_tensor(picture(0), picture(1), picture(1), picture(2), picture(3), picture(3))
    reward = genrl_rewards.load("diversity", {"model": str(folder), "size": 32})
    scores = scored(reward, images=images, prompts=[""] * 6, group=[0, 0, 0, 1, 2, 2])
    tokens = DinoFeatures(str(folder), size=32).features(images).class_token
    cosine = torch.nn.functional.cosine_similarity(tokens[:, None], tokens[None], dim=-1)
    assert scores.values[0] == pytest.approx(1 - float(cosine[0, 1] + cosine[0, 2]) / 2, abs=1e-5)
    assert scores.values[1] == pytest.approx(1 - float(cosine[1, 0] + cosine[1, 2]) / 2, abs=1e-5)
    assert np.isnan(scores.values[3]) and scores.values[4:] == pytest.approx([0, 0], abs=1e-5)
    images[0] = torch.nan
    result = reward(images[:5], [0, 0, 0, 1, 1])
    assert result.isnan().tolist() == [True, False, False, False, False]
    assert result[1] == pytest.approx(0, abs=1e-5) and result[3] > 0
