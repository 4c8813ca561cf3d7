"""DiffusionNFT: golden trainers_diffusion_nft and trainers_schedules, and its properties."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import noise
from genrl.objectives.forward import matching
from genrl.objectives.surrogates import policy_losses

MODES = ("all", "positive_only", "negative_only", "one_only", "binary")


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).abs() / want.double().abs().clamp(min=1)).max().item()


def test_golden_losses_and_gradients(golden) -> None:
    data = golden("trainers_diffusion_nft")
    arrays = {name: torch.from_numpy(data[name]) for name in data.files}
    velocity = arrays["in_v_new"].requires_grad_()
    sigmas, bound = arrays["in_sigma"], float(arrays["in_adv_clip_max"])

    def losses(beta: float, mode: str) -> Tensor:
        weight = matching.nft_reward_weight(arrays["in_advantage"], bound, mode=mode)
        per_step = [
            matching.diffusion_nft_loss(
                velocity[k],
                arrays["in_v_old"][k],
                arrays["in_xt"][k],
                arrays["in_x0"],
                sigma,
                weight,
                beta=beta,
                advantage_clip=bound,
            ).mean()
            for k, sigma in enumerate(sigmas)
        ]
        return torch.stack(per_step)

    names = [name for name in arrays if name.startswith("out_")]
    assert names
    for name in names:
        _, field, beta, mode = re.fullmatch(r"out_(\w+?)_(loss|unweighted|grad_v)_beta([\dp]+)_?(\w*)", name).groups()
        policy = losses(float(beta.replace("p", ".")), mode or "all")
        kl = [policy_losses.kl_velocity(velocity[k], arrays["in_v_ref"][k]).mean() for k in range(len(sigmas))]
        total = policy + float(arrays["in_kl_beta"]) * torch.stack(kl)
        if field == "grad_v":  # small numbers: relative to the largest
            gradient = torch.autograd.grad(total.sum(), velocity)[0]
            assert (gradient - arrays[name]).abs().max() <= 1e-5 * arrays[name].abs().max(), name
        else:
            assert off(total if field == "loss" else policy / bound, arrays[name]) <= 1e-5, name


def test_golden_decays(golden) -> None:
    data = golden("trainers_schedules")
    steps = data["in_steps"].tolist()
    for i, kind in enumerate(("none", "ramp", "delayed_ramp")):
        ours = [matching.nft_old_policy_decay(step, kind) for step in steps]
        assert ours == pytest.approx(data[f"out_nft_return_decay_type{i}"].tolist(), abs=1e-12)
    ours = [matching.ema_decay(step) for step in steps]
    assert ours == pytest.approx(data["out_flow_grpo_ema_current_decay"].tolist(), abs=1e-12)
    path = torch.from_numpy(data["in_param_path"]).double()
    (name,) = [name for name in data.files if name.startswith("out_flow_grpo_ema_path_interval")]
    every = int(name.removeprefix("out_flow_grpo_ema_path_interval"))
    average = torch.zeros_like(path[0])  # the parameter before the first step
    for step, value in enumerate(path):
        if (step + 1) % every == 0:
            decay = matching.ema_decay(step)
            average = decay * average + (1 - decay) * value
        assert off(average, torch.from_numpy(data[name][step])) <= 1e-5, step


def sample(seed: int) -> dict[str, Tensor]:
    shape = (4, 3, 2)
    names = ("clean", "noise", "velocity", "old")
    return {name: noise.keyed_noise(shape, seed, name).double() for name in names}


@given(st.floats(-9, 9), st.floats(0.5, 9), st.sampled_from(MODES))
def test_the_weight_is_a_probability(advantage: float, clip: float, mode: str) -> None:
    weight = matching.nft_reward_weight(torch.tensor([advantage, -advantage], dtype=torch.float64), clip, mode=mode)
    assert ((weight >= 0) & (weight <= 1)).all()
    if mode in ("all", "binary"):
        assert weight.sum().item() == pytest.approx(1.0)
    if mode == "all":
        assert weight[0].item() == pytest.approx(min(max(advantage / clip, -1), 1) / 2 + 0.5)


@given(st.integers(0, 99), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_on_policy_the_gradient_is_signed_regression(seed: int, beta: float, sigma: float) -> None:
    """Where v = v_old both errors are one: the gradient is (2r - 1) times that of the normalised regression."""
    s = sample(seed)
    noisy = (1 - sigma) * s["clean"] + sigma * s["noise"]
    weight = torch.tensor([0.0, 0.5, 0.8, 1.0], dtype=torch.float64)
    old = s["old"]
    velocity = old.clone().requires_grad_()
    matching.diffusion_nft_loss(velocity, old, noisy, s["clean"], sigma, weight, beta=beta).sum().backward()
    miss = noisy - sigma * old - s["clean"]
    scale = miss.abs().flatten(1).mean(1).clamp(min=1e-5)
    slope = 5.0 * (2 * weight - 1) / scale / 6  # six elements per sample
    want = slope[:, None, None] * 2 * miss * -sigma
    assert velocity.grad is not None and torch.allclose(velocity.grad, want, rtol=1e-9, atol=1e-12)


def test_sigma_may_differ_per_sample() -> None:
    s = sample(1)
    sigmas = torch.tensor([0.9, 0.5, 0.3, 0.1], dtype=torch.float64)
    noisy = (1 - sigmas)[:, None, None] * s["clean"] + sigmas[:, None, None] * s["noise"]
    weight = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    together = matching.diffusion_nft_loss(s["velocity"], s["old"], noisy, s["clean"], sigmas, weight, beta=0.5)
    for i in range(4):
        row = slice(i, i + 1)
        alone = matching.diffusion_nft_loss(
            s["velocity"][row], s["old"][row], noisy[row], s["clean"][row], sigmas[i], weight[row], beta=0.5
        )
        assert alone.item() == pytest.approx(together[i].item(), rel=1e-12)


def test_gradient_flows_through_the_new_velocity_only() -> None:
    leaves = [value.clone().requires_grad_() for value in sample(2).values()]
    clean, noisy, velocity, old = leaves
    weight = torch.full((4,), 0.7, dtype=torch.float64).requires_grad_()
    matching.diffusion_nft_loss(velocity, old, noisy, clean, 0.5, weight, beta=1.0).sum().backward()
    assert velocity.grad is not None
    assert all(leaf.grad is None for leaf in (clean, noisy, old, weight))


def test_a_perfect_prediction_is_not_divided_by_zero() -> None:
    s = sample(4)
    velocity = (s["noise"] - s["clean"]).requires_grad_()
    noisy = 0.5 * s["clean"] + 0.5 * s["noise"]
    loss = matching.diffusion_nft_loss(velocity, velocity.detach(), noisy, s["clean"], 0.5, torch.ones(4), beta=1.0)
    loss.sum().backward()
    assert loss.abs().max() < 1e-9 and velocity.grad is not None and velocity.grad.isfinite().all()


def test_decays_start_where_the_paper_says() -> None:
    assert [matching.nft_old_policy_decay(n, "ramp") for n in (0, 500, 10_000)] == [0.0, 0.5, 0.5]
    assert [matching.nft_old_policy_decay(n, "delayed_ramp") for n in (0, 74, 75)] == [0.0, 0.0, 0.0]
    assert matching.nft_old_policy_decay(10_000, "delayed_ramp") == 0.999


def test_wrong_settings_are_refused() -> None:
    s = sample(5)
    with pytest.raises(ValueError, match="beta must be positive"):
        matching.diffusion_nft_loss(s["velocity"], s["old"], s["noise"], s["clean"], 0.5, torch.ones(4), beta=0.0)
    with pytest.raises(ValueError, match="clip must be positive"):
        matching.nft_reward_weight(torch.ones(1), 0.0)
    with pytest.raises(ValueError, match="mode must be"):
        matching.nft_reward_weight(torch.ones(1), mode="positive")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none, ramp or delayed_ramp"):
        matching.nft_old_policy_decay(1, "linear")  # type: ignore[arg-type]
