"""AWM, DGPO and CRD: golden trainers_awm, trainers_dgpo and trainers_crd, and their properties."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from genrl.objectives import matching, policy_losses
from genrl.runtime.loop.collapse import Score, has_fallen, has_left, is_better
from tests.golden_cases import Arrays


def number(text: str) -> float:
    return float(text.replace("m", "-").replace("p", "."))


# AWM -----------------------------------------------------------------------------------------------------------------
def test_golden_awm(golden) -> None:
    a = Arrays(golden("trainers_awm"), double=True)
    velocity, old_velocity = a.given("in_v_new").requires_grad_(), a.given("in_v_old")
    target, times = a.given("in_noise") - a.given("in_x0"), a.given("in_sigma")

    def log_prob(values: Tensor) -> Tensor:
        return torch.stack([matching.awm_log_prob(*row) for row in zip(values, target, times, strict=True)])

    def kl(name: str) -> Tensor:
        return torch.stack([policy_losses.kl_velocity(*pair) for pair in zip(velocity, a.given(name), strict=True)])

    new, old, raw = log_prob(velocity), log_prob(old_velocity), a.given("in_advantage")
    for peer in ("official", "flow_factory"):
        a.near(f"out_{peer}_logprob_ghuber", new.detach())
    advantage = matching.awm_advantage(raw, clip=a.number("in_adv_clip_max"))
    regularised = a.number("in_kl_beta") * kl("in_v_ref") + a.number("in_ema_kl_beta") * kl("in_v_ema")
    for actual in a.matches(r"out_official_loss_((exp|sum)_first_clip(.*))"):
        clip, pair = number(actual[3]), (new, old) if actual[2] == "exp" else (new.mean(0), old.mean(0))
        surrogate = policy_losses.clipped_surrogate(*pair, advantage, clip, clip)
        policy = surrogate.loss.mean()
        loss = policy + regularised.mean()
        a.near(actual[0], loss)
        a.near(f"out_official_policy_loss_{actual[1]}", policy)
        a.near(f"out_official_ratio_{actual[1]}", surrogate.ratio.flatten())
        a.near(f"out_official_grad_v_{actual[1]}", torch.autograd.grad(loss, velocity, retain_graph=True)[0])
    for actual in a.matches(r"out_flow_factory_loss_(clip(.*)_adv(.*))"):
        clip, limit = number(actual[2]), number(actual[3])
        clamped = raw.clamp(-limit, limit)  # Flow-Factory does not rescale
        losses = (policy_losses.clipped_surrogate(new, old, clamped, clip, clip).loss + regularised).mean(dim=1)
        a.near(actual[0], losses)
        gradient = torch.autograd.grad(losses.sum(), velocity, retain_graph=True)[0]
        a.near(f"out_flow_factory_grad_v_{actual[1]}", gradient)
    a.all_used("out_.*", but=".*_logprob_.*")


# DGPO ----------------------------------------------------------------------------------------------------------------
def test_golden_dgpo(golden) -> None:
    a = Arrays(golden("trainers_dgpo"), double=True)
    velocity, old_velocity, reference = a.given("in_v_new").requires_grad_(), a.given("in_v_old"), a.given("in_v_ref")
    target, group, bound = a.given("in_noise") - a.given("in_x0"), a.given("in_group_id"), a.number("in_adv_clip_max")
    advantage = a.given("in_advantage").clamp(-bound, bound)
    for actual in a.matches(r"in_(beta.*)"):
        beta, clip, kl_weight, dynamic = a.given(actual[0]).tolist()
        losses = []
        for velocities in zip(velocity, old_velocity, reference, strict=True):
            new, old, ref = (matching.matching_error(v, target) for v in velocities)
            weight = matching.dgpo_group_weight(new, old if dynamic else ref, advantage, group, beta=beta)
            kl = policy_losses.kl_velocity(velocities[0], velocities[2])
            losses.append((matching.dgpo_loss(new, old, advantage, weight, clip=clip) + kl_weight * kl).mean())
        loss = torch.stack(losses)
        gradient = torch.autograd.grad(loss.sum(), velocity)[0]
        for peer in ("official", "flow_factory"):  # float32 errors times beta
            a.near(f"out_{peer}_loss_{actual[1]}", loss, max(1e-5, 2e-8 * beta))
            a.near(f"out_{peer}_grad_v_{actual[1]}", gradient, max(1e-5, 2e-8 * beta))
    a.all_used("out_.*")


# CRD -----------------------------------------------------------------------------------------------------------------
def test_golden_crd(golden) -> None:
    a = Arrays(golden("trainers_crd"), double=True)
    bound, beta, kl_weight = (a.number(f"in_{name}") for name in ("adv_clip_max", "crd_beta", "kl_beta"))
    target = matching.nft_reward_weight(a.given("in_advantage"), bound)
    implicit = a.given("in_r_theta").requires_grad_()
    a.near("out_adv01", target)
    everyone = torch.zeros(len(target)).long()  # the peer centres over the whole batch
    loss = matching.crd_loss(implicit, target, matching.group_centres(implicit, target, everyone), beta=beta).mean()
    a.near("out_crd_loss_mse_tempm1p0", loss)
    a.near("out_crd_grad_r_mse_tempm1p0", torch.autograd.grad(loss, implicit)[0])
    for actual in a.matches(r"out_decay_(.*-.*)"):  # the others are of ramps too: test_golden_decays
        start_step, start_value, slope, maximum = map(number, actual[1].split("-"))
        ramp = partial(matching.ramp, slope=slope, maximum=maximum, start_step=int(start_step), start_value=start_value)
        a.check(actual[0], [ramp(int(n)) for n in a.given("in_decay_steps")], atol=1e-12)
    velocity, clean = a.given("in_v_new").requires_grad_(), a.given("in_x0")
    scaled, losses = matching.reward_adaptive_weight(target, kl_weight), []
    others = (a.given(f"in_{n}") for n in ("v_old", "v_ref", "noise"))
    for v, old, ref, source in zip(velocity, *others, strict=True):
        r = matching.implicit_reward(v, old, source - clean)
        policy = matching.crd_loss(r, target, matching.group_centres(r, target, everyone), beta=beta)
        losses.append((bound / beta * policy + scaled * policy_losses.kl_velocity(v, ref)).mean())
    a.near("out_flow_factory_loss_adaptive", torch.stack(losses))
    a.near("out_flow_factory_grad_v_adaptive", torch.autograd.grad(torch.stack(losses).sum(), velocity)[0])
    a.all_used("out_.*", but=r".*(_bce_|_temp0|_plain|decay_\d$).*")  # what the method does not use


def test_crd_centres_are_the_means_of_groups() -> None:
    target = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.2, 0.4, 0.6], dtype=torch.float64)
    mean = matching.group_centres(10 * target, target, torch.tensor([0, 0, 0, 7, 7, 7, 7]))
    assert mean.target.tolist() == pytest.approx([0.5] * 3 + [0.3] * 4)
    assert torch.allclose(mean.implicit, 10 * mean.target)


@pytest.mark.parametrize("kl_weight", [0.0, 1e-6, 9e-5])
def test_a_small_kl_weight_holds_no_sample_less_for_being_good(kl_weight: float) -> None:
    """Below the floor of 1e-4 the formula would fall with the reward, and hold the worst by more than kl_weight."""
    got = matching.reward_adaptive_weight(torch.linspace(0, 1, 5, dtype=torch.float64), kl_weight)
    assert got.tolist() == [kl_weight] * 5


# -- Decay schedules of snapshots: golden trainers_schedules, its columns of decays
def test_golden_decays(golden) -> None:
    """Every `out_ff_` column of a decay, and the one of AWM and DGPO. The rest: test_matching, test_schedules."""
    a = Arrays(golden("trainers_schedules"))

    def check(name: str, rule: Callable[..., float], **options: float) -> None:
        a.check(name, [rule(n, **options) for n in a.given("in_steps").tolist()], atol=1e-12)

    shape = {"initial": 0.9, "final": 0.999, "total_steps": 1000}
    check("out_ff_constant", matching.ramp, start_value=0.995, slope=0.0, maximum=1.0)
    check("out_ff_power10", matching.ema_decay, maximum=0.995)
    check("out_ff_cosine", matching.cosine, **shape)
    for actual in a.matches(r"out_awm_dgpo_linear_min_(.*)"):
        check(actual[0], matching.ramp, slope=0.001, maximum=number(actual[1]))
    for actual in a.matches(r"out_ff_piecewise_(\d+)_(.*)_(.*)"):
        check(actual[0], matching.ramp, slope=number(actual[2]), maximum=number(actual[3]), start_step=int(actual[1]))
    a.all_used("out_.*", but="out_(ff_(discrete|logit_normal|uniform|warmup_cosine|linear)|nft|flow_grpo).*")


# -- The rules of collapse: what is better, what has fallen, what has left its own history
def test_better_is_more_than_noise_and_fallen_three_standard_errors_or_the_tolerance() -> None:
    """Standard errors are those of the difference."""
    best = Score(0.5, 0.03)
    assert not is_better(Score(0.54, 0.04), best)  # one standard error of the difference is 0.05
    assert is_better(Score(0.56, 0.04), best)
    assert is_better(Score(0.5001), Score(0.5)) and not is_better(Score(0.5), Score(0.5))
    assert not is_better(Score(math.nan), Score(0.5))
    best = Score(0.5, 0.03)
    assert not has_fallen(Score(0.36, 0.04), best) and has_fallen(Score(0.34, 0.04), best)
    assert has_fallen(Score(0.44, 0.04), best, tolerance=0.05) and not has_fallen(Score(0.46, 0.04), best, 0.05)
    assert not has_fallen(Score(math.nan), best)


NOISE = [1 + 0.2 * math.sin(7.0 * i) for i in range(100)]


@pytest.mark.parametrize(
    ("series", "left"),
    [
        (NOISE, False),
        ([*NOISE[:99], 100.0], False),  # one figure may be anything
        ([*NOISE[:50], *(4 * x for x in NOISE[50:])], True),
        ([x * (1 + i / 100) for i, x in enumerate(NOISE)], False),  # twice as large at the end
        ([i / 100 for i in range(100)], False),  # a distance that grows steadily
        ([math.exp(i / 15) for i in range(100)], True),
        ([1.0] * 98 + [1.2] * 2, False),
        ([5.0] * 30, False),  # too short to be a history
        ([1e-9 * x for x in NOISE], False),
    ],
)
def test_leaving_its_own_history(series: list[float], left: bool) -> None:
    assert has_left(series, series[-10:]) == left
