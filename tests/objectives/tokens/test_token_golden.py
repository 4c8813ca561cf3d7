"""The golden arrays of token policies: every `vlm_*` file and `ar_audio_3d_rl`, by public functions.

`COVERED` says which function answers for which array. A file, a case or an expected array that nothing compares is a
failure, so that none can be forgotten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from genrl.objectives.advantages import reward_shaping
from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.forward import adversarial
from genrl.objectives.surrogates.policy_losses import kl_k3
from genrl.objectives.tokens import (
    audio_tokens,
    group_losses,
    masked_diffusion,
    token_advantages,
    token_credit,
    token_regularisers,
    token_surrogates,
    token_weights,
)
from genrl.objectives.tokens.token_aggregation import aggregate
from genrl.objectives.tokens.tokens import masked, mean_log_ratio, row_mean, sequence_log_ratio


@dataclass(frozen=True)
class Case:
    """One case of a file. Masked entries of the inputs are made NaN: whatever stands there must not matter."""

    arrays: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> Tensor:
        value = torch.from_numpy(np.array(self.arrays[name]))
        hidden = "mask" in self.arrays and value.shape == self.arrays["mask"].shape and name.endswith(("logp", "adv"))
        if hidden and not name.startswith("out_"):
            value = torch.where(torch.from_numpy(self.arrays["mask"]).bool(), value, torch.nan)
        return value

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def number(self, name: str) -> float:
        return float(self.arrays[name])

    @property
    def params(self) -> dict[str, Any]:
        return json.loads(str(self.arrays["params"])) if "params" in self.arrays else {}

    @property
    def log_prob(self) -> Tensor:
        return self["logp"].requires_grad_()

    @property
    def group(self) -> Tensor:
        return self.group_of("rewards")

    def group_of(self, rows: str) -> Tensor:
        size = int(self.arrays["G"])
        return torch.arange(len(self.arrays[rows]) // size).repeat_interleave(size)


Expected = dict[str, Tensor]


def with_gradient(loss: Tensor, log_prob: Tensor, suffix: str = "") -> Expected:
    return {f"loss{suffix}": loss.detach(), f"grad{suffix}": torch.autograd.grad(loss, log_prob, retain_graph=True)[0]}


def kl_term(case: Case, log_prob: Tensor) -> Tensor | float:
    beta = case.params.get("beta", 0.0)
    if not beta:
        return 0.0
    return beta * kl_k3(masked(log_prob, case["mask"]), masked(case["ref_logp"], case["mask"]))


def trl_loss(case: Case) -> Expected:
    """TRL's loss types: surrogates x aggregations x per-token KL."""
    params, mask, log_prob = case.params, case["mask"], case.log_prob
    arguments = (log_prob, case["old_logp"], case["adv"], mask)
    low, high = params.get("eps_low", 0.2), params.get("eps_high", 0.2)
    kind = params["loss_type"]
    if kind == "cispo":
        loss = token_surrogates.cispo_surrogate(*arguments, highest=high).loss
    elif kind == "sapo":
        loss = token_surrogates.sapo_surrogate(
            *arguments, positive=params.get("tp", 1.0), negative=params.get("tn", 1.05)
        ).loss
    elif kind == "vespo":
        loss = token_surrogates.vespo_surrogate(*arguments).loss
    elif params.get("level") == "sequence":
        loss = token_surrogates.sequence_clip_surrogate(*arguments, low=low, high=high).loss
    else:
        loss = token_surrogates.clip_surrogate(*arguments, low=low, high=high, cap=params.get("delta")).loss
    rule = {"grpo": "seq_mean", "sapo": "seq_mean", "bnpo": "token_mean", "dr_grpo": "const", "luspo": "seq_sum"}
    total = aggregate(
        loss + kl_term(case, log_prob),
        mask,
        rule.get(kind, "token_mean_global"),
        tokens=int(params["num_items"]),
        length=params.get("maxlen", 16),
    )
    return with_gradient(total, log_prob)


def gspo_token(case: Case) -> Expected:
    log_prob, params = case.log_prob, case.params
    term = token_surrogates.sequence_token_clip_surrogate(
        log_prob, case["old_logp"], case["adv"], case["mask"], low=params["lo"], high=params["hi"]
    )
    return with_gradient(aggregate(term.loss, case["mask"], "seq_mean"), log_prob)


def mismatch(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    arguments, result = (log_prob, case["old_logp"], case["adv"], mask), {}
    corrected = token_surrogates.clip_surrogate(*arguments, low=0.2, high=0.28).loss
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            weights = token_weights.mismatch_weights(
                case["old_logp"], case["sampler_logp"], mask, level=level, mode=mode, low=0.5, high=2.0
            )
            result[f"w_{level}_{mode}"] = weights
            loss = aggregate(weights * corrected, mask, "token_mean")
            result |= with_gradient(loss, log_prob, f"_{level}_{mode}")
    plain = token_surrogates.clip_surrogate(*arguments).loss
    keep = token_weights.off_policy_mask(
        log_prob, case["sampler_logp"], case["adv"], mask, threshold=case.number("opsm_threshold")
    )
    result["opsm_keep"] = keep[:, 0]
    result |= with_gradient(aggregate(keep * plain, mask, "token_mean"), log_prob, "_opsm")
    forking = token_weights.top_entropy(case["entropy"], mask, share=0.2)
    result["entropy_mask"] = forking.bool()
    return result | with_gradient(aggregate(forking * plain, mask, "token_mean"), log_prob, "_top20")


def verl_variants(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    arguments = (log_prob, case["old_logp"], case["adv"], mask)
    dual = token_surrogates.clip_surrogate(*arguments, high=0.28, dual=3.0).loss
    two_sided = token_surrogates.cispo_surrogate(*arguments, lowest=0.8, highest=1.28).loss
    plain = token_surrogates.clip_surrogate(*arguments).loss
    return (
        with_gradient(aggregate(dual, mask, "token_mean"), log_prob, "_dual_clip")
        | with_gradient(aggregate(two_sided, mask, "token_mean"), log_prob, "_cispo_two_sided")
        | with_gradient(aggregate(plain, mask, "seq_sum"), log_prob, "_seq_mean_token_sum")
    )


def advantages(case: Case) -> Expected:
    rewards, group, mask = case["rewards"], case.group, case["mask"]
    return {
        "grpo_eps1e4": group_advantages(rewards, group, scale="group", eps=1e-4, ddof=1),
        "grpo_eps1e6": group_advantages(rewards, group, scale="group", eps=1e-6, ddof=1),
        "none": group_advantages(rewards, group, scale="none"),
        "batch": group_advantages(rewards, group, scale="global", eps=1e-4, ddof=1),
        "rloo": token_advantages.leave_one_out(rewards, group),
        "reinforce_pp": token_advantages.reinforce_plus_plus(case["token_rewards"], mask),
        "reinforce_pp_baseline": token_advantages.reinforce_plus_plus_baseline(rewards, group, mask),
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


def dcpo_clip(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    widths = {"low": case.number("eps_low"), "high": case.number("eps_high")}
    low, high = token_surrogates.dynamic_clip_bounds(case["old_logp"], **widths)
    term = token_surrogates.dynamic_clip_surrogate(log_prob, case["old_logp"], case["adv"], mask, **widths)
    # the bounds are compared where the mask is 1; elsewhere ours are NaN, as the inputs are
    bounds = {name: torch.where(mask.bool(), v, case[f"out_{name}"]) for name, v in (("low", low), ("high", high))}
    return bounds | with_gradient(aggregate(term.loss, mask, "otm"), log_prob, "_otm")


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
    reward = reward_shaping.score_reward(case["scores"], case["gt"][group])
    advantage = group_advantages(reward, group, scale="group", eps=1e-4, ddof=1)
    first = [int((group == slot).nonzero()[0]) for slot in range(len(case["gt"]))]
    return {
        "u": uncertainty[first],
        "weight": weight,
        "reward": reward,
        "adv": token_advantages.scaled(advantage, weight, torch.ones(len(group), 1)),
    }


def vppo(case: Case) -> Expected:
    params, mask, log_prob = case.params, case["mask"], case.log_prob
    dependency = token_weights.visual_dependency(case["old_logp"], case["masked_image_logp"], mask)
    chosen = token_weights.top_of_row(dependency, mask, share=params["top_p"])
    weight = token_advantages.trajectory_weight(dependency, mask, minimum=params["scale_min"])
    advantage = token_advantages.scaled(case["adv"], weight, mask)
    term = token_surrogates.clip_surrogate(
        log_prob,
        case["old_logp"],
        advantage,
        mask,
        low=params["eps_low"],
        high=params["eps_high"],
        dual=params["dual_clip"],
    )
    return {
        "dependency": dependency,
        "token_mask": chosen,
        "traj_score": row_mean(dependency, mask),
        "traj_weight": weight,
    } | with_gradient(aggregate(chosen * term.loss, mask, "token_mean"), log_prob)


def tw_grpo(case: Case) -> Expected:
    mask, log_prob, group = case["mask"], case.log_prob, case.group_of("adv")
    rows = torch.where(mask.bool()[..., None], case["full_logp"], torch.nan)
    # in two pieces: positions are independent
    divergence = torch.cat(
        [token_weights.group_divergence(rows[:, part], mask[:, part], group) for part in (slice(0, 3), slice(3, None))],
        dim=1,
    )
    weights = token_weights.divergence_weights(divergence, mask, group, alpha=case.number("alpha"))
    term = token_surrogates.clip_surrogate(log_prob, case["old_logp"], case["adv"], mask)
    loss = aggregate(weights * term.loss, mask, "token_mean")
    return {"kl_per_position": divergence, "weights": weights} | with_gradient(loss, log_prob)


def reg_grpo(case: Case) -> Expected:
    params, log_prob, mask = case.params, case.log_prob, case["mask"]
    advantage = group_advantages(case["rewards"], case.group, scale="group", eps=params["adv_eps"], ddof=1)
    score = sequence_log_ratio(log_prob, case["old_logp"], mask)
    loss = group_losses.regression_loss(score, advantage, case.group, eps=params["eps_sigma"]).mean()
    if params["beta"]:
        loss = loss + aggregate(kl_term(case, log_prob), mask, "seq_mean")
    return {"adv": advantage} | with_gradient(loss, log_prob)


def real(case: Case) -> Expected:
    log_prob = case.log_prob
    positive = group_advantages(case["rewards"], case.group, scale="none") > 0
    score = mean_log_ratio(log_prob, case["old_logp"], case["mask"])
    loss = group_losses.classification_loss(score, positive, case.group, tau=case.number("tau")).mean()
    return with_gradient(loss, log_prob)


def stable_reinforce(case: Case) -> Expected:
    log_prob, mask, result = case.log_prob, case["mask"], {}
    for name, delta in (("1e3", 1e3), ("3", 3.0)):
        term = token_surrogates.log_clamp_surrogate(log_prob, case["old_logp"], case["adv"], mask, delta=delta)
        result |= with_gradient(aggregate(term.loss, mask, "seq_mean"), log_prob, f"_delta{name}")
    scores = token_advantages.whitened(case["raw_adv"], mask, eps=0.0)
    return result | {"adv_3sigma": token_advantages.sigma_filtered(scores)}


def balanced(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    term = token_surrogates.clip_surrogate(log_prob, case["old_logp"], case["adv"], mask, high=0.28)
    return with_gradient(aggregate(term.loss, mask, "balanced", advantage=case["adv"]), log_prob)


def vldac(case: Case) -> Expected:
    params, log_prob, mask = case.params, case.log_prob, case["mask"]
    credit = token_credit.step_gae(
        case["rewards"],
        case["values"],
        case["done"],
        case["truncated"],
        case["last_value"],
        gamma=case.number("gamma"),
        lam=case.number("lam"),
    )
    advantage = token_advantages.batch_normalised(credit.advantages)
    clip = params["clip"]
    term = token_surrogates.clip_surrogate(
        log_prob, case["old_logp"], advantage, mask, low=clip, high=clip, drop_above=10.0
    )
    kl = kl_k3(masked(log_prob, mask), masked(case["ref_logp"], mask))
    loss = aggregate(term.loss + params["kl_beta"] * kl, mask, "seq_mean")
    value = token_regularisers.clipped_value_loss(case["new_values"], case["values"], credit.returns, clip=clip)
    policy = with_gradient(loss, log_prob)
    return {
        "returns": credit.returns,
        "adv_norm": advantage,
        "policy_loss": policy["loss"],
        "policy_grad": policy["grad"],
        "value_loss": params["value_coef"] * value.mean(),
    }


def poad(case: Case) -> Expected:
    arguments = (case["token_values"], case["n_tokens"], case["rewards"], case["done"])
    gamma, lam = case.number("gamma"), case.number("lam")
    return {
        "adv_bad": token_credit.token_gae(*arguments, gamma=gamma, lam=lam),
        "adv_naive_token": token_credit.token_gae(*arguments, gamma=gamma, lam=lam, gamma_within=gamma),
    }


def bgpo(case: Case) -> Expected:
    elbo = case["elbo_samples"].requires_grad_()
    arguments = (elbo, case["old_elbo_samples"], case["adv"])
    bound = with_gradient(masked_diffusion.linear_bound_loss(*arguments).mean(), elbo)
    exact = with_gradient(masked_diffusion.exact_loss(*arguments).mean(), elbo)
    return bound | {f"exact_{name}": value for name, value in exact.items()}


COVERED: dict[str, tuple[Callable[[Case], Expected], str]] = {
    "advantages": (advantages, "group_advantages, leave_one_out, reinforce_plus_plus(_baseline), normalise_then_sum"),
    "balanced_agg": (balanced, "clip_surrogate, aggregate balanced"),
    "bgpo": (bgpo, "linear_bound_loss, exact_loss"),
    "bnpo": (trl_loss, "clip_surrogate, aggregate token_mean"),
    "cispo": (trl_loss, "cispo_surrogate, aggregate token_mean_global"),
    "dapo": (trl_loss, "clip_surrogate, kl_k3, aggregate token_mean_global"),
    "dcpo_clip": (dcpo_clip, "dynamic_clip_bounds, dynamic_clip_surrogate, aggregate otm"),
    "dcpo_sas": (dcpo_sas, "smoothed_advantages"),
    "dr_grpo": (trl_loss, "clip_surrogate, kl_k3, aggregate const"),
    "g2rpo": (g2rpo, "rank_quantiles, length_reward, entropy_band"),
    "grpo": (trl_loss, "clip_surrogate with cap, kl_k3, aggregate seq_mean"),
    "grpo_care": (grpo_care, "answer_confidence, consistency_bonus, group_advantages"),
    "gspo": (trl_loss, "sequence_clip_surrogate, aggregate seq_mean"),
    "gspo_token": (gspo_token, "sequence_token_clip_surrogate, aggregate seq_mean"),
    "luspo": (trl_loss, "sequence_clip_surrogate, aggregate seq_sum"),
    "mismatch": (mismatch, "mismatch_weights, off_policy_mask, top_entropy"),
    "ngrpo": (ngrpo, "with_virtual_reward"),
    "poad": (poad, "token_gae"),
    "q_hawkeye": (q_hawkeye, "score_uncertainty, score_reward, scaled, perception_loss"),
    "real": (real, "classification_loss, mean_log_ratio"),
    "reg_grpo": (reg_grpo, "regression_loss, sequence_log_ratio"),
    "sapo": (trl_loss, "sapo_surrogate, aggregate seq_mean"),
    "stable_reinforce": (stable_reinforce, "log_clamp_surrogate, whitened, sigma_filtered"),
    "tw_grpo": (tw_grpo, "group_divergence, divergence_weights, aggregate token_mean"),
    "verl_variants": (verl_variants, "clip_surrogate with dual, cispo_surrogate, aggregate seq_sum"),
    "vespo": (trl_loss, "vespo_surrogate, aggregate token_mean_global"),
    "vldac": (vldac, "step_gae, batch_normalised, clip_surrogate with drop_above, clipped_value_loss"),
    "vppo": (vppo, "visual_dependency, top_of_row, trajectory_weight, clip_surrogate with dual"),
}

NOT_A_TARGET = {
    ("stable_reinforce", "adv_released_code"): "what the repository does instead of the published filter",
}


def cases(data: np.lib.npyio.NpzFile) -> Iterator[tuple[str, Case]]:
    names = {}
    for key in data.files:
        if key == "meta":
            continue
        found = re.fullmatch(r"c(\d+)_(.+)", key)
        assert found, f"no case in the name {key}"
        names.setdefault(int(found[1]), {})[found[2]] = data[key]
    for number, arrays in sorted(names.items()):
        yield f"c{number}", Case(arrays)


@pytest.mark.parametrize("name", sorted(COVERED))
def test_golden(golden, name: str) -> None:
    check = COVERED[name][0]
    tolerance = {"rtol": 1e-9, "atol": 1e-10}
    for number, case in cases(golden(f"vlm_{name}")):
        ours = check(case)
        wanted = {field.removeprefix("out_") for field in case.arrays if field.startswith("out_")}
        left = {field for file, field in NOT_A_TARGET if file == name}
        assert ours.keys() == wanted - left, f"{number}: not compared {wanted - left - ours.keys()}"
        for field, value in ours.items():
            want = case[f"out_{field}"]
            assert value.shape == want.shape, (number, field, value.shape)
            loose = {"rtol": 1e-8, "atol": 1e-8} if field.startswith("reinforce_pp") else tolerance
            if want.dtype == torch.bool:
                assert torch.equal(value, want), (number, field)
            else:
                worst = (value.double() - want.double()).abs().max().item()
                assert torch.allclose(value.double(), want.double(), **loose), f"{number} {field}: off by {worst:.3g}"


def test_no_file_is_forgotten(golden) -> None:
    folder = Path(golden("vlm_grpo").fid.name).parent
    assert {path.stem.removeprefix("vlm_") for path in folder.glob("vlm_*.npz")} == COVERED.keys()


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
