"""The golden advantages, rewards and weights of token policies: `vlm_*` files without a loss, and `ar_audio_3d_rl`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from genrl.objectives.advantages import reward_shaping
from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.forward import adversarial
from genrl.objectives.tokens import audio_tokens, token_advantages, token_credit, token_regularisers
from genrl.objectives.tokens.token_aggregation import aggregate
from rewards.scorers.texts.verifiable import rating
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
        "reinforce_pp": token_advantages.whitened(returns, mask),
        "reinforce_pp_baseline": token_advantages.whitened(centred[:, None].expand(mask.shape), mask),
        "gdpo": token_advantages.normalise_then_sum(case["components"], case["weights"].tolist(), group),
    }


def g2rpo(case: Case) -> Expected:
    if "lengths" not in case:
        return {"adv": token_advantages.rank_quantiles(case["rewards"], case.group)}
    low, high = case["band"].tolist()
    return {
        "length_reward": reward_shaping.length_reward(case["lengths"], tuple(case["thresholds"].tolist())),
        "entropy_penalty": token_regularisers.entropy_band(case["H"], low, high),
    }


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


COVERED: dict[str, tuple[Callable[[Case], Expected], str]] = {
    "advantages": (advantages, "group_advantages, leave_one_out, token_returns, whitened, normalise_then_sum"),
    "dcpo_sas": (dcpo_sas, "smoothed_advantages"),
    "g2rpo": (g2rpo, "rank_quantiles, length_reward, entropy_band"),
    "grpo_care": (grpo_care, "answer_confidence, consistency_bonus, group_advantages"),
    "ngrpo": (ngrpo, "with_virtual_reward"),
    "poad": (poad, "token_gae"),
    "q_hawkeye": (q_hawkeye, "score_uncertainty, rating, scaled, perception_loss"),
}


@pytest.mark.parametrize("name", sorted(COVERED))
def test_golden(golden, name: str) -> None:
    compare(golden(f"vlm_{name}"), COVERED[name][0])


def test_golden_audio_and_3d(golden) -> None:
    data = {name: torch.from_numpy(np.array(value)) for name, value in golden("ar_audio_3d_rl").items()}
    logits = data["music_logits"].requires_grad_()
    mask = torch.ones_like(data["music_tokens"])
    music = audio_tokens.music_rl_loss(
        logits.log_softmax(-1),
        data["music_ref_logits"].log_softmax(-1),
        data["music_tokens"],
        data["music_terminal_reward"],
        data["music_value"],
        mask,
        alpha=float(data["music_alpha"]),
    )
    first = data["bt_a_preferred"].bool()
    preferred = torch.where(first, data["bt_score_a"], data["bt_score_b"])
    other = torch.where(first, data["bt_score_b"], data["bt_score_a"])

    groups, size = data["hi_reward_high"].shape
    hierarchical = token_advantages.hierarchical_advantages(
        data["hi_reward_high"].flatten(),
        data["hi_reward_low"].flatten(),
        torch.arange(groups).repeat_interleave(size),
        share=float(data["hi_lambda"]),
    )
    lengths = data["agg_lengths"]
    ragged = torch.arange(int(lengths.max())) < lengths[:, None]
    terms = torch.full(ragged.shape, torch.nan, dtype=torch.float64)
    terms[ragged] = data["agg_token_loss"]
    ours = {
        "music_pg_objective": music.policy,
        "music_kl": music.kl,
        "music_objective": -music.loss,
        "music_value_loss": music.value_loss,
        "music_grad_logits": -torch.autograd.grad(music.loss, logits)[0],
        "bt_loss": adversarial.preference_loss(preferred, other).mean(),
        "hi_adv_high": hierarchical.high.view(groups, size),
        "hi_adv_low": hierarchical.low.view(groups, size),
        "hps_max_view": reward_shaping.over_views(data["view_scores"], "max"),
        "unified_sum_view": reward_shaping.over_views(data["view_scores"], "sum"),
        "agg_token_level": aggregate(terms, ragged, "token_mean_global"),
        "agg_sequence_level": aggregate(terms, ragged, "seq_mean"),
    }
    for name, value in ours.items():
        assert torch.allclose(value.detach(), data[name], rtol=1e-9, atol=1e-10), name
    inputs = {
        *("music_logits", "music_ref_logits", "music_tokens", "music_terminal_reward", "music_value", "music_alpha"),
        *("bt_score_a", "bt_score_b", "bt_a_preferred", "hi_reward_high", "hi_reward_low", "hi_lambda"),
        *("view_scores", "agg_lengths", "agg_token_loss"),
    }
    assert ours.keys() | inputs == data.keys()
