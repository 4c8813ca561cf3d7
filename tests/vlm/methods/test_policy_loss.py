"""Presets as losses: golden arrays through the whole composition, and what must not change a loss."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor

from genrl.objectives import token_weights
from genrl.objectives.token_credit import step_gae
from genrl.vlm.methods.policy_loss import estimate, policy_loss
from genrl.vlm.recipe.advantages import CriticAdvantage, GroupAdvantage, WhitenedReturns
from genrl.vlm.recipe.losses import EntropyBand, Kl, Perception, Regression, ValueLoss
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.shaping import TrajectoryDependency
from genrl.vlm.recipe.surrogates import (
    Cispo,
    Clip,
    DynamicClip,
    LogClamp,
    RowClip,
    Sapo,
    SequenceClip,
    SequenceTokenClip,
    Vespo,
)
from genrl.vlm.recipe.weights import Divergence, EngineMismatch, OffPolicyMask, TopDependency, TopEntropy
from genrl.vlm.rollout.token_batch import TokenBatch, micro_batches
from tests.objectives.tokens.golden_tokens import Case, cases
from tests.vlm.rollouts import PROMPTS, for_preset, preset, rollout

INVARIANT = ("seq_mean", "token_mean_global", "const", "seq_sum")


def loss_and_gradient(
    chosen: Preset, batch: TokenBatch, size: int | None = None, **totals: int
) -> tuple[Tensor, Tensor]:
    """Of the whole step, as the sum over micro-batches of `size` rows. totals: others than those of the batch."""
    ready = replace(estimate(chosen, batch, prompts=PROMPTS).batch, **totals)
    leaf = batch.log_prob.clone().requires_grad_()
    ready = ready.with_log_prob(leaf)
    whole = chosen.group_loss is not None
    parts = [ready] if size is None else micro_batches(ready, size, whole_groups=whole)
    loss = torch.stack([policy_loss(chosen, part).loss for part in parts]).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def one(name: str, **changes) -> tuple[Tensor, Tensor]:
    masked = name != "bgpo"  # its columns are samples of the ELBO, all of which count
    return loss_and_gradient(preset(name), for_preset(name, rollout(masked=masked, **changes)))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_moves_valid_tokens_only_and_padding_changes_nothing(name: str) -> None:
    loss, gradient = one(name)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all()) and bool((gradient != 0).any())
    if name == "bgpo":  # no column of it is masked
        return
    assert bool((gradient[~rollout().mask] == 0).all())
    # q_hawkeye reads NaN among the valid tokens of `degraded` as "no twin"; masked NaN are not valid tokens
    for changes in ({"junk": 123.0}, {"junk": float("nan")}, {"junk": -7.0, "pad": 3}):
        if name == "tw_grpo" and changes.get("pad"):
            continue  # the published rule: a position where a group has no token left counts as agreement
        other, other_gradient = one(name, **changes)
        assert torch.allclose(loss, other, rtol=1e-12, atol=1e-14), changes
        assert torch.allclose(gradient, other_gradient[:, : gradient.shape[1]], rtol=1e-12, atol=1e-14), changes


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_raises_what_is_better_than_its_group(name: str) -> None:
    """On policy, where all that a preset compares is the reward: the signs agree."""
    batch = for_preset(name, rollout(masked=name != "bgpo"))
    means = batch.rewards.view(3, 4).mean(1).repeat_interleave(4)
    centred, everywhere = batch.rewards - means, batch.rewards[:, None].expand(batch.mask.shape)
    extra = dict.fromkeys(("accuracy", "high", "low"), batch.rewards) | {"greedy": means, "turn_reward": everywhere}
    extra |= {"components": everywhere[:, :2], "matched": torch.ones_like(batch.mask)}
    by_token = batch.extra["credit"].ndim == 2
    extra["credit"] = centred[:, None].expand(batch.mask.shape) if by_token else centred
    old = batch.old_log_prob
    batch = replace(batch, log_prob=old, ref_log_prob=old, sampler_log_prob=old, extra={**batch.extra, **extra})
    _, gradient = loss_and_gradient(replace(preset(name), regularisers=()), batch)
    result = torch.stack([-gradient.sum(1), centred])
    assert float(torch.corrcoef(result)[0, 1]) > 0.3


@pytest.mark.parametrize("name", sorted(name for name in PRESETS if PRESETS[name].aggregation in INVARIANT))
def test_micro_batches_add_up_to_the_step(name: str) -> None:
    chosen, batch = preset(name), for_preset(name, rollout(masked=name != "bgpo"))
    # the entropy band and Q-Hawkeye's K are of the tokens of a call
    local = (EntropyBand, Perception)
    chosen = replace(chosen, regularisers=tuple(r for r in chosen.regularisers if not isinstance(r, local)))
    loss, gradient = loss_and_gradient(chosen, batch)
    for size in (4, 6):
        other, other_gradient = loss_and_gradient(chosen, batch, size)
        assert torch.allclose(loss, other, rtol=1e-10), size
        assert torch.allclose(gradient, other_gradient, rtol=1e-10, atol=1e-14), size


# --- golden arrays through the composition: every `vlm_*` file of a loss that a preset has
Way = tuple[Preset, TokenBatch, str, dict[str, int]]
"""A preset for a case and its batch, with the end of the names of the wanted arrays and totals of the step."""


def given_advantage(name: str, **changes: Any) -> Preset:
    return replace(PRESETS[name], advantage=CriticAdvantage(), **changes)


def golden_batch(case: Case, **extra: Tensor) -> TokenBatch:
    rows, size = len(case["logp"]), int(case.number("G")) if "G" in case else 1
    if "adv" in case:
        extra["credit"] = case["adv"]
    names = {"rewards": "rewards", "log_prob": "logp", "old_log_prob": "old_logp", "ref_log_prob": "ref_logp"}
    return TokenBatch(
        mask=case["mask"] if "mask" in case else torch.ones(case["logp"].shape),
        group=torch.arange(rows // size).repeat_interleave(size),
        **{field: case[name] for field, name in (names | {"sampler_log_prob": "sampler_logp"}).items() if name in case},
        extra=extra,
    )


def trl(name: str, case: Case) -> Iterator[Way]:
    params = case.params
    if "tp" in params:  # constants that a preset has no key for
        return
    beta, low, high = params.get("beta", 0.0), params.get("eps_low", 0.2), params.get("eps_high", 0.2)
    surrogate = {
        "cispo": Cispo(high=high),
        "sapo": Sapo(),
        "vespo": Vespo(),
        "gspo": SequenceClip(low=low, high=high),
        "luspo": SequenceClip(low=low, high=high),
    }.get(name, Clip(low=low, high=high, cap=params.get("delta")))
    regularisers = (Kl(beta=beta),) if beta else ()
    chosen = given_advantage(name, surrogate=surrogate, regularisers=regularisers, length=params.get("maxlen"))
    yield chosen, golden_batch(case), "", {"tokens": int(params["num_items"])}


def vppo(name: str, case: Case) -> Iterator[Way]:
    params = case.params
    if params["scale_min"] == 0.9:
        clip = Clip(low=params["eps_low"], high=params["eps_high"], dual=params["dual_clip"])
        rules = {"transforms": (TrajectoryDependency(),), "weights": (TopDependency(share=params["top_p"]),)}
        chosen = given_advantage(name, surrogate=clip, regularisers=(), **rules)
        yield chosen, golden_batch(case, masked_image=case["masked_image_logp"]), "", {}


def tw_grpo(name: str, case: Case) -> Iterator[Way]:
    batch = golden_batch(case)
    divergence = token_weights.group_divergence(case["full_logp"], batch.mask, batch.group)
    batch = replace(batch, extra={**batch.extra, "divergence": divergence[batch.group]})
    if case.number("alpha") == 1.7:
        yield given_advantage(name, weights=(Divergence(),)), batch, "", {}


def group_loss(name: str, case: Case) -> Iterator[Way]:
    chosen, params = PRESETS[name], case.params
    if name == "reg_grpo":
        regularisers = (Kl(beta=params["beta"]),) if params["beta"] else ()
        chosen = replace(chosen, advantage=GroupAdvantage(eps=params["adv_eps"]), regularisers=regularisers)
    if name == "reg_grpo" or case.number("tau") == 0.5:
        yield chosen, golden_batch(case), "", {}


def gspo_token(name: str, case: Case) -> Iterator[Way]:
    surrogate = SequenceTokenClip(low=case.params["lo"], high=case.params["hi"])
    yield given_advantage(name, surrogate=surrogate), golden_batch(case), "", {}


def dcpo_clip(name: str, case: Case) -> Iterator[Way]:
    """The paper's sum of the answers' means."""
    surrogate = DynamicClip(low=case.number("eps_low"), high=case.number("eps_high"))
    yield given_advantage("dcpo", surrogate=surrogate, aggregation="seq_mean"), golden_batch(case), "_otm", {"rows": 1}


def stable_reinforce(name: str, case: Case) -> Iterator[Way]:
    chosen = Preset(CriticAdvantage(level="token"), LogClamp(), "seq_mean")
    for wanted in case.arrays:
        if wanted.startswith("out_loss_delta") and float(delta := wanted.removeprefix("out_loss_delta")) == 1e3:
            yield chosen, golden_batch(case), f"_delta{delta}", {}


def mismatch(name: str, case: Case) -> Iterator[Way]:
    batch = golden_batch(case, entropy=case["entropy"])
    for level, mode in product(("token", "sequence"), ("truncate", "mask")):
        weight = EngineMismatch(level=level, mode=mode, low=0.5, high=2.0)
        chosen = Preset(CriticAdvantage(), Clip(low=0.2, high=0.28), "token_mean", weights=(weight,))
        yield chosen, batch, f"_{level}_{mode}", {}
    off_policy = OffPolicyMask(high=case.number("opsm_threshold"))
    for weight, suffix in ((TopEntropy(share=0.2), "_top20"), (off_policy, "_opsm")):
        yield Preset(CriticAdvantage(), Clip(), "token_mean", weights=(weight,)), batch, suffix, {}


def bgpo(name: str, case: Case) -> Iterator[Way]:
    elbo = {"logp": case.arrays["elbo_samples"], "old_logp": case.arrays["old_elbo_samples"]}
    yield given_advantage(name), golden_batch(Case(case.arrays | elbo)), "", {}


def q_hawkeye(name: str, case: Case) -> Iterator[Way]:
    """The perception loss alone."""
    if "logp" in case:
        nothing = {"old_logp": case.arrays["logp"], "adv": np.zeros(len(case["logp"]))}
        batch = golden_batch(Case(case.arrays | nothing), degraded=case["degraded_logp"])
        perception = Perception(coefficient=case.number("gamma"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Perception, "eta", case.number("eta1"))
            yield given_advantage(name, transforms=(), regularisers=(perception,)), batch, "", {}


GOLDEN: dict[str, Callable[[str, Case], Iterator[Way]]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "bnpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo"), trl),
    **dict.fromkeys(("reg_grpo", "real"), group_loss),
    **{"vppo": vppo, "tw_grpo": tw_grpo, "gspo_token": gspo_token, "dcpo_clip": dcpo_clip, "mismatch": mismatch},
    **{"stable_reinforce": stable_reinforce, "bgpo": bgpo, "q_hawkeye": q_hawkeye},
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(golden, name: str) -> None:
    compared = 0
    for _, case in cases(golden(f"vlm_{name}")):
        for chosen, batch, suffix, totals in GOLDEN[name](name, case):
            loss, gradient = loss_and_gradient(chosen, batch, **totals)
            wanted = case["out_perception_loss" if name == "q_hawkeye" else f"out_loss{suffix}"]
            assert torch.allclose(loss, wanted, rtol=1e-9, atol=1e-10), suffix
            assert torch.allclose(gradient, case[f"out_grad{suffix}"], rtol=1e-9, atol=1e-10), suffix
            compared += 1
    assert compared


def test_golden_vl_dac(golden) -> None:
    for _, case in cases(golden("vlm_vldac")):
        params, clip = case.params, case.params["clip"]
        walked = [case[name] for name in ("rewards", "values", "done", "truncated", "last_value")]
        credit = step_gae(*walked, gamma=case.number("gamma"), lam=case.number("lam"))
        extra = {"credit": credit.advantages, "returns": credit.returns}
        rest = Case({name: value for name, value in case.arrays.items() if name != "rewards"})
        batch = golden_batch(rest, value=case["new_values"], old_value=case["values"], **extra)
        chosen = replace(
            PRESETS["vl_dac"],
            surrogate=RowClip(low=clip, high=clip),
            regularisers=(Kl(beta=params["kl_beta"]), ValueLoss(coefficient=params["value_coef"], clip=clip)),
        )
        log_prob = batch.log_prob.requires_grad_()
        ready = estimate(chosen, batch).batch
        output = policy_loss(chosen, ready.with_log_prob(log_prob))
        actual = {"policy_loss": output.metrics["loss/policy"] + output.metrics["loss/kl"]}
        actual |= {"value_loss": output.metrics["loss/value"], "adv_norm": ready.advantage, "returns": credit.returns}
        actual["policy_grad"] = torch.autograd.grad(output.loss, log_prob)[0]
        for name, value in actual.items():
            assert torch.allclose(value, case[f"out_{name}"], rtol=1e-9, atol=1e-10), name


def test_the_kl_is_not_weighted_unless_asked() -> None:
    batch = replace(rollout(), rewards=torch.ones(12).double())  # no advantage: only the KL is left
    chosen = replace(PRESETS["tw_grpo"], regularisers=(Kl(beta=1.0),))
    plain, _ = loss_and_gradient(chosen, batch)
    without, _ = loss_and_gradient(replace(chosen, weights=()), batch)
    weighted, _ = loss_and_gradient(replace(chosen, regularisers=(Kl(beta=1.0, weighted=True),)), batch)
    assert torch.equal(plain, without) and bool(weighted > plain)


# --- metrics and errors
def test_the_parts_add_up_and_the_ratio_is_measured() -> None:
    chosen = replace(PRESETS["q_hawkeye"], surrogate=Clip(low=0.05, high=0.05))
    batch = rollout()
    output = policy_loss(chosen, estimate(chosen, batch).batch)
    parts = [value for name, value in output.metrics.items() if name.startswith("loss/")]
    assert torch.allclose(torch.stack(parts).sum(), output.loss) and len(parts) == 3
    assert 0 < float(output.metrics["clipped"]) < 1 and float(output.metrics["kl_k3"]) > 0
    ratio = torch.exp(batch.log_prob - batch.old_log_prob)[batch.mask]
    assert torch.allclose(output.metrics["ratio_mean"], ratio.mean())
    assert torch.allclose(output.metrics["ratio_max"], ratio.max())
    assert torch.allclose(output.metrics["entropy"], -batch.log_prob[batch.mask].mean())
    assert not any(value.requires_grad for value in output.metrics.values())


def test_errors_before_a_wrong_loss() -> None:
    for name, missing in (
        *(("vppo", "masked_image"), ("forking_tokens", "entropy"), ("q_hawkeye", "scores"), ("vl_dac", "credit")),
    ):
        batch = for_preset(name, rollout())
        batch = replace(batch, extra={key: value for key, value in batch.extra.items() if key != missing})
        with pytest.raises(ValueError, match=rf"reads extra\['{missing}'\]"):
            policy_loss(PRESETS[name], estimate(PRESETS[name], batch).batch)
    batch = rollout()
    with pytest.raises(ValueError, match="before estimate"):
        policy_loss(PRESETS["grpo"], batch)
    with pytest.raises(ValueError, match="reads ref_log_prob"):
        policy_loss(PRESETS["grpo"], estimate(PRESETS["grpo"], replace(batch, ref_log_prob=None)).batch)
    with pytest.raises(ValueError, match="prompts="):
        estimate(PRESETS["dcpo"], batch)
    with pytest.raises(ValueError, match="longest allowed completion"):
        policy_loss(PRESETS["dr_grpo"], estimate(PRESETS["dr_grpo"], batch).batch)
    with pytest.raises(ValueError, match=r"\{'old_log_prob': \[12, 6\]\}"):
        replace(batch, old_log_prob=batch.old_log_prob[:, 1:])
    ready = estimate(PRESETS["reg_grpo"], batch).batch
    with pytest.raises(ValueError, match=r"parts of groups \[0, 1\]"):
        policy_loss(PRESETS["reg_grpo"], ready.select(torch.tensor([0, 1, 2, 5])))
    with pytest.raises(ValueError, match="raise the micro-batch to 4"):
        micro_batches(ready, 3, whole_groups=True)
    with pytest.raises(ValueError, match="mask must be 1 everywhere"):
        policy_loss(PRESETS["bgpo"], estimate(PRESETS["bgpo"], batch).batch)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_plain_data_that_yaml_can_hold(name: str) -> None:
    preset = PRESETS[name]
    assert preset.source
    written = yaml.safe_dump(TypeAdapter(Preset).dump_python(preset, mode="json"))
    assert TypeAdapter(Preset).validate_python(yaml.safe_load(written)) == preset


def test_combinations_that_mean_nothing_are_refused() -> None:
    for fields, message in (
        ({"surrogate": Clip(), "group_loss": Regression()}, "a surrogate or a group_loss"),
        ({"group_loss": Regression(), "weights": (TopEntropy(),)}, "do not apply"),
        ({"advantage": WhitenedReturns(), "surrogate": SequenceClip()}, "sequence_token_clip"),
        ({"surrogate": Clip(), "aggregation": "const", "length": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Preset(**({"advantage": GroupAdvantage()} | fields))
