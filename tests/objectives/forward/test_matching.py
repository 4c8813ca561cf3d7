"""DiffusionNFT: golden trainers_diffusion_nft and trainers_schedules, and its properties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from genrl.mdp import noise
from genrl.objectives.forward import matching
from genrl.objectives.surrogates import policy_losses
from tests.golden_cases import Arrays


def test_golden_losses_and_gradients(golden) -> None:
    a = Arrays(golden("trainers_diffusion_nft"))
    velocity, old, reference, noisy = (a.given(f"in_{name}") for name in ("v_new", "v_old", "v_ref", "xt"))
    velocity.requires_grad_()
    clean, sigmas, bound = a.given("in_x0"), a.given("in_sigma"), a.number("in_adv_clip_max")
    for found in a.matches(r"out_(\w+?)_(loss|unweighted|grad_v)_beta([\dp]+)_?(\w*)"):
        weight = matching.nft_reward_weight(a.given("in_advantage"), bound, mode=found[4] or "all")
        options = {"beta": float(found[3].replace("p", ".")), "advantage_clip": bound}
        rows = zip(velocity, old, noisy, sigmas, strict=True)
        policy = torch.stack(
            [matching.diffusion_nft_loss(v, o, x, clean, s, weight, **options).mean() for v, o, x, s in rows]
        )
        kl = [policy_losses.kl_velocity(*pair).mean() for pair in zip(velocity, reference, strict=True)]
        total = policy + a.number("in_kl_beta") * torch.stack(kl)
        gradient = torch.autograd.grad(total.sum(), velocity)[0]
        a.near(found[0], {"loss": total, "unweighted": policy / bound, "grad_v": gradient}[found[2]])
    a.all_used("out_.*")


def test_golden_decays(golden) -> None:
    a = Arrays(golden("trainers_schedules"), double=True)
    steps = a.given("in_steps").tolist()
    for i, kind in enumerate(("none", "ramp", "delayed_ramp")):
        a.check(f"out_nft_return_decay_type{i}", [matching.nft_old_policy_decay(step, kind) for step in steps])
    a.check("out_flow_grpo_ema_current_decay", [matching.ema_decay(step) for step in steps])
    path = a.given("in_param_path")
    for found in a.matches(r"out_flow_grpo_ema_path_interval(\d+)"):
        average, averages = torch.zeros_like(path[0]), []  # the parameter before the first step
        for step, value in enumerate(path):
            if (step + 1) % int(found[1]) == 0:
                decay = matching.ema_decay(step)
                average = decay * average + (1 - decay) * value
            averages.append(average)
        a.near(found[0], torch.stack(averages))
    a.all_used("out_(nft|flow_grpo).*")


def sample(seed: int) -> dict[str, Tensor]:
    shape = (4, 3, 2)
    names = ("clean", "noise", "velocity", "old")
    return {name: noise.keyed_noise(shape, seed, name).double() for name in names}


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


def test_the_weight_is_the_clipped_advantage_between_0_and_1() -> None:
    weight = matching.nft_reward_weight(torch.tensor([-9.0, -2.5, 0.0, 2.5, 9.0]))
    assert weight.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
