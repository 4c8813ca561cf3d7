"""Adv-GRPO: golden trainers_adv_disc and trainers_adv_pickscore_criterion, and properties."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from genrl.mdp import noise
from genrl.objectives.forward import adversarial
from rewards.scorers.preference.adversary import top_patches
from tests.reference.adv_grpo import adversarial_reward


def load(data: np.lib.npyio.NpzFile) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(data[name])) for name in data.files}


def close(got: Tensor, want: Tensor, name: str) -> None:
    assert got.shape == want.shape, name
    unit = want.double().abs().max() if "grad" in name else want.double().abs().clamp(min=1)
    assert ((got.double() - want.double()).abs() <= 1e-5 * unit).all(), name


def test_golden_discriminator(golden) -> None:
    """One head (linear, GELU, linear) on the class token, which comes first, and on drawn patches."""
    arrays = load(golden("trainers_adv_disc"))
    hidden, width = arrays["in_head_0_weight"].shape
    head = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))
    head.load_state_dict(OrderedDict((name, arrays[f"in_head_{name.replace('.', '_')}"]) for name in head.state_dict()))
    share = float(arrays["in_patch_weight"])

    def logits(features: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        every: Tensor = head(features)[..., 0]
        return every[:, 0], every[:, 1:].gather(1, patches)

    ours = {}
    with torch.no_grad():  # the released reward sees features of unit length, its discriminator raw ones
        fake = arrays["in_feat_fake"]
        unit = fake / (fake.norm(dim=-1, keepdim=True) + 1e-6)
        ours["reward_cls"], ours["reward_patch"] = logits(unit, arrays["in_idx_reward"])
        ours["reward"] = adversarial_reward(ours["reward_cls"], ours["reward_patch"], patch_weight=share)
        ours["reward_multi_top20_sigmoid"] = torch.sigmoid(top_patches(head(fake)[:, 1:, 0]) / 0.2)
    real, real_patches = logits(arrays["in_feat_real"], arrays["in_idx_real"])
    fake, fake_patches = logits(arrays["in_feat_fake"], arrays["in_idx_fake"])
    out = adversarial.adversary_loss((real, real_patches), (fake, fake_patches), patch_weight=share)
    optimizer = torch.optim.Adam(head.parameters(), lr=float(arrays["in_lr"]), betas=tuple(arrays["in_betas"].tolist()))
    out.loss.backward()
    ours |= {"d_loss": out.loss.detach(), "d_accuracy": torch.tensor(out.accuracy)}
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None
        ours[f"grad_{name.replace('.', '_')}"] = parameter.grad.clone()
    optimizer.step()
    for name, parameter in head.named_parameters():
        ours[f"updated_{name.replace('.', '_')}"] = parameter.detach()
    for name, value in ours.items():
        close(value, arrays[f"out_{name}"], f"out_{name}")
    assert {f"out_{name}" for name in ours} == {name for name in arrays if name.startswith("out_")}


def test_golden_preference_criterion(golden) -> None:
    arrays = load(golden("trainers_adv_pickscore_criterion"))
    compared = set()
    for ties, name in ((False, "ref_preferred"), (True, "tie")):
        reference, generated = (
            arrays[f"in_img_{side}"].clone().requires_grad_() for side in ("reference", "generated")
        )
        scale = arrays["in_logit_scale"]
        scores = (scale * (arrays["in_text"] * image).sum(-1) for image in (reference, generated))
        loss = adversarial.preference_loss(*scores, ties=ties).mean()
        gradients = torch.autograd.grad(loss, (reference, generated))
        ours = {f"out_loss_{name}": loss} | {
            f"out_grad_{side}_{name}": gradient
            for side, gradient in zip(("reference", "generated"), gradients, strict=True)
        }
        for key, value in ours.items():
            compared.add(key)
            close(value, arrays[key], key)
    assert compared == {name for name in arrays if name.startswith("out_")}


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
