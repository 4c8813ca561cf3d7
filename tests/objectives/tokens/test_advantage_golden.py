"""The golden advantages, rewards and weights of token policies: `vlm_*` files without a loss, and `ar_audio_3d_rl`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from genrl.objectives.advantages import reward_shaping
from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.forward import adversarial
from genrl.objectives.tokens import token_advantages, token_credit, token_regularisers
from genrl.objectives.tokens.token_aggregation import aggregate
from genrl.vlm.methods.music_rl import train as audio_tokens
from genrl_rewards.scorers.texts.verifiable import rating
from tests.golden_cases import Arrays
from tests.objectives.tokens.golden_tokens import Case, Expected, compare


def advantages(case: Case) -> Expected:
    rewards, group, mask = case["rewards"], case.group, case["mask"]
    returns = token_advantages.token_returns(case["token_rewards"], mask)
    centred = group_advantages(rewards, group, scale="none")
    return {
        "grpo_eps1e4": group_advantages(rewards, group, scale="group", eps=1e-4, ddof=1),
        "grpo_eps1e6": group_advantages(rewards, group, scale="group", eps=1e-6, ddof=1),
        "none": centred,
        "batch": group_advantages(rewards, group, scale="global", eps=1e-4, ddof=1),
        "rloo": token_advantages.leave_one_out(rewards, group),
        "reinforce_pp": token_advantages.whitened(returns, mask, ddof=0),  # EasyR1's variance
        "reinforce_pp_baseline": token_advantages.whitened(centred[:, None].expand(mask.shape), mask, ddof=0),
        "gdpo": token_advantages.normalise_then_sum(case["components"], case["weights"].tolist(), group),
    }


def g2rpo(case: Case) -> Expected:
    if "lengths" not in case:
        return {"adv": token_advantages.rank_quantiles(case["rewards"], case.group)}
    low, high = case["band"].tolist()
    return {"entropy_penalty": token_regularisers.entropy_band(case["H"], low, high)}


def ngrpo(case: Case) -> Expected:
    rewards, group, eps = case["rewards"], case.group, case.number("eps")
    best, count = case.number("max_reward"), int(case.number("n_virtual"))
    estimate = token_advantages.with_virtual_reward
    return {
        "adv": estimate(rewards, group, best=best, count=count, eps=eps),
        "adv_all_zero_rewards": estimate(torch.zeros_like(rewards), group, best=best, count=count, eps=eps),
        "adv_two_virtual_max2": estimate(rewards, group, best=2.0, count=2, eps=eps),
    }


def dcpo_sas(case: Case) -> Expected:
    names = [f"prompt {k}" for k in range(len(case["old_times"]))]
    columns = (case["old_times"].tolist(), case["old_mean"].tolist(), case["old_std"].tolist())
    visits = dict(zip(names, zip(*columns, strict=True), strict=True))
    output = token_advantages.smoothed_advantages(case["rewards"], case.group, names, visits)
    assert [output.visits[name][0] for name in names] == (case["old_times"] + 1).tolist()
    return {
        "adv": output.advantage,
        "new_mean": torch.tensor([output.visits[name][1] for name in names], dtype=torch.float64),
        "new_std": torch.tensor([output.visits[name][2] for name in names], dtype=torch.float64),
    }


def grpo_care(case: Case) -> Expected:
    params, group = case.params, case.group_of("acc")
    confidence = reward_shaping.answer_confidence(case["ref_logp"], case["answer_mask"], cap=params["cap"])
    bonus = reward_shaping.consistency_bonus(
        case["acc"],
        confidence,
        group,
        coefficient=params["coef"],
        margin=params["margin"] or 0.0,
        floor=params["acc_floor"],
    )
    reward = case["acc"] + case["fmt"] + bonus
    advantage = group_advantages(reward, group, scale="group", eps=1e-4, ddof=1)
    return {"conf": confidence, "bonus": bonus, "reward": reward, "adv": advantage}


def q_hawkeye(case: Case) -> Expected:
    if "logp" in case:
        log_prob = case.log_prob
        loss = token_regularisers.perception_loss(
            log_prob, case["degraded_logp"], case["mask"], gamma=case.number("gamma"), eta=case.number("eta1")
        )
        return {"perception_loss": loss.detach(), "grad": torch.autograd.grad(loss, log_prob)[0]}
    group = case.group_of("scores")
    uncertainty = token_advantages.score_uncertainty(case["scores"], group)
    weight = torch.exp(-case.number("alpha") * uncertainty)
    written = [f"<answer>{score!r}</answer>" for score in case["scores"].tolist()]  # NaN: no number
    reward = torch.tensor(rating(written, case["gt"][group].tolist()), dtype=torch.float64)
    advantage = group_advantages(reward, group, scale="group", eps=1e-4, ddof=1)
    first = [int((group == slot).nonzero()[0]) for slot in range(len(case["gt"]))]
    return {
        "u": uncertainty[first],
        "weight": weight,
        "reward": reward,
        "adv": token_advantages.scaled(advantage, weight, torch.ones(len(group), 1)),
    }


def poad(case: Case) -> Expected:
    arguments = (case["token_values"], case["n_tokens"], case["rewards"], case["done"])
    gamma, lam = case.number("gamma"), case.number("lam")
    return {
        "adv_bad": token_credit.token_gae(*arguments, gamma=gamma, lam=lam),
        "adv_naive_token": token_credit.token_gae(*arguments, gamma=gamma, lam=lam, gamma_within=gamma),
    }


CHECKS: dict[str, Callable[[Case], Expected]] = {
    "advantages": advantages,
    "dcpo_sas": dcpo_sas,
    "g2rpo": g2rpo,
    "grpo_care": grpo_care,
    "ngrpo": ngrpo,
    "poad": poad,
    "q_hawkeye": q_hawkeye,
}


@pytest.mark.parametrize("name", CHECKS)
def test_golden(golden, name: str) -> None:
    compare(golden(f"vlm_{name}"), CHECKS[name])


def test_golden_audio_and_3d(golden) -> None:
    a = Arrays(golden("ar_audio_3d_rl"))
    logits, ids = a.given("music_logits").requires_grad_(), a.given("music_tokens")
    music = audio_tokens.music_rl_loss(
        logits.log_softmax(-1),
        a.given("music_ref_logits").log_softmax(-1),
        ids,
        a.given("music_terminal_reward"),
        a.given("music_value"),
        torch.ones_like(ids),
        alpha=a.number("music_alpha"),
    )
    a.check("music_pg_objective", music.policy)
    a.check("music_kl", music.kl)
    a.check("music_objective", -music.loss)
    a.check("music_value_loss", music.value_loss)
    a.check("music_grad_logits", -torch.autograd.grad(music.loss, logits)[0])

    scores, first = (a.given("bt_score_a"), a.given("bt_score_b")), a.given("bt_a_preferred").bool()
    preferred, other = torch.where(first, *scores), torch.where(first, *scores[::-1])
    a.check("bt_loss", adversarial.preference_loss(preferred, other).mean())

    high, low = a.given("hi_reward_high"), a.given("hi_reward_low")
    group = torch.arange(len(high)).repeat_interleave(high.shape[1])
    found = token_advantages.hierarchical_advantages(high.flatten(), low.flatten(), group, share=a.number("hi_lambda"))
    a.check("hi_adv_high", found.high.view(high.shape))
    a.check("hi_adv_low", found.low.view(high.shape))

    lengths = a.given("agg_lengths")
    ragged = torch.arange(int(lengths.max())) < lengths[:, None]
    terms = torch.full(ragged.shape, torch.nan, dtype=torch.float64)
    terms[ragged] = a.given("agg_token_loss")
    a.check("agg_token_level", aggregate(terms, ragged, "token_mean_global"))
    a.check("agg_sequence_level", aggregate(terms, ragged, "seq_mean"))
    views = a.given("view_scores")
    a.check("hps_max_view", reward_shaping.over_views(views, "max"))
    a.check("unified_sum_view", reward_shaping.over_views(views, "sum"))
    a.all_used()
