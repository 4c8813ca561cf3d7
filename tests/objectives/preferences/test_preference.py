"""Preference losses: golden pairwise_dpo_losses and trainers_dpo, and their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.objectives import matching, preferences
from genrl.objectives.groups import best_and_worst
from tests.golden_cases import Arrays
from tests.reference.tokens import masked_token_log_prob

NAN = float("nan")


def test_golden_diffusion_dpo(golden) -> None:
    """The first half of the batch is chosen, the second rejected."""
    a = Arrays(golden("pairwise_dpo_losses"))
    prediction, target = a.given("diffdpo_model_pred").requires_grad_(), a.given("diffdpo_target")
    errors = matching.matching_error(prediction, target).chunk(2)
    reference = matching.matching_error(a.given("diffdpo_ref_pred"), target).chunk(2)
    gains, one = [old - new for new, old in zip(errors, reference, strict=True)], torch.ones(len(errors[0]))
    for found in a.matches(r"(diffdpo_(half|full|hinge|ipo)_beta([\d.]+)_)loss"):
        kind = found[2] if found[2] in ("hinge", "ipo") else "sigmoid"
        beta = float(found[3]) / (2 if found[2] == "half" else 1)
        out = preferences.pair_loss(kind, *gains, one, one, beta=beta)
        loss = out.loss.mean()
        a.check(found[0], loss)
        if found[2] == "half":
            a.check(f"{found[1]}grad", torch.autograd.grad(loss, prediction, retain_graph=True)[0], 1e-7)
            a.check(f"{found[1]}acc", out.correct.double().mean(), 1e-6)  # a float32 in the peer
    a.all_used("diffdpo_.*")


def test_golden_d3po_and_spo(golden) -> None:
    """SPO's loss is of the same log-probabilities, with side 0 the winner."""
    a = Arrays(golden("pairwise_dpo_losses"))
    moving = [a.given(f"d3po_logp{k}").requires_grad_() for k in (0, 1)]
    sides = moving[0], a.given("d3po_ref0"), moving[1], a.given("d3po_ref1")

    def compare(name: str, preferred: Tensor, gradients: tuple[str, str], beta: float, clip: float) -> None:
        loss = preferences.step_preference_loss(*sides, preferred, beta=beta, clip=clip).loss.mean()
        a.check(name, loss)
        for which, gradient in zip(gradients, torch.autograd.grad(loss, moving), strict=True):
            a.check(which, gradient)

    compare("d3po_loss", a.given("d3po_pref"), ("d3po_grad0", "d3po_grad1"), *a.given("d3po_beta_eps").tolist())
    (found,) = a.matches(r"spo_loss_beta(\d+)_eps0(\d+)")
    first = torch.ones(len(moving[0]))
    compare(found[0], first, ("spo_grad_win", "spo_grad_lose"), float(found[1]), float(f"0.{found[2]}"))
    (ranked,) = a.tags(r"(d3po_rewards\d*)")
    rewards = a.given(ranked)
    group = torch.zeros(len(rewards)).long()
    a.check("d3po_pairs", preferences.preference_pairs(rewards, group, ties=True))
    a.check("d3po_pairs_used", preferences.preference_pairs(rewards, group))
    for tag in a.tags(r"(spo_k\d+_)scores"):
        threshold = a.number(f"{tag}threshold")
        win, lose, valid = preferences.step_winners(a.given(f"{tag}scores"), threshold=threshold)
        a.check(f"{tag}valid", valid)
        a.check(f"{tag}win_lose", torch.stack([win, lose]))
    a.all_used("(d3po|spo)_.*")


def test_golden_dpo_on_masked_image_tokens(golden) -> None:
    """p/r = policy/reference, c/r = chosen/rejected."""
    a = Arrays(golden("pairwise_dpo_losses"))
    first = int(a.given("ar_dpo_text_len")) + 1
    labels = {"c": a.given("ar_dpo_labels_chosen"), "r": a.given("ar_dpo_labels_rejected")}
    totals = {}
    for side in ("pc", "pr", "rc", "rr"):
        for reduction in ("mean", "sum"):
            logits = a.given(f"ar_dpo_logits_{side}")
            totals[side] = masked_token_log_prob(logits, labels[side[1]], first=first, reduction=reduction)
            a.check(f"ar_dpo_{reduction}_logp_{side}", totals[side])
    gains = totals["pc"] - totals["rc"], totals["pr"] - totals["rr"]
    a.check("ar_dpo_loss", preferences.pair_loss("sigmoid", *gains, beta=a.number("ar_dpo_beta")).loss.mean())
    # the supervised term: mean over all tokens
    a.check("ar_dpo_sft_ce", -totals["pc"].sum() / (labels["c"][:, first:] != -100).sum())
    a.all_used("ar_dpo_.*")


def test_golden_trainers_dpo(golden) -> None:
    a = Arrays(golden("trainers_dpo"), double=True)

    def both(kind: str) -> Tensor:
        return torch.cat([a.given(f"in_{kind}_{side}") for side in ("chosen", "rejected")])

    velocity, source = both("v_theta").requires_grad_(), a.given("in_noise")
    target = torch.cat([source, source]) - both("x0")
    errors = matching.matching_error(velocity, target).chunk(2)
    reference = matching.matching_error(both("v_ref"), target).chunk(2)
    for found in a.matches(r"out_flow_grpo_loss_beta([\d.]+)"):
        gains = [old - new for new, old in zip(errors, reference, strict=True)]
        out = preferences.pair_loss("sigmoid", *gains, beta=float(found[1]) / 2)
        gradient = torch.autograd.grad(out.loss.mean(), velocity, retain_graph=True)[0]
        for field, value in (("loss", out.loss.mean()), ("inside", out.logit), ("grad_v", gradient)):
            for name in a.tags(rf"(out_\w+_{field}_beta{found[1]})"):
                a.check(name, value, 0.0, 1e-4 * float(a.given(name).abs().max()))
    a.all_used("out_.*")


@given(st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.sampled_from([1, -1, 0]), st.floats(0.0, 0.3))
def test_a_clipped_side_and_a_tie_have_no_gradient(a: float, b: float, sign: int, clip: float) -> None:
    sides = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (a, b)]
    zero = torch.zeros(1, dtype=torch.float64)
    out = preferences.step_preference_loss(sides[0], zero, sides[1], zero, torch.tensor([sign]), beta=2.0, clip=clip)
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
    assert preferences.preference_pairs(rewards, group).tolist() == decided
    tied = preferences.preference_pairs(rewards, group, ties=True)
    assert tied[:, :2].tolist() == [pair[:2] for pair in want]
    best = best_and_worst(rewards, group)  # the one pair per group of online DPO is among them
    for slot in set(group.tolist()):
        pair = [(best == sign).logical_and(group == slot).nonzero().flatten().tolist() for sign in (1.0, -1.0)]
        if pair[0]:
            low, high = sorted((pair[0][0], pair[1][0]))
            assert [low, high, 1 if low == pair[0][0] else -1] in decided


def test_wrong_settings_are_refused() -> None:
    value = torch.zeros(2)
    with pytest.raises(ValueError, match="beta must be positive"):
        preferences.pair_loss("hinge", value, value, beta=0.0)
    with pytest.raises(ValueError, match="one of sigmoid, robust, ipo"):
        preferences.pair_loss("l2", value, value, beta=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip in"):
        preferences.step_preference_loss(value, value, value, value, value, beta=1.0, clip=1.0)
    with pytest.raises(ValueError, match="beta must be positive"):
        preferences.pair_loss("sigmoid", value, value, beta=-1.0)
    with pytest.raises(ValueError, match="give their numbers"):
        preferences.pair_loss("ipo", value, value, beta=1.0)
    with pytest.raises(ValueError, match="beta must be positive"):
        preferences.marked_loss(value, value > 0, 0.0, beta=0.0)
    with pytest.raises(ValueError, match="one length"):
        preferences.preference_pairs(value, torch.zeros(3).long())


PAIRS = ("sigmoid", "robust", "ipo", "hinge", "sigmoid_norm", "nca_pair", "apo_zero", "apo_down", "sppo_hard")


def test_golden_pairs_and_marks_of_answers(golden) -> None:
    """TRL's losses and their gradients in log-probabilities of tokens; the first half of the rows are preferred."""
    a = Arrays(golden("preference"))
    log_prob, mask, beta = a.given("logp").requires_grad_(), a.given("mask"), a.number("beta")
    pairs, tokens = len(mask) // 2, mask.sum(1)
    h = ((log_prob - a.given("ref_logp")) * mask).sum(1)
    for kind in PAIRS:
        smoothing = a.number("label_smoothing") if kind == "robust" else 0.0
        sides = (h[:pairs], h[pairs:], tokens[:pairs], tokens[pairs:])
        found = preferences.pair_loss(kind, *sides, beta=beta, smoothing=smoothing).loss
        a.check(f"dpo_{kind}", found.detach(), rtol=1e-8)
        a.check(f"dpo_{kind}_grad", torch.autograd.grad(found.mean(), log_prob, retain_graph=True)[0], rtol=1e-8)
    good, heavier = a.given("kto_label"), a.number("kto_undesirable_weight")
    for name in ("positive", "zero"):
        others = a.given("kto_kl_logp") + a.number(f"kto_{name}_kl_shift") - a.given("kto_kl_ref_logp")
        z = (others * mask).sum(1).mean().clamp(min=0)
        a.check(f"kto_{name}_kl_z", z)
        found = preferences.marked_loss(h, good, z, beta=beta).loss
        a.check(f"kto_{name}_kl_loss", found.detach(), rtol=1e-8)
        mean = (found * torch.where(good, torch.ones_like(found), heavier)).mean()
        a.check(f"kto_{name}_kl_weighted_mean", mean.detach(), rtol=1e-8)
        a.check(f"kto_{name}_kl_grad", torch.autograd.grad(mean, log_prob, retain_graph=True)[0], rtol=1e-8)
    a.all_used(but="dpo_(exo_pair|bco_pair|aot|aot_unpaired|discopop).*")  # which are not built


def test_a_model_that_has_not_moved_is_undecided() -> None:
    """log 2 of the sigmoids, half of the sums of two sides, and KTO 1/2; ORPO in closed form from two odds."""
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    want = {"sigmoid": math.log(2), "robust": math.log(2), "sigmoid_norm": math.log(2), "hinge": 1.0, "ipo": 25.0,
            "nca_pair": 2 * math.log(2), "apo_zero": 1.0, "apo_down": 1.0, "sppo_hard": 50.0}  # fmt: skip
    assert set(want) == set(PAIRS)
    for kind, value in want.items():
        found = preferences.pair_loss(kind, zero, zero, one, one, beta=0.1)
        torch.testing.assert_close(found.loss, value * one)
        assert not found.correct.any()
    torch.testing.assert_close(preferences.marked_loss(zero, zero > 0, 0.0, beta=0.1).loss, 0.5 * one)
    shares = torch.tensor([0.8, 0.5], dtype=torch.float64)  # odds 4 and 1
    win, lose = 3 * shares.log()
    found = preferences.pair_loss("orpo", win[None], lose[None], 3 * one[:1], 3 * one[:1], beta=0.1)
    torch.testing.assert_close(found.loss, -0.1 * torch.tensor([4 / 5], dtype=torch.float64).log())


def test_smoothed_labels_lie_between_both_orders_and_robust_ones_are_unbiased() -> None:
    """E over labels that are flipped with probability e of the robust loss is the loss of the right labels."""
    h = torch.tensor([1.5, -2.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    right, flipped = (preferences.pair_loss("sigmoid", *sides, beta=0.5).loss for sides in (h, h[::-1]))
    smooth = preferences.pair_loss("sigmoid", *h, beta=0.5, smoothing=0.2).loss
    torch.testing.assert_close(smooth, 0.8 * right + 0.2 * flipped)
    robust = [preferences.pair_loss("robust", *sides, beta=0.5, smoothing=0.2).loss for sides in (h, h[::-1])]
    torch.testing.assert_close(0.8 * robust[0] + 0.2 * robust[1], right)
