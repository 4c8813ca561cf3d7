"""Rewards that are trained beside the model: the three built-in ones, and what is refused as one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import genrl_rewards
from genrl.objectives.preferences import adversary_loss
from genrl_rewards.models.pixels import normalise
from genrl_rewards.scorers.pictures.dino import MEAN, STD, DinoFeatures
from genrl_rewards.scorers.preference.adversary import (
    DinoAdversary,
    DinoLayersAdversary,
    PickScoreAdversary,
    check_trainable,
    checked_logits,
    unit_scale,
)
from tests.reference.adv_grpo import adversarial_reward
from tests.rewards.asking import assert_gradients_agree
from tests.rewards.tiny_clip import save_tiny_clip

from transformers import Dinov2Config, Dinov2Model, DINOv3ViTConfig, DINOv3ViTModel  # isort: skip

PROMPTS = ["a cat", "two dogs", "a cat"]


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": 32}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip")))


def pictures(seed: int, count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["dino_adversary", "dino_layers_adversary", "pickscore_adversary"])
def build(request: pytest.FixtureRequest, dino: str, clip: str) -> Callable[[], Any]:
    args = {"model": clip} if request.param == "pickscore_adversary" else {"model": dino, "size": 32, "hidden": 8}
    args |= {"layers": [0, 1], "temperature": 2.0} if request.param == "dino_layers_adversary" else {}
    return lambda: genrl_rewards.load(request.param, args)


def loss_of(reward: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    sides = [checked_logits(reward, x, PROMPTS) for x in (real, fake)]
    return adversary_loss(*sides, kind=reward.loss, patch_weight=reward.patch_weight).loss


def test_training_raises_references_above_samples_and_state_restores_it(build: Callable[[], Any]) -> None:
    reward, real, fake = build(), pictures(1) * 0.5, 0.5 + pictures(2) * 0.5
    check_trainable(reward)
    before = genrl_rewards.score(reward, images=real, prompts=PROMPTS).values
    optimizer = torch.optim.Adam(reward.parameters(), lr=1e-2)
    losses = []
    frozen = reward.scorer.model if isinstance(reward, PickScoreAdversary) else reward.dino.model
    trained = {id(p) for p in reward.parameters()}
    for _ in range(30):
        loss = loss_of(reward, real, fake)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert len(losses) > 1 or all(p.grad.abs().sum() > 0 for p in reward.parameters() if p.ndim > 1)
        optimizer.step()
    assert all(p.grad is None for p in frozen.parameters() if id(p) not in trained)
    assert losses[-1] < 0.5 * losses[0], losses
    after = [genrl_rewards.score(reward, images=x, prompts=PROMPTS).values for x in (real, fake)]
    assert min(after[0]) > max(after[1])
    other = build()
    assert genrl_rewards.score(other, images=real, prompts=PROMPTS).values == before  # a new one begins alike
    other.load_state_dict(reward.state_dict())
    assert genrl_rewards.score(other, images=real, prompts=PROMPTS).values == after[0]
    with pytest.raises(ValueError, match="lacks"):
        other.load_state_dict({})


def test_scores_and_logits_are_of_the_same_features_in_8_bit(dino: str) -> None:
    """Floats and the 8 bit of a file score alike; the score is the paper's mix of the logits that are trained."""
    features = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(unit_scale(features).square().mean(-1), torch.ones(2, 5))
    assert torch.allclose(unit_scale(7 * features), unit_scale(features), atol=1e-6)  # only their direction counts
    reward = DinoAdversary(dino, size=32, hidden=8)
    images = pictures(3)
    rounded = (images * 255).round() / 255
    scores = genrl_rewards.score(reward, images=images, prompts=PROMPTS)
    assert scores == genrl_rewards.score(reward, images=rounded, prompts=PROMPTS)
    with torch.no_grad():
        whole, patches = reward.logits(rounded, PROMPTS)
    assert scores.values == pytest.approx(adversarial_reward(whole, patches, patch_weight=0.3).tolist(), abs=1e-6)
    assert_gradients_agree(reward, images, PROMPTS, within=0.02)


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_layers_by_hand(dino: str, layers: list[int]) -> None:
    """A head per block on its patches without any norm; the best three of sixteen patches; their mean over blocks."""
    reward = DinoLayersAdversary(dino, layers=layers, size=32, hidden=8)
    images = pictures(4)
    assert_gradients_agree(reward, images, PROMPTS, within=0.02)
    model = Dinov2Model.from_pretrained(dino).eval()
    actual: list[torch.Tensor] = []
    for block in model.encoder.layer:
        block.register_forward_hook(lambda module, given, out: actual.append(out[0] if isinstance(out, tuple) else out))
    rounded = (images * 255).round() / 255
    with torch.no_grad():
        model(pixel_values=normalise(rounded, MEAN, STD))
        expected = torch.zeros(3)
        for head, layer in zip(reward.heads, layers, strict=True):
            logits = head(4 * torch.nn.functional.normalize(actual[layer][:, 1:], dim=-1))[..., 0]  # 4: root of 16
            expected += logits.sort(dim=1, descending=True).values[:, :3].mean(1) / len(layers)
        torch.testing.assert_close(reward.logits(images, PROMPTS), expected, atol=1e-5, rtol=1e-5)
    scores = genrl_rewards.score(reward, images=images, prompts=PROMPTS).values
    assert scores == pytest.approx(torch.sigmoid(expected / 0.2).tolist(), abs=1e-4)


@pytest.mark.parametrize(("patch", "size"), [(14, 518), (16, 512)])
def test_the_papers_size_unless_told_otherwise(tmp_path: Path, patch: int, size: int) -> None:
    """Of the released checkpoints' patches: version 2 has 14 pixels, version 3 has 16."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": patch}
    three = DINOv3ViTConfig(**sizes, intermediate_size=32, num_register_tokens=4)
    model = Dinov2Model(Dinov2Config(**sizes, image_size=518)) if patch == 14 else DINOv3ViTModel(three)
    model.save_pretrained(tmp_path)
    reward = DinoAdversary(str(tmp_path), hidden=4)
    assert reward.dino.size == size
    with torch.no_grad():
        assert reward.logits(pictures(0, 1), PROMPTS[:1])[1].shape == (1, (size // patch) ** 2)
    assert DinoFeatures(str(tmp_path), size=None).size == size


def test_the_preference_is_of_logit_scale_times_cosine(clip: str) -> None:
    reward = PickScoreAdversary(clip, layers=2)
    frozen = genrl_rewards.load("pickscore", {"model": clip, "processor": clip})
    scores = genrl_rewards.score(frozen, images=pictures(1), prompts=PROMPTS).values
    assert genrl_rewards.score(reward, images=pictures(1), prompts=PROMPTS).values == scores
    with torch.no_grad():
        assert (reward.logits(pictures(1), PROMPTS) / 26).tolist() == pytest.approx(scores, rel=1e-5)
    one, two = (sum(p.numel() for p in PickScoreAdversary(clip, layers=n).parameters()) for n in (1, 2))
    assert two == 2 * one


def test_what_is_no_trainable_reward_is_told_why(dino: str, tmp_path: Path) -> None:
    grouped = type("Grouped", (DinoAdversary,), {"__call__": lambda self, images, group: images})
    for kind, changes, words in (
        (DinoAdversary, {"state_dict": None}, "'DinoAdversary' has logits.*but no state_dict"),
        (DinoAdversary, {"loss": "wgan"}, "`loss` is 'wgan'"),
        (DinoAdversary, {"parameters": list}, "no parameters"),
        (grouped, {}, "must not depend on other samples"),
    ):
        reward = kind(dino, size=32, hidden=8)
        vars(reward).update(changes)
        with pytest.raises(ValueError, match=words):
            check_trainable(reward)
    file = tmp_path / "own.py"
    file.write_text("class Own:\n    def __call__(self, images): ...\n    def logits(self, images, prompts): ...\n")
    names = [f"{file}:Own", "dino_adversary", "dino_layers_adversary", "pickscore_adversary"]
    assert all(genrl_rewards.declaration(genrl_rewards.resolve(name)).trainable for name in names)
    assert not genrl_rewards.declaration(genrl_rewards.resolve("pickscore")).trainable


def test_arguments_that_do_not_fit(dino: str, clip: str) -> None:
    for kind, args, words in (
        (DinoAdversary, {"size": 32, "loss": "hinges"}, "unknown loss 'hinges'. Did you mean 'hinge'"),
        (DinoLayersAdversary, {"layers": [2, 5], "size": 32}, r"layers \[2, 5\]; use one or more of 0 to 1"),
        (DinoLayersAdversary, {"layers": [], "size": 32}, r"layers \[\]"),
        (DinoLayersAdversary, {"layers": [0], "size": 32, "temperature": 0}, "temperature 0; use more than 0"),
        (PickScoreAdversary, {"layers": 3}, "3 of 2 vision layers; use 1 to 2"),
        (PickScoreAdversary, {"scale": "raws"}, "unknown scale 'raws'. Did you mean 'raw'"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(clip if kind is PickScoreAdversary else dino, **args)
