"""The golden losses of token policies: every `vlm_*` file but those of advantages (test_advantage_golden).

A case or an expected array that nothing compares is a failure, so that none can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.surrogates.policy_losses import kl_k3
from genrl.objectives.tokens import (
    group_losses,
    token_advantages,
    token_credit,
    token_regularisers,
    token_surrogates,
    token_weights,
)
from genrl.objectives.tokens import group_losses as masked_diffusion
from genrl.objectives.tokens.token_aggregation import aggregate
from genrl.objectives.tokens.tokens import masked, mean_log_ratio, row_mean, sequence_log_ratio
from tests.objectives.tokens.golden_tokens import Case, Expected, compare, kl_term, with_gradient
from tests.reference.tokens import exact_loss


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


def dcpo_clip(case: Case) -> Expected:
    log_prob, mask = case.log_prob, case["mask"]
    widths = {"low": case.number("eps_low"), "high": case.number("eps_high")}
    low, high = token_surrogates.dynamic_clip_bounds(case["old_logp"], **widths)
    term = token_surrogates.dynamic_clip_surrogate(log_prob, case["old_logp"], case["adv"], mask, **widths)
    # the bounds are compared where the mask is 1; elsewhere ours are NaN, as the inputs are
    bounds = {name: torch.where(mask.bool(), v, case[f"out_{name}"]) for name, v in (("low", low), ("high", high))}
    return bounds | with_gradient(aggregate(term.loss, mask, "seq_mean", rows=1), log_prob, "_otm")


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
    for name in [name for name in case.arrays if name.startswith("out_loss_delta")]:
        delta = name.removeprefix("out_loss_delta")
        term = token_surrogates.log_clamp_surrogate(log_prob, case["old_logp"], case["adv"], mask, delta=float(delta))
        result |= with_gradient(aggregate(term.loss, mask, "seq_mean"), log_prob, f"_delta{delta}")
    scores = token_advantages.whitened(case["raw_adv"], mask, eps=0.0, ddof=0)
    return result | {"adv_3sigma": token_advantages.sigma_filtered(scores)}


def bgpo(case: Case) -> Expected:
    elbo = case["elbo_samples"].requires_grad_()
    arguments = (elbo, case["old_elbo_samples"], case["adv"])
    bound = with_gradient(masked_diffusion.linear_bound_loss(*arguments).mean(), elbo)
    exact = with_gradient(exact_loss(*arguments).mean(), elbo)
    return bound | {f"exact_{name}": value for name, value in exact.items()}


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


TRL = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "luspo", "sapo", "vespo")
OTHERS: dict[str, Callable[[Case], Expected]] = {
    "bgpo": bgpo,
    "dcpo_clip": dcpo_clip,
    "gspo_token": gspo_token,
    "mismatch": mismatch,
    "real": real,
    "reg_grpo": reg_grpo,
    "stable_reinforce": stable_reinforce,
    "tw_grpo": tw_grpo,
    "verl_variants": verl_variants,
    "vldac": vldac,
    "vppo": vppo,
}


@pytest.mark.parametrize("name", [*TRL, *OTHERS])
def test_golden(golden, name: str) -> None:
    compare(golden(f"vlm_{name}"), OTHERS.get(name, trl_loss))
