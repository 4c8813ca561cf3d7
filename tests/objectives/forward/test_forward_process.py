"""AWM, DGPO and CRD: golden trainers_awm, trainers_dgpo and trainers_crd, and their properties."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import noise
from genrl.objectives import decay
from genrl.objectives.forward import forward_process
from genrl.objectives.forward.forward_process import Centre
from genrl.objectives.surrogates import policy_losses

WEIGHTINGS = {"Uniform": "uniform", "t": "sigma", "t2": "sigma_squared", "huber": "huber", "ghuber": "ghuber"}


def load(data: np.lib.npyio.NpzFile) -> dict[str, Tensor]:
    arrays = {name: torch.from_numpy(np.array(data[name])) for name in data.files}
    return {name: value.double() if value.is_floating_point() else value for name, value in arrays.items()}


def close(got: Tensor, want: Tensor, name: str, tolerance: float = 1e-5) -> None:
    """Of losses: in units of max(1, |value|). Of gradients, small numbers: relative to the largest."""
    assert got.shape == want.shape, name
    unit = want.abs().max() if "grad" in name else want.abs().clamp(min=1)
    assert ((got - want).abs() <= tolerance * unit).all(), f"{name}: {(got - want).abs().max():.3g}"


def number(text: str) -> float:
    return float(text.replace("m", "-").replace("p", "."))


# AWM -----------------------------------------------------------------------------------------------------------------


def test_golden_awm(golden) -> None:
    arrays = load(golden("trainers_awm"))
    velocity = arrays["in_v_new"].clone().requires_grad_()
    target = arrays["in_noise"] - arrays["in_x0"]
    times, bound = arrays["in_sigma"], float(arrays["in_adv_clip_max"])
    power, weight = float(arrays["in_ghuber_power"]), float(arrays["in_kl_beta"])
    ema_weight, maximum = float(arrays["in_ema_kl_beta"]), float(arrays["in_advantage_max"])

    def log_prob(values: Tensor, weighting: str = "ghuber") -> Tensor:
        return torch.stack(
            [
                forward_process.awm_log_prob(values[k], target[k], times[k], weighting, power=power)
                for k in range(len(times))
            ]
        )

    def kl(name: str) -> Tensor:
        return torch.stack([policy_losses.kl_velocity(velocity[k], arrays[name][k]) for k in range(len(times))])

    compared = set()

    def check(name: str, value: Tensor) -> None:
        compared.add(name)
        close(value, arrays[name], name)

    for peer in ("official", "flow_factory"):
        for peers_name, ours in WEIGHTINGS.items():
            check(f"out_{peer}_logprob_{peers_name}", log_prob(velocity.detach(), ours))
    new, old = log_prob(velocity), log_prob(arrays["in_v_old"])
    advantage = forward_process.awm_advantage(arrays["in_advantage"], clip=bound, maximum=maximum)
    regularised = weight * kl("in_v_ref") + ema_weight * kl("in_v_ema")
    for name in arrays:
        if found := re.fullmatch(r"out_official_loss_(exp|sum)_first_clip(.*)", name):
            order, suffix = found[1], f"{found[1]}_first_clip{found[2]}"
            clip = number(found[2])
            if order == "exp":
                surrogate = policy_losses.clipped_surrogate(new, old, advantage, clip, clip)
            else:
                surrogate = policy_losses.clipped_surrogate(new.mean(0), old.mean(0), advantage, clip, clip)
            policy = surrogate.loss.mean()
            loss = policy + regularised.mean()
            check(name, loss)
            check(f"out_official_policy_loss_{suffix}", policy)
            check(f"out_official_ratio_{suffix}", surrogate.ratio.flatten())
            gradient = torch.autograd.grad(loss, velocity, retain_graph=True)[0]
            check(f"out_official_grad_v_{suffix}", gradient)
        elif found := re.fullmatch(r"out_flow_factory_loss_(clip(.*)_adv(.*))", name):
            clip, limit = number(found[2]), number(found[3])
            clamped = arrays["in_advantage"].clamp(-limit, limit)  # Flow-Factory does not rescale
            surrogate = policy_losses.clipped_surrogate(new, old, clamped, clip, clip)
            losses = (surrogate.loss + regularised).mean(dim=1)
            check(name, losses)
            gradient = torch.autograd.grad(losses.sum(), velocity, retain_graph=True)[0]
            check(f"out_flow_factory_grad_v_{found[1]}", gradient)
    assert compared == {name for name in arrays if name.startswith("out_")}


def pictures(seed: int, size: int = 6) -> dict[str, Tensor]:
    names = ("clean", "noise", "velocity", "old", "ref")
    return {name: noise.keyed_noise((size, 3, 2), seed, name).double() for name in names}


@given(st.floats(-20, 20), st.floats(0.5, 9), st.floats(0.1, 3))
def test_awm_rescales_where_flow_factory_clamps(advantage: float, clip: float, maximum: float) -> None:
    got = forward_process.awm_advantage(torch.tensor(advantage, dtype=torch.float64), clip=clip, maximum=maximum)
    assert got.item() == pytest.approx(min(max(advantage, -clip), clip) * maximum / clip)


# DGPO ----------------------------------------------------------------------------------------------------------------


def test_golden_dgpo(golden) -> None:
    arrays = load(golden("trainers_dgpo"))
    velocity = arrays["in_v_new"].clone().requires_grad_()
    target, group = arrays["in_noise"] - arrays["in_x0"], arrays["in_group_id"]
    bound = float(arrays["in_adv_clip_max"])
    advantage = arrays["in_advantage"].clamp(-bound, bound)
    compared = set()
    for name in arrays:
        if not (found := re.fullmatch(r"in_(beta.*)", name)):
            continue
        beta, clip, kl_weight, dynamic = arrays[name].tolist()
        losses = []
        for k in range(len(arrays["in_sigma"])):
            new = forward_process.matching_error(velocity[k], target)
            old, ref = (forward_process.matching_error(arrays[v][k], target) for v in ("in_v_old", "in_v_ref"))
            weight = forward_process.dgpo_group_weight(new, old if dynamic else ref, advantage, group, beta=beta)
            kl = policy_losses.kl_velocity(velocity[k], arrays["in_v_ref"][k])
            losses.append((forward_process.dgpo_loss(new, old, advantage, weight, clip=clip) + kl_weight * kl).mean())
        loss = torch.stack(losses)
        gradient = torch.autograd.grad(loss.sum(), velocity)[0]
        for peer in ("official", "flow_factory"):
            for field, value in (("loss", loss), ("grad_v", gradient)):
                key = f"out_{peer}_{field}_{found[1]}"
                compared.add(key)
                close(value, arrays[key], key, max(1e-5, 2e-8 * beta))  # float32 errors times beta
    assert compared == {name for name in arrays if name.startswith("out_")}


@given(st.integers(0, 99), st.floats(0.1, 50.0))
def test_dgpo_descends_the_groups_preference_loss(seed: int, beta: float) -> None:
    """The gradient of -log sigmoid(-S_g) in the errors is beta / K times the weight x advantage of the loss."""
    error = noise.keyed_noise((8,), seed, "error").double().abs().requires_grad_()
    ref = noise.keyed_noise((8,), seed, "ref").double().abs()
    advantage = noise.keyed_noise((8,), seed, "advantage").double()
    group = torch.tensor([5, 5, -1, 5, -1, -1, 5, -1])
    weight = forward_process.dgpo_group_weight(error, ref, advantage, group, beta=beta)
    loss = forward_process.dgpo_loss(error, error, advantage, weight, clip=0.1)
    got = torch.autograd.grad(loss.sum(), error)[0]
    preference = torch.zeros(())
    for slot in (5, -1):
        members = group == slot
        score = beta / 4 * (advantage * (error - ref))[members].sum()
        preference = preference - torch.nn.functional.logsigmoid(-score)
    want = torch.autograd.grad(preference, error)[0]
    assert torch.allclose(beta / 4 * got, want, rtol=1e-9, atol=1e-12)


def test_dgpo_starts_at_half_weight_and_only_lets_go_of_what_went_far() -> None:
    same = torch.full((4,), 0.5, requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, -1.0, 0.0])
    weight = forward_process.dgpo_group_weight(same, same, advantage, torch.zeros(4).long(), beta=100.0)
    assert torch.equal(weight, torch.full((4,), 0.5))
    # q = exp(m_old - m): 1.22, .82, .82, .82
    old = torch.tensor([0.7, 0.3, 0.3, 0.3])
    loss = forward_process.dgpo_loss(same, old, advantage, weight, clip=0.1)
    loss.sum().backward()
    assert torch.allclose(loss.detach(), 0.5 * advantage * 0.5)
    assert same.grad is not None and same.grad.tolist() == [0.0, 0.5, 0.0, 0.0]


# CRD -----------------------------------------------------------------------------------------------------------------


def centres_of(implicit: Tensor, target: Tensor, temperature: float) -> list[Centre]:
    """The peer's centres over the whole batch: temperature < 0 means, > 0 two softmax means, 0 its "hard" variant,
    softmax(a) over a > 0 and, as no a is negative, the plain mean."""
    everyone = torch.zeros(len(target)).long()
    if temperature != 0:
        return forward_process.group_centres(
            implicit, target, everyone, temperature=None if temperature < 0 else temperature
        )
    share = torch.where(target > 0, target, -torch.inf).softmax(dim=0)
    positive = Centre(*((share * v.detach()).sum().expand(len(v)) for v in (implicit, target)))
    return [positive, *forward_process.group_centres(implicit, target, everyone)]


def test_golden_crd(golden) -> None:
    arrays = load(golden("trainers_crd"))
    bound, beta = float(arrays["in_adv_clip_max"]), float(arrays["in_crd_beta"])
    kl_weight = float(arrays["in_kl_beta"])
    target = forward_process.crd_target(arrays["in_advantage"], clip=bound)
    implicit = arrays["in_r_theta"].clone().requires_grad_()
    compared = {"out_adv01"}
    close(target, arrays["out_adv01"], "out_adv01")
    for name in arrays:
        if found := re.fullmatch(r"out_crd_loss_((mse|bce)_temp(.*))", name):
            centres = centres_of(implicit, target, number(found[3]))
            loss = forward_process.crd_loss(implicit, target, centres, beta=beta, kind=found[2]).mean()
            gradient = torch.autograd.grad(loss, implicit)[0]
            for key, value in ((name, loss), (f"out_crd_grad_r_{found[1]}", gradient)):
                compared.add(key)
                close(value, arrays[key], key)
        elif found := re.fullmatch(r"out_decay_(.*)", name):
            compared.add(name)
            start_step, start_value, slope, maximum = DECAYS.get(found[1]) or map(number, found[1].split("-"))
            ours = [
                decay.ramp(int(n), slope=slope, maximum=maximum, start_step=int(start_step), start_value=start_value)
                for n in arrays["in_decay_steps"]
            ]
            assert ours == pytest.approx(arrays[name].tolist(), abs=1e-12), name
    velocity = arrays["in_v_new"].clone().requires_grad_()
    weight = forward_process.reward_adaptive_weight(target, kl_weight)
    for kind in ("adaptive", "plain"):
        losses = []
        for k in range(len(arrays["in_sigma"])):
            aim = arrays["in_noise"][k] - arrays["in_x0"]
            r = forward_process.implicit_reward(velocity[k], arrays["in_v_old"][k], aim, adaptive=kind == "adaptive")
            policy = forward_process.crd_loss(r, target, centres_of(r, target, -1.0), beta=beta)
            kl = policy_losses.kl_velocity(velocity[k], arrays["in_v_ref"][k])
            scaled = weight if kind == "adaptive" else kl_weight
            losses.append((bound / beta * policy + scaled * kl).mean())
        loss = torch.stack(losses)
        gradient = torch.autograd.grad(loss.sum(), velocity)[0]
        for field, value in (("loss", loss), ("grad_v", gradient)):
            key = f"out_flow_factory_{field}_{kind}"
            compared.add(key)
            close(value, arrays[key], key)
    assert compared == {name for name in arrays if name.startswith("out_")}


DECAYS = {  # Flow-Factory's numbered schedules: start step, start value, slope, maximum
    "0": (0, 0.0, 0.0, 0.0),
    "1": (0, 0.0, 0.001, 0.5),
    "2": (75, 0.0, 0.0075, 0.999),
    "3": (0, 1.0, 0.0, 1.0),
    "4": (0, 0.0, 0.02, 0.99),
    "5": (0, 0.0, 0.01, 0.5),
    "6": (0, 0.0, 0.0075, 0.999),
}

GROUP = torch.tensor([0, 0, 0, 7, 7, 7, 7])


def test_crd_centres_come_from_the_groups_best_and_worst() -> None:
    target = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.2, 0.4, 0.6], dtype=torch.float64)
    best, worst = forward_process.group_centres(10 * target, target, GROUP, temperature=1e-3)
    assert torch.allclose(best.target, torch.where(GROUP == 0, 1.0, 0.6).double())
    assert torch.allclose(worst.implicit, torch.zeros(7, dtype=torch.float64))
    (mean,) = forward_process.group_centres(10 * target, target, GROUP)
    assert torch.allclose(mean.target, torch.where(GROUP == 0, 0.5, 0.3).double())
    two = forward_process.group_centres(10 * target, target, GROUP, temperature=1e9)
    assert all(torch.allclose(centre.target, mean.target, atol=1e-6) for centre in two)


@given(st.floats(0, 1), st.floats(1e-3, 1.0))
def test_the_kl_weight_rises_with_the_reward(target: float, kl_weight: float) -> None:
    """`kl_weight (m + a (1 - m))`, m = 1e-4 / kl_weight."""
    got = forward_process.reward_adaptive_weight(torch.tensor(target, dtype=torch.float64), kl_weight).item()
    m = 1e-4 / kl_weight
    assert got == pytest.approx(kl_weight * (m + target * (1 - m)), rel=1e-9)


@pytest.mark.parametrize("kl_weight", [0.0, 1e-6, 9e-5])
def test_a_small_kl_weight_holds_no_sample_less_for_being_good(kl_weight: float) -> None:
    """Below the floor of 1e-4 the formula would fall with the reward, and hold the worst by more than kl_weight."""
    got = forward_process.reward_adaptive_weight(torch.linspace(0, 1, 5, dtype=torch.float64), kl_weight)
    assert got.tolist() == [kl_weight] * 5


def test_gradients_flow_through_the_new_policy_only() -> None:
    s = {name: value.requires_grad_() for name, value in pictures(4).items()}
    target = s["noise"] - s["clean"]
    weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
    error, old = (forward_process.matching_error(s[name], target) for name in ("velocity", "old"))
    r = forward_process.implicit_reward(s["velocity"], s["old"], target)
    centres = forward_process.group_centres(r, weight, torch.zeros(6).long())
    group_weight = forward_process.dgpo_group_weight(error, old, weight, torch.zeros(6).long(), beta=1.0)
    total = (
        forward_process.awm_log_prob(s["velocity"], target, 0.5, "huber")
        + forward_process.dgpo_loss(error, old, weight, group_weight, clip=1.0)
        + forward_process.crd_loss(r, weight, centres)
    )
    total.sum().backward()
    assert s["velocity"].grad is not None and weight.grad is None
    assert all(s[name].grad is None for name in ("clean", "noise", "old", "ref"))


def test_wrong_settings_are_refused() -> None:
    value, group = torch.zeros(4), torch.zeros(4).long()
    with pytest.raises(ValueError, match="weighting must be"):
        forward_process.awm_log_prob(torch.zeros(1, 2), torch.zeros(1, 2), 0.5, "t")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip must be positive"):
        forward_process.awm_advantage(value, clip=0.0)
    with pytest.raises(ValueError, match="cannot be negative"):
        forward_process.dgpo_loss(value, value, value, value, clip=-1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        forward_process.group_centres(value, value, group, temperature=0.0)
    centres = forward_process.group_centres(value, value, group)
    with pytest.raises(ValueError, match="'mse' or 'bce'"):
        forward_process.crd_loss(value, value, centres, kind="l1")  # type: ignore[arg-type]
