"""Preference losses: golden pairwise_dpo_losses and trainers_dpo, and their properties."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import noise
from genrl.objectives.advantages.groups import best_and_worst
from genrl.objectives.forward import forward_process
from genrl.objectives.preferences import preference
from tests.reference.tokens import masked_token_log_prob

NAN = float("nan")


def load(data: np.lib.npyio.NpzFile) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(data[name])) for name in data.files}


class Pairwise:
    """Arrays of golden pairwise_dpo_losses whose names begin with one of the prefixes, and those that were compared."""

    def __init__(self, data: np.lib.npyio.NpzFile, *prefixes: str) -> None:
        self.arrays = {name: value for name, value in load(data).items() if name.startswith(prefixes)}
        self.compared = set[str]()

    def check(self, name: str, value: Tensor, tolerance: float = 1e-9) -> None:
        self.compared.add(name)
        want = self.arrays[name]
        if value.is_floating_point():
            assert torch.allclose(value, want.double(), rtol=tolerance, atol=1e-10), name
        else:
            assert torch.equal(value, want), name

    def only_inputs_are_left(self, pattern: str) -> None:
        assert all(re.fullmatch(pattern, name) for name in self.arrays.keys() - self.compared)


def test_golden_diffusion_dpo(golden) -> None:
    """The first half of the batch is chosen, the second rejected."""
    golden_pairs = Pairwise(golden("pairwise_dpo_losses"), "diffdpo_")
    arrays = golden_pairs.arrays
    prediction = arrays["diffdpo_model_pred"].clone().requires_grad_()
    target = arrays["diffdpo_target"]
    errors = forward_process.matching_error(prediction, target).chunk(2)
    reference = forward_process.matching_error(arrays["diffdpo_ref_pred"], target).chunk(2)
    for name in arrays:
        if found := re.fullmatch(r"diffdpo_(half|full|hinge|ipo)_beta(\d+)_loss", name):
            kind = found[1] if found[1] in ("hinge", "ipo") else "sigmoid"
            out = preference.diffusion_dpo_loss(
                *errors, *reference, beta=float(found[2]), half=found[1] == "half", kind=kind
            )
            golden_pairs.check(name, out.loss.mean())
            if found[1] == "half":
                stem = name.removesuffix("loss")
                golden_pairs.check(
                    f"{stem}grad", torch.autograd.grad(out.loss.mean(), prediction, retain_graph=True)[0], 1e-7
                )
                golden_pairs.check(f"{stem}acc", out.correct.double().mean(), 1e-6)  # a float32 in the peer
    golden_pairs.only_inputs_are_left(r"diffdpo_(target|model_pred|ref_pred)")


def test_golden_d3po_and_spo(golden) -> None:
    """SPO's loss is of the same log-probabilities, with side 0 the winner."""
    golden_pairs = Pairwise(golden("pairwise_dpo_losses"), "d3po_", "spo_")
    arrays = golden_pairs.arrays
    a, b = (arrays[f"d3po_logp{k}"].clone().requires_grad_() for k in (0, 1))
    sides = a, arrays["d3po_ref0"], b, arrays["d3po_ref1"]
    beta, clip = arrays["d3po_beta_eps"].tolist()
    loss = preference.step_preference_loss(*sides, arrays["d3po_pref"], beta=beta, clip=clip).loss.mean()
    golden_pairs.check("d3po_loss", loss)
    for name, gradient in zip(("d3po_grad0", "d3po_grad1"), torch.autograd.grad(loss, (a, b)), strict=True):
        golden_pairs.check(name, gradient)
    (name,) = [name for name in arrays if name.startswith("spo_loss_")]
    beta, clip = re.fullmatch(r"spo_loss_beta(\d+)_eps0(\d+)", name).groups()
    loss = preference.step_preference_loss(*sides, torch.ones(len(a)), beta=float(beta), clip=float(f"0.{clip}")).loss
    loss = loss.mean()
    golden_pairs.check(name, loss)
    for name, gradient in zip(("spo_grad_win", "spo_grad_lose"), torch.autograd.grad(loss, (a, b)), strict=True):
        golden_pairs.check(name, gradient)
    (ranked,) = [name for name in arrays if name.startswith("d3po_rewards")]
    rewards = arrays[ranked]
    group = torch.zeros(len(rewards)).long()
    golden_pairs.check("d3po_pairs", preference.preference_pairs(rewards, group, ties=True))
    golden_pairs.check("d3po_pairs_used", preference.preference_pairs(rewards, group))
    for name in arrays:
        if found := re.fullmatch(r"(spo_k\d+_)scores", name):
            threshold = float(arrays[f"{found[1]}threshold"])
            win, lose, valid = preference.step_winners(arrays[name], threshold=threshold)
            golden_pairs.check(f"{found[1]}valid", valid)
            golden_pairs.check(f"{found[1]}win_lose", torch.stack([win, lose]))
    inputs = r"d3po_(logp\d|ref\d|pref|beta_eps|rewards\d+)|spo_k\d+_(scores|threshold)"
    golden_pairs.only_inputs_are_left(inputs)


def test_golden_dpo_on_masked_image_tokens(golden) -> None:
    """p/r = policy/reference, c/r = chosen/rejected."""
    golden_pairs = Pairwise(golden("pairwise_dpo_losses"), "ar_dpo_")
    arrays = golden_pairs.arrays
    first = int(arrays["ar_dpo_text_len"]) + 1
    totals = {}
    for side in ("pc", "pr", "rc", "rr"):
        labels = arrays["ar_dpo_labels_chosen" if side[1] == "c" else "ar_dpo_labels_rejected"]
        for reduction in ("sum", "mean"):
            value = masked_token_log_prob(arrays[f"ar_dpo_logits_{side}"], labels, first=first, reduction=reduction)
            golden_pairs.check(f"ar_dpo_{reduction}_logp_{side}", value)
            totals[side, reduction] = value
    pairs = [totals[side, "sum"] for side in ("pc", "pr", "rc", "rr")]
    golden_pairs.check("ar_dpo_loss", preference.dpo_loss(*pairs, beta=float(arrays["ar_dpo_beta"])).loss.mean())
    tokens = (arrays["ar_dpo_labels_chosen"][:, first:] != -100).sum()
    golden_pairs.check(
        "ar_dpo_sft_ce", -totals["pc", "sum"].sum() / tokens
    )  # the supervised term: mean over all tokens
    golden_pairs.only_inputs_are_left(r"ar_dpo_(labels_\w+|beta|text_len|logits_..)")


def test_golden_trainers_dpo(golden) -> None:
    arrays = {name: value.double() for name, value in load(golden("trainers_dpo")).items()}
    sides = ("chosen", "rejected")
    velocity = torch.cat([arrays[f"in_v_theta_{side}"] for side in sides]).requires_grad_()
    target = torch.cat([arrays["in_noise"] - arrays[f"in_x0_{side}"] for side in sides])
    errors = forward_process.matching_error(velocity, target).chunk(2)
    frozen = torch.cat([arrays[f"in_v_ref_{side}"] for side in sides])
    reference = forward_process.matching_error(frozen, target).chunk(2)
    compared = set()
    for name in arrays:
        if not (found := re.fullmatch(r"out_flow_grpo_loss_beta(\d+)", name)):
            continue
        out = preference.diffusion_dpo_loss(*errors, *reference, beta=float(found[1]))
        gradient = torch.autograd.grad(out.loss.mean(), velocity, retain_graph=True)[0]
        for peer in ("flow_grpo", "flow_factory"):
            for field, value in (("loss", out.loss.mean()), ("inside", out.logit), ("grad_v", gradient)):
                key = f"out_{peer}_{field}_beta{found[1]}"
                if key in arrays:
                    compared.add(key)
                    assert (value - arrays[key]).abs().max() <= 1e-4 * arrays[key].abs().max(), key
    assert compared == {name for name in arrays if name.startswith("out_")}


ERRORS = st.floats(0.0, 2.0)


@given(ERRORS, ERRORS, ERRORS, ERRORS, st.floats(0.1, 100.0))
def test_diffusion_dpo_lowers_the_winners_error_and_raises_the_losers(
    win: float, lose: float, ref_win: float, ref_lose: float, beta: float
) -> None:
    values = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (win, lose, ref_win, ref_lose)]
    out = preference.diffusion_dpo_loss(*values, beta=beta)
    out.loss.sum().backward()
    difference = (win - lose) - (ref_win - ref_lose)
    assert out.loss.item() == pytest.approx(math.log1p(math.exp(-abs(beta * difference / 2))) + max(
        beta * difference / 2, 0.0
    ), rel=1e-9)  # fmt: skip
    assert values[0].grad is not None and values[1].grad is not None
    assert values[0].grad >= 0 and values[1].grad == -values[0].grad
    assert values[2].grad is None and values[3].grad is None
    assert out.correct.item() == (difference < 0)
    twice = preference.diffusion_dpo_loss(*values, beta=beta / 2, half=False)
    assert twice.loss.item() == pytest.approx(out.loss.item(), rel=1e-9)


def test_where_the_policy_is_the_reference_a_pair_costs_log_two() -> None:
    errors = torch.rand(3), torch.rand(3)
    assert torch.allclose(preference.diffusion_dpo_loss(*errors, *errors, beta=5000.0).loss, torch.tensor(2.0).log())
    log_probs = torch.randn(3), torch.randn(3)
    sides = log_probs[0], log_probs[0], log_probs[1], log_probs[1]
    assert torch.allclose(
        preference.step_preference_loss(*sides, torch.tensor([1, -1, 0]), beta=10.0).loss, torch.tensor(2.0).log()
    )
    whole = preference.dpo_loss(log_probs[0], log_probs[1], log_probs[0], log_probs[1], beta=0.1)
    assert torch.allclose(whole.loss, torch.tensor(2.0).log())


@given(st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.sampled_from([1, -1, 0]), st.floats(0.0, 0.3))
def test_a_clipped_side_and_a_tie_have_no_gradient(a: float, b: float, sign: int, clip: float) -> None:
    sides = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (a, b)]
    zero = torch.zeros(1, dtype=torch.float64)
    out = preference.step_preference_loss(sides[0], zero, sides[1], zero, torch.tensor([sign]), beta=2.0, clip=clip)
    out.loss.sum().backward()
    weight = torch.sigmoid(-out.logit).item() * 2.0 * sign
    for side, value, direction in ((sides[0], a, -1.0), (sides[1], b, 1.0)):
        free = 1 - clip <= math.exp(value) <= 1 + clip
        assert side.grad is not None
        assert side.grad.item() == pytest.approx(direction * weight if free else 0.0, rel=1e-9, abs=1e-15)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, 2.0, NAN])), min_size=1, max_size=8))
def test_pairs_are_all_decided_comparisons_within_groups(rows: list[tuple[int, float]]) -> None:
    group, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows])
    want = [
        [i, j, 1 if rows[i][1] > rows[j][1] else -1]
        for i in range(len(rows))
        for j in range(i + 1, len(rows))
        if rows[i][0] == rows[j][0] and rows[i][1] == rows[i][1] and rows[j][1] == rows[j][1]
    ]
    decided = [pair for pair in want if rows[pair[0]][1] != rows[pair[1]][1]]
    assert preference.preference_pairs(rewards, group).tolist() == decided
    tied = preference.preference_pairs(rewards, group, ties=True)
    assert tied[:, :2].tolist() == [pair[:2] for pair in want]
    best = best_and_worst(rewards, group)  # the one pair per group of online DPO is among them
    for slot in set(group.tolist()):
        pair = [(best == sign).logical_and(group == slot).nonzero().flatten().tolist() for sign in (1.0, -1.0)]
        if pair[0]:
            low, high = sorted((pair[0][0], pair[1][0]))
            assert [low, high, 1 if low == pair[0][0] else -1] in decided


@given(st.integers(0, 99), st.floats(0.0, 0.95))
def test_a_step_counts_where_its_softmax_preference_is_decided(seed: int, threshold: float) -> None:
    scores = noise.keyed_noise((4, 9), seed, "scores").double()
    win, lose, valid = preference.step_winners(scores, threshold=threshold)
    pair = torch.stack([scores.gather(0, win[None])[0], scores.gather(0, lose[None])[0]])
    shares = pair.softmax(dim=0)
    assert torch.equal(pair[0], scores.max(0).values) and torch.equal(pair[1], scores.min(0).values)
    assert torch.equal(valid, shares[0] - shares[1] > threshold)


def test_wrong_settings_are_refused() -> None:
    value = torch.zeros(2)
    with pytest.raises(ValueError, match="beta must be positive"):
        preference.diffusion_dpo_loss(value, value, value, value, beta=0.0)
    with pytest.raises(ValueError, match="'sigmoid', 'hinge' or 'ipo'"):
        preference.diffusion_dpo_loss(value, value, value, value, beta=1.0, kind="l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip in"):
        preference.step_preference_loss(value, value, value, value, value, beta=1.0, clip=1.0)
    with pytest.raises(ValueError, match="beta must be positive"):
        preference.dpo_loss(value, value, value, value, beta=-1.0)
    with pytest.raises(ValueError, match="one length"):
        preference.preference_pairs(value, torch.zeros(3).long())
