"""Adv-GRPO: golden trainers_adv_disc and trainers_adv_pickscore_criterion, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from genrl.mdp import noise
from genrl.objectives.forward import adversarial
from genrl_rewards.scorers.preference.adversary import top_patches
from tests.golden_cases import Arrays
from tests.reference.adv_grpo import adversarial_reward


def test_golden_discriminator(golden) -> None:
    """One head (linear, GELU, linear) on the class token, which comes first, and on drawn patches."""
    a = Arrays(golden("trainers_adv_disc"))
    hidden, width = a.given("in_head_0_weight").shape
    head = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))
    head.load_state_dict({name: a.given(f"in_head_{name.replace('.', '_')}") for name in head.state_dict()})
    share = a.number("in_patch_weight")

    def logits(features: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        every: Tensor = head(features)[..., 0]
        return every[:, 0], every[:, 1:].gather(1, patches)

    fake = a.given("in_feat_fake")
    with torch.no_grad():  # the released reward sees features of unit length, its discriminator raw ones
        cls, patch = logits(fake / (fake.norm(dim=-1, keepdim=True) + 1e-6), a.given("in_idx_reward"))
        a.near("out_reward_cls", cls)
        a.near("out_reward_patch", patch)
        a.near("out_reward", adversarial_reward(cls, patch, patch_weight=share))
        a.near("out_reward_multi_top20_sigmoid", torch.sigmoid(top_patches(head(fake)[:, 1:, 0]) / 0.2))
    sides = [logits(a.given(f"in_feat_{side}"), a.given(f"in_idx_{side}")) for side in ("real", "fake")]
    out = adversarial.adversary_loss(*sides, patch_weight=share)
    optimizer = torch.optim.Adam(head.parameters(), lr=a.number("in_lr"), betas=tuple(a.given("in_betas").tolist()))
    out.loss.backward()
    a.near("out_d_loss", out.loss.detach())
    a.near("out_d_accuracy", torch.tensor(out.accuracy))
    optimizer.step()
    for name, parameter in head.named_parameters():
        a.near(f"out_grad_{name.replace('.', '_')}", parameter.grad)
        a.near(f"out_updated_{name.replace('.', '_')}", parameter.detach())
    a.all_used("out_.*")


def test_golden_preference_criterion(golden) -> None:
    a = Arrays(golden("trainers_adv_pickscore_criterion"))
    scale, text = a.given("in_logit_scale"), a.given("in_text")
    sides = ("reference", "generated")
    images = [a.given(f"in_img_{side}").requires_grad_() for side in sides]
    for ties, name in ((False, "ref_preferred"), (True, "tie")):
        scores = (scale * (text * image).sum(-1) for image in images)
        loss = adversarial.preference_loss(*scores, ties=ties).mean()
        a.near(f"out_loss_{name}", loss)
        for side, gradient in zip(sides, torch.autograd.grad(loss, images), strict=True):
            a.near(f"out_grad_{side}_{name}", gradient)
    a.all_used("out_.*")


LOGITS = st.lists(st.floats(-5, 5), min_size=1, max_size=6)


@given(LOGITS, LOGITS)
def test_the_losses_are_the_definitions(real: list[float], fake: list[float]) -> None:
    """Real and fake images need not be equally many; the released code cuts the longer list."""
    sides = torch.tensor(real, dtype=torch.float64), torch.tensor(fake, dtype=torch.float64)
    hinge = sum(max(0, 1 - r) for r in real) / len(real) + sum(max(0, 1 + f) for f in fake) / len(fake)
    assert adversarial.discriminator_loss(*sides).item() == pytest.approx(hinge / 2, rel=1e-9, abs=1e-12)
    entropy = sum(math.log1p(math.exp(-r)) for r in real) / len(real)
    entropy += sum(math.log1p(math.exp(f)) for f in fake) / len(fake)
    got = adversarial.discriminator_loss(*sides, kind="bce").item()
    assert got == pytest.approx(entropy / 2, rel=1e-9)


def test_only_the_best_patches_count() -> None:
    logits = torch.tensor([[3.0, -50.0, 1.0, -50.0, -50.0, -50.0, -50.0, -50.0, -50.0, -50.0]])
    assert top_patches(logits).item() == 2.0  # a fifth of ten
    assert top_patches(logits[:, 1:4]).item() == 1.0  # at least one


def test_a_preference_model_that_rates_both_the_same_costs_log_two_or_nothing() -> None:
    scores = 100 * noise.keyed_noise((3,), "s")
    assert torch.allclose(adversarial.preference_loss(scores, scores), torch.full((3,), math.log(2.0)))
    assert adversarial.preference_loss(scores, scores, ties=True).abs().max() < 1e-6


def test_the_reward_model_lags_where_it_rates_samples_above_references() -> None:
    high, low = torch.tensor([2.0, float("nan")]), torch.tensor([1.0, 1.5, float("nan")])
    assert adversarial.reward_model_lags(low, high) and not adversarial.reward_model_lags(high, low)
    assert not adversarial.reward_model_lags(low, low)
    with pytest.raises(ValueError, match="'hinge' or 'bce'"):
        adversarial.discriminator_loss(low, low, kind="wgan")  # type: ignore[arg-type]
