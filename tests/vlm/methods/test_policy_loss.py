"""Presets as losses: golden arrays through the whole composition, and what must not change a loss."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor

from genrl.objectives import token_weights
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
    Reinforce,
    RowClip,
    Sapo,
    SequenceClip,
    SequenceTokenClip,
    Surrogate,
    Vespo,
)
from genrl.vlm.recipe.weights import Divergence, EngineMismatch, OffPolicyMask, TopDependency, TopEntropy
from genrl.vlm.rollout.token_batch import TokenBatch, micro_batches
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
    found = torch.stack([-gradient.sum(1), centred])
    assert float(torch.corrcoef(found)[0, 1]) > 0.3


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


# --- golden arrays through the composition


def golden_cases(data: np.lib.npyio.NpzFile) -> list[dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    for key in data.files:
        if key != "meta":
            number, name = key.split("_", 1)
            cases.setdefault(number, {})[name] = data[key]
    return list(cases.values())


def given_advantage(chosen: Preset) -> Preset:
    return replace(chosen, advantage=CriticAdvantage())


def golden_batch(case: dict[str, np.ndarray], **extra: Tensor) -> TokenBatch:
    def tensor(name: str) -> Tensor | None:
        return torch.from_numpy(case[name]) if name in case else None

    rows = len(case["logp"])
    size = int(case["G"]) if "G" in case else 1
    if "adv" in case:
        extra["credit"] = torch.from_numpy(case["adv"])
    return TokenBatch(
        mask=torch.from_numpy(case["mask"]) if "mask" in case else torch.ones(case["logp"].shape),
        group=torch.arange(rows // size).repeat_interleave(size),
        rewards=tensor("rewards"),
        log_prob=tensor("logp"),
        old_log_prob=tensor("old_logp"),
        sampler_log_prob=tensor("sampler_logp"),
        ref_log_prob=tensor("ref_logp"),
        extra=extra,
    )


def agrees(chosen: Preset, batch: TokenBatch, case: dict[str, np.ndarray], suffix: str = "", **totals: int) -> None:
    loss, gradient = loss_and_gradient(chosen, batch, **totals)
    assert torch.allclose(loss, torch.as_tensor(case[f"out_loss{suffix}"]), rtol=1e-9, atol=1e-10)
    assert torch.allclose(gradient, torch.as_tensor(case[f"out_grad{suffix}"]), rtol=1e-9, atol=1e-10)


TRL = ("grpo", "dr_grpo", "bnpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo")


@pytest.mark.parametrize("name", TRL)
def test_golden_trl_losses(golden, name: str) -> None:
    for case in golden_cases(golden(f"vlm_{name}")):
        params = json.loads(str(case["params"]))
        if "tp" in params:  # constants that a preset has no key for: tests/objectives/tokens
            continue
        beta = params.get("beta", 0.0)
        low, high = params.get("eps_low", 0.2), params.get("eps_high", 0.2)
        surrogate = {
            "cispo": Cispo(high=high),
            "sapo": Sapo(),
            "vespo": Vespo(),
            "gspo": SequenceClip(low=low, high=high),
            "luspo": SequenceClip(low=low, high=high),
        }.get(name, Clip(low=low, high=high, cap=params.get("delta")))
        chosen = replace(
            given_advantage(PRESETS[name]),
            surrogate=surrogate,
            regularisers=(Kl(beta=beta),) if beta else (),
            length=params.get("maxlen"),
        )
        agrees(chosen, golden_batch(case), case, tokens=int(params["num_items"]))


def test_golden_vppo(golden) -> None:
    for case in golden_cases(golden("vlm_vppo")):
        params = json.loads(str(case["params"]))
        if params["scale_min"] != 0.9:
            continue
        chosen = replace(
            given_advantage(PRESETS["vppo"]),
            transforms=(TrajectoryDependency(),),
            weights=(TopDependency(share=params["top_p"]),),
            surrogate=Clip(low=params["eps_low"], high=params["eps_high"], dual=params["dual_clip"]),
            regularisers=(),
        )
        agrees(chosen, golden_batch(case, masked_image=torch.from_numpy(case["masked_image_logp"])), case)


def test_golden_tw_grpo(golden) -> None:
    for case in golden_cases(golden("vlm_tw_grpo")):
        batch = golden_batch(case)
        divergence = token_weights.group_divergence(torch.from_numpy(case["full_logp"]), batch.mask, batch.group)
        batch = replace(batch, extra={**batch.extra, "divergence": divergence[batch.group]})
        if float(case["alpha"]) == 1.7:
            agrees(replace(given_advantage(PRESETS["tw_grpo"]), weights=(Divergence(),)), batch, case)


@pytest.mark.parametrize("name", ["reg_grpo", "real"])
def test_golden_group_losses(golden, name: str) -> None:
    for case in golden_cases(golden(f"vlm_{name}")):
        chosen = PRESETS[name]
        if name == "real":
            if float(case["tau"]) != 0.5:
                continue
        else:
            params = json.loads(str(case["params"]))
            chosen = replace(
                chosen,
                advantage=GroupAdvantage(eps=params["adv_eps"]),
                regularisers=(Kl(beta=params["beta"]),) if params["beta"] else (),
            )
        agrees(chosen, golden_batch(case), case)


def test_golden_others(golden) -> None:
    for case in golden_cases(golden("vlm_gspo_token")):
        params = json.loads(str(case["params"]))
        surrogate = SequenceTokenClip(low=params["lo"], high=params["hi"])
        agrees(replace(given_advantage(PRESETS["gspo_token"]), surrogate=surrogate), golden_batch(case), case)
    for case in golden_cases(golden("vlm_dcpo_clip")):
        surrogate = DynamicClip(low=float(case["eps_low"]), high=float(case["eps_high"]))
        summed = replace(given_advantage(PRESETS["dcpo"]), surrogate=surrogate, aggregation="seq_mean")
        agrees(summed, golden_batch(case), case, "_otm", rows=1)  # the paper's sum of the answers' means
    for case in golden_cases(golden("vlm_stable_reinforce")):
        for name in case:
            if name.startswith("out_loss_delta") and float(delta := name.removeprefix("out_loss_delta")) == 1e3:
                chosen = Preset(CriticAdvantage(level="token"), LogClamp(), "seq_mean")
                agrees(chosen, golden_batch(case), case, f"_delta{delta}")
    for case in golden_cases(golden("vlm_mismatch")):
        for level in ("token", "sequence"):
            for mode in ("truncate", "mask"):
                weight = EngineMismatch(level=level, mode=mode, low=0.5, high=2.0)
                chosen = Preset(CriticAdvantage(), Clip(low=0.2, high=0.28), "token_mean", weights=(weight,))
                agrees(chosen, golden_batch(case), case, f"_{level}_{mode}")
        entropy = torch.from_numpy(case["entropy"])
        forking = Preset(CriticAdvantage(), Clip(), "token_mean", weights=(TopEntropy(share=0.2),))
        agrees(forking, golden_batch(case, entropy=entropy), case, "_top20")
        mask = OffPolicyMask(high=float(case["opsm_threshold"]))
        agrees(Preset(CriticAdvantage(), Clip(), "token_mean", weights=(mask,)), golden_batch(case), case, "_opsm")


def test_golden_bgpo(golden) -> None:
    for case in golden_cases(golden("vlm_bgpo")):
        renamed = case | {"logp": case["elbo_samples"], "old_logp": case["old_elbo_samples"]}
        agrees(given_advantage(PRESETS["bgpo"]), golden_batch(renamed), renamed)


def test_golden_vl_dac(golden) -> None:
    for case in golden_cases(golden("vlm_vldac")):
        raw = torch.from_numpy(case["out_returns"] - case["values"])
        rest = {k: v for k, v in case.items() if k != "rewards"}
        batch = golden_batch(
            rest,
            credit=raw,
            value=torch.from_numpy(case["new_values"]),
            old_value=torch.from_numpy(case["values"]),
            returns=torch.from_numpy(case["out_returns"]),
        )
        params = json.loads(str(case["params"]))
        clip = params["clip"]
        chosen = replace(
            PRESETS["vl_dac"],
            surrogate=RowClip(low=clip, high=clip),
            regularisers=(Kl(beta=params["kl_beta"]), ValueLoss(coefficient=params["value_coef"], clip=clip)),
        )
        ready = estimate(chosen, batch).batch
        assert torch.allclose(ready.advantage, torch.from_numpy(case["out_adv_norm"]), rtol=1e-9, atol=1e-10)
        output = policy_loss(chosen, ready)
        policy = output.metrics["loss/policy"] + output.metrics["loss/kl"]
        assert torch.allclose(policy, torch.as_tensor(case["out_policy_loss"]), rtol=1e-9)
        assert torch.allclose(output.metrics["loss/value"], torch.as_tensor(case["out_value_loss"]), rtol=1e-9)


def test_golden_perception(golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in golden_cases(golden("vlm_q_hawkeye")):
        if "logp" in case:
            rows = len(case["logp"])
            batch = golden_batch(
                case | {"old_logp": case["logp"], "adv": np.zeros(rows)},
                degraded=torch.from_numpy(case["degraded_logp"]),
            )
            perception = Perception(coefficient=float(case["gamma"]))
            monkeypatch.setattr(Perception, "eta", float(case["eta1"]))
            chosen = replace(given_advantage(PRESETS["q_hawkeye"]), transforms=(), regularisers=(perception,))
            agrees(chosen, batch, case | {"out_loss": case["out_perception_loss"]})


# --- equivalences


def on_policy(batch: TokenBatch) -> TokenBatch:
    return replace(batch, old_log_prob=None)


@pytest.mark.parametrize("surrogate", [Clip(), Sapo(), Cispo(), LogClamp(), Vespo()])
def test_on_policy_they_are_all_reinforce(surrogate: Surrogate) -> None:
    batch = on_policy(rollout())
    for rule in ("seq_mean", "token_mean_global"):
        chosen = Preset(GroupAdvantage(), surrogate, rule)
        _, gradient = loss_and_gradient(chosen, batch)
        _, wanted = loss_and_gradient(replace(chosen, surrogate=Reinforce()), batch)
        assert torch.allclose(gradient, wanted, rtol=1e-12)


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


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("vppo", "masked_image"),
        ("forking_tokens", "entropy"),
        ("q_hawkeye", "scores"),
        ("grpo_care", "ema"),
        ("vl_dac", "value"),
        ("vl_dac", "credit"),
    ],
)
def test_a_missing_tensor_is_named_with_its_reader(name: str, missing: str) -> None:
    batch = for_preset(name, rollout())
    batch = replace(batch, extra={key: value for key, value in batch.extra.items() if key != missing})
    with pytest.raises(ValueError, match=rf"reads extra\['{missing}'\]"):
        policy_loss(PRESETS[name], estimate(PRESETS[name], batch).batch)


def test_errors_before_a_wrong_loss() -> None:
    batch = rollout()
    with pytest.raises(ValueError, match="before estimate"):
        policy_loss(PRESETS["grpo"], batch)
    with pytest.raises(ValueError, match="reads ref_log_prob"):
        policy_loss(PRESETS["grpo"], estimate(PRESETS["grpo"], replace(batch, ref_log_prob=None)).batch)
    with pytest.raises(ValueError, match="reads rewards"):
        estimate(PRESETS["dapo"], replace(batch, rewards=None))
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


def test_choices_of_equal_constants_are_told_apart_by_their_names() -> None:
    data = {"advantage": {"name": "leave_one_out"}, "surrogate": {"name": "sequence_token_clip", "low": 0.2}}
    preset = TypeAdapter(Preset).validate_python(data)
    assert preset.advantage.name == "leave_one_out" and preset.surrogate.name == "sequence_token_clip"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a surrogate or a group_loss"),
        ({"surrogate": Clip(), "group_loss": Regression()}, "a surrogate or a group_loss"),
        ({"group_loss": Regression(), "weights": (TopEntropy(),)}, "do not apply"),
        ({"advantage": WhitenedReturns(), "surrogate": SequenceClip()}, "sequence_token_clip"),
        (
            {"advantage": WhitenedReturns(), "surrogate": Clip(), "weights": (OffPolicyMask(high=0.1),)},
            "off-policy mask",
        ),
        ({"surrogate": Clip(), "aggregation": "const", "length": 0}, "at least 1"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preset(**({"advantage": GroupAdvantage()} | fields))
