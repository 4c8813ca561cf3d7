"""The golden advantages, rewards and weights of token policies: `vlm_*` files without a loss, and `ar_audio_3d_rl`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.objectives import preferences, token_advantages, token_credit, token_regularisers, token_weights
from genrl.objectives import token_surrogates as ts
from genrl.objectives.groups import group_advantages
from genrl.objectives.tokens import aggregate
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
    confidence = token_regularisers.answer_confidence(case["ref_logp"], case["answer_mask"], cap=params["cap"])
    constants = {"coefficient": params["coef"], "margin": params["margin"] or 0.0, "floor": params["acc_floor"]}
    bonus = token_regularisers.consistency_bonus(case["acc"], confidence, group, **constants)
    reward = case["acc"] + case["fmt"] + bonus
    advantage = group_advantages(reward, group, scale="group", eps=1e-4, ddof=1)
    return {"conf": confidence, "bonus": bonus, "reward": reward, "adv": advantage}


def q_hawkeye(case: Case) -> Expected:
    if "logp" in case:
        log_prob = case.log_prob
        constants = {"gamma": case.number("gamma"), "eta": case.number("eta1")}
        loss = token_regularisers.perception_loss(log_prob, case["degraded_logp"], case["mask"], **constants)
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
    **{"advantages": advantages, "dcpo_sas": dcpo_sas, "g2rpo": g2rpo, "grpo_care": grpo_care},
    **{"ngrpo": ngrpo, "poad": poad, "q_hawkeye": q_hawkeye},
}


@pytest.mark.parametrize("name", CHECKS)
def test_golden(golden, name: str) -> None:
    compare(golden(f"vlm_{name}"), CHECKS[name])


def test_golden_audio_and_3d(golden) -> None:
    a = Arrays(golden("ar_audio_3d_rl"))
    logits, ids = a.given("music_logits").requires_grad_(), a.given("music_tokens")
    rows = (logits.log_softmax(-1), a.given("music_ref_logits").log_softmax(-1))
    worth = (a.given("music_terminal_reward"), a.given("music_value"))
    music = audio_tokens.music_rl_loss(*rows, ids, *worth, torch.ones_like(ids), alpha=a.number("music_alpha"))
    a.checks("music", pg_objective=music.policy, kl=music.kl, objective=-music.loss, value_loss=music.value_loss)
    a.check("music_grad_logits", -torch.autograd.grad(music.loss, logits)[0])
    scores, first = (a.given("bt_score_a"), a.given("bt_score_b")), a.given("bt_a_preferred").bool()
    preferred, other = torch.where(first, *scores), torch.where(first, *scores[::-1])
    a.check("bt_loss", preferences.preference_loss(preferred, other).mean())
    high, low = a.given("hi_reward_high"), a.given("hi_reward_low")
    group = torch.arange(len(high)).repeat_interleave(high.shape[1])
    actual = token_advantages.hierarchical_advantages(high.flatten(), low.flatten(), group, share=a.number("hi_lambda"))
    a.checks("hi_adv", high=actual.high.view(high.shape), low=actual.low.view(high.shape))
    lengths = a.given("agg_lengths")
    ragged = torch.arange(int(lengths.max())) < lengths[:, None]
    terms = torch.full(ragged.shape, torch.nan, dtype=torch.float64)
    terms[ragged] = a.given("agg_token_loss")
    levels = [aggregate(terms, ragged, rule) for rule in ("token_mean_global", "seq_mean")]
    a.checks("agg", token_level=levels[0], sequence_level=levels[1])
    views = a.given("view_scores")
    a.check("hps_max_view", token_regularisers.over_views(views, "max"))
    a.check("unified_sum_view", token_regularisers.over_views(views, "sum"))
    a.all_used()


# -- Golden arrays of token trust regions (UniRL's DPPO, CPPO, DRPO) and of small presets (authors' functions), and
# what each rule means where the answer is known
def packed(data: Arrays) -> Callable[[str], Tensor]:
    """From tokens of all rows one after the other to [B, T], NaN where there is none."""
    lengths = data.given("lengths").tolist()

    def rows(name: str) -> Tensor:
        parts = data.given(name).split(lengths)
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=torch.nan)

    return rows


def test_probability_masks_and_the_quadratic(golden: Any) -> None:
    data = Arrays(golden("divergence_masks"))
    rows = packed(data)
    old, advantage = rows("old_logp"), rows("advantages")
    new = rows("new_logp").requires_grad_()
    mask = ~old.isnan()
    terms = (new, old, advantage, mask)
    for delta in (0.15, 0.05):
        actual = token_weights.probability_mask_surrogate(*terms, delta=delta)
        data.check(f"dppo_keep_delta{delta}", ~actual.clipped[mask])
    data.check("masked_loss_dppo0.15", token_weights.probability_mask_surrogate(*terms).loss[mask].detach())
    for name in data.tags(r"cppo_keep_(.+)"):
        delta, last, slack = map(float, name.split("_"))
        actual = token_weights.cumulative_mask_surrogate(*terms, delta=delta, last=last, slack=slack)
        data.check(f"cppo_keep_{name}", ~actual.clipped[mask])
    actual = token_weights.quadratic_surrogate(*terms, width=data.number("drpo_epsilon"))
    data.check("drpo_loss_mu", actual.loss[mask].detach())
    data.check("drpo_grad_mu", torch.autograd.grad(actual.loss[mask].sum(), new)[0][mask])
    data.all_used(but=r"drpo_\w+_spo")  # without the old probability: plain SPO, which is no preset


def test_lp_reg(golden: Any) -> None:
    data = Arrays(golden("small_presets"))
    logits, ids = data.given("lpreg_old_logits"), data.given("lpreg_tokens")
    proxy = token_weights.min_p_log_prob(logits, ids, kappa=data.number("lpreg_kappa"))
    # of what is removed they have -1e4, which is never more than a log-probability either
    data.check("lpreg_proxy_logp", torch.where(proxy.isinf(), data.given("lpreg_proxy_logp"), proxy))
    new, mask = data.given("lpreg_new_logp").requires_grad_(), data.given("lpreg_mask")
    old, advantage = data.given("lpreg_old_logp"), data.given("lpreg_advantages")
    chosen = token_weights.lowest_share(new, mask.bool() & (advantage < 0), share=data.number("lpreg_share"))
    actual = token_weights.low_probability_surrogate(new, old, advantage, mask, proxy, chosen)
    loss = aggregate(actual.loss, mask, "token_mean_global")
    data.check("lpreg_loss", loss.detach())
    data.check("lpreg_grad", torch.autograd.grad(loss, new)[0])
    data.all_used("lpreg_.*")


def test_icpo(golden: Any) -> None:
    data = Arrays(golden("small_presets"))
    new, old = data.given("icpo_new_logp").requires_grad_(), data.given("icpo_old_logp")
    advantage, mask = data.given("hapo_advantage_in"), data.given("rein_mask")
    actual = ts.clip_surrogate(new, old, advantage, mask, low=0.2, high=0.2).loss
    others = ts.unsampled_loss(new, advantage, shaping=0.1)
    loss = aggregate(torch.where(data.given("icpo_hinted").bool()[:, None], others, actual), mask, "token_mean_global")
    data.check("icpo_loss", loss.detach())
    data.check("icpo_grad", torch.autograd.grad(loss, new)[0])
    data.all_used("icpo_.*")


def test_hapo_as_intended(golden: Any) -> None:
    data = Arrays(golden("small_presets"))
    mask, ratio = data.given("rein_mask"), data.given("hapo_ratio")
    height = token_weights.relative_entropy(data.given("hapo_entropy"), mask)
    terms = (ratio.log(), torch.zeros(ratio.shape), data.given("hapo_advantage_in"), mask)
    actual = token_weights.entropy_adaptive(*terms, height)
    for name, got in zip(("h", "clip_low", "clip_high", "advantage"), (height, *actual), strict=True):
        data.check(f"hapo_signed_{name}", torch.where(mask, got, data.given(f"hapo_signed_{name}")))
    assert float(height.min()) == -1 and float(height.max()) == 1


def test_statistics_over_tokens_are_those_of_rows_repeated() -> None:
    rewards, lengths = torch.tensor([1.0, 0, 0, 1, 0, 1]), torch.tensor([3, 1, 2, 40, 1, 1])
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    result = token_advantages.over_tokens(rewards, lengths, group)
    tokens = torch.tensor([1.0, 1, 1, 0, 0, 0])
    want = (rewards[:3] - tokens.mean()) / tokens.std()
    torch.testing.assert_close(result[:3].float(), want, rtol=1e-5, atol=0)
    # one wrong token among 41 right ones would count more than 5: GRPO's instead
    torch.testing.assert_close(result[3:], group_advantages(rewards, group, scale="group", eps=1e-6, ddof=1)[3:])


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_signed_rewards(golden: Any, share: float) -> None:
    data = Arrays(golden("small_presets"))
    mask, right = data.given("rein_mask"), data.given("rein_score")
    lengths = mask.sum(1)
    weighted = token_advantages.signed(right, lengths, positive=share, negative=-1)
    data.check(f"w_reinforce_{share}", weighted[:, None] * mask)
    # rows of 0 are removed there: the mean over the tokens of the others
    log_prob = torch.randn(mask.shape, dtype=torch.float64)
    for name, values in {"psr_rows_right_only": (1, 0), "nsr_rows_wrong_only": (0, -1)}.items():
        theirs = data.given(name)
        mean = (theirs * log_prob).sum() / (theirs != 0).sum()
        ours = token_advantages.signed(right, lengths, positive=values[0], negative=values[1])[:, None]
        torch.testing.assert_close(aggregate(ours * log_prob, mask, "token_mean_global"), mean)


def test_a_grae(golden: Any) -> None:
    data = Arrays(golden("small_presets"), double=True)
    right, group = data.given("agrae_score"), data.given("agrae_group")
    plain = group_advantages(right, group, scale="group", eps=1e-6, ddof=1)
    data.near("agrae_off", plain)
    data.near("agrae_on", token_advantages.asymmetric(plain, right, group))
    # half of all right, in a group of half: (1/2 + 1/2) / 2 / sqrt(1/2) or its complement, and praise counts in full
    right, group = torch.tensor([1.0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
    actual = token_advantages.asymmetric(torch.tensor([1.0, -1, -1, 1]), right, group, alpha=0.5)
    root = 0.5**0.5
    wanted = torch.full((4,), 0.25 / (1 - root) + 0.25 / root).double()
    torch.testing.assert_close(actual.abs(), wanted, rtol=1e-5, atol=0)
    kept = token_advantages.asymmetric(torch.tensor([1.0, -1, 2, -2]), group.float(), group)
    assert kept.tolist() == [0.5, -1, 1, -2]  # groups of one outcome; half of all are right
    assert token_advantages.asymmetric(right[:0], right[:0], group[:0]).shape == (0,)  # no row has a score


@pytest.mark.parametrize("size", [3, 5])
def test_macro_actions(golden: Any, size: int) -> None:
    data = Arrays(golden("macro"))
    start = int(data.number("start"))
    valid, values = data.given("mask")[:, start:].bool(), data.given("values")[:, start:]
    macro = token_credit.macro_actions(torch.ones_like(valid), size=size)
    data.check(f"bounds_ngram{size}", start + (macro[0].diff(prepend=torch.tensor([-1])) > 0).nonzero()[:, 0])
    means = token_credit.macro_values(values, valid, macro)[0][:, : int(macro.max()) + 1]
    data.near(f"macro_ngram{size}_equal", means)


@pytest.mark.parametrize("compare", ["rloo", "grpo", "naive"])
@pytest.mark.parametrize("balanced", [False, True])
def test_pacs(golden: Any, compare: str, balanced: bool) -> None:
    data = Arrays(golden("small_presets"))
    new, right = data.given("pacs_new_logp").requires_grad_(), data.given("pacs_score") > 0
    score = (new - data.given("pacs_old_logp")).sum(1)
    group = torch.arange(len(right)) // int(data.number("pacs_group_size"))
    way: Any = {"rloo": "others", "grpo": "group", "naive": "none"}[compare]
    loss = ts.right_answer_loss(score, right, group, compare=way, balanced=balanced).mean()
    name = f"pacs_{compare}_{'weighted' if balanced else 'plain'}"
    data.near(name, loss.detach())
    data.near(f"{name}_grad", torch.autograd.grad(loss, new)[0])
