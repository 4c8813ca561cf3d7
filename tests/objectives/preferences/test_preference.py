"""Preference losses: golden pairwise_dpo_losses and trainers_dpo, and their properties."""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.methods.prdp.train import pair_errors, prdp_gradient, prdp_loss
from genrl.mdp import noise
from genrl.objectives import matching, preferences
from tests.golden_cases import Arrays

NAN = float("nan")


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
    (actual,) = a.matches(r"spo_loss_beta(\d+)_eps0(\d+)")
    first = torch.ones(len(moving[0]))
    compare(actual[0], first, ("spo_grad_win", "spo_grad_lose"), float(actual[1]), float(f"0.{actual[2]}"))
    (ranked,) = a.tags(r"(d3po_rewards\d*)")
    rewards = a.given(ranked)
    group = torch.zeros(len(rewards)).long()
    a.check("d3po_pairs_used", preferences.preference_pairs(rewards, group))
    for tag in a.tags(r"(spo_k\d+_)scores"):
        threshold = a.number(f"{tag}threshold")
        win, lose, valid = preferences.step_winners(a.given(f"{tag}scores"), threshold=threshold)
        a.checks(tag.removesuffix("_"), valid=valid, win_lose=torch.stack([win, lose]))
    a.all_used("(d3po|spo)_.*", but="d3po_pairs")  # with ties


def test_golden_trainers_dpo(golden) -> None:
    a = Arrays(golden("trainers_dpo"), double=True)

    def both(kind: str) -> Tensor:
        return torch.cat([a.given(f"in_{kind}_{side}") for side in ("chosen", "rejected")])

    velocity, source = both("v_theta").requires_grad_(), a.given("in_noise")
    target = torch.cat([source, source]) - both("x0")
    errors = matching.matching_error(velocity, target).chunk(2)
    reference = matching.matching_error(both("v_ref"), target).chunk(2)
    for actual in a.matches(r"out_flow_grpo_loss_beta([\d.]+)"):
        gains = [old - new for new, old in zip(errors, reference, strict=True)]
        out = preferences.pair_loss("sigmoid", *gains, beta=float(actual[1]) / 2)
        gradient = torch.autograd.grad(out.loss.mean(), velocity, retain_graph=True)[0]
        for field, value in (("loss", out.loss.mean()), ("inside", out.logit), ("grad_v", gradient)):
            for name in a.tags(rf"(out_\w+_{field}_beta{actual[1]})"):
                a.check(name, value, 0.0, 1e-4 * float(a.given(name).abs().max()))
    a.all_used("out_.*")


def test_pairs_are_all_decided_comparisons_within_groups() -> None:
    group, rewards = torch.tensor([5, 2, 5, 2, 5, 2]), torch.tensor([1.0, 3.0, NAN, 3.0, 2.0, 1.0])
    assert preferences.preference_pairs(rewards, group).tolist() == [[0, 4, -1], [1, 5, 1], [3, 5, 1]]


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
        output = preferences.pair_loss(kind, *sides, beta=beta, smoothing=smoothing)
        actual = output.loss
        assert kind != "sigmoid" or torch.equal(output.correct, h[:pairs] > h[pairs:])
        a.check(f"dpo_{kind}", actual.detach(), rtol=1e-8)
        a.check(f"dpo_{kind}_grad", torch.autograd.grad(actual.mean(), log_prob, retain_graph=True)[0], rtol=1e-8)
    good, heavier = a.given("kto_label"), a.number("kto_undesirable_weight")
    for name in ("positive", "zero"):
        others = a.given("kto_kl_logp") + a.number(f"kto_{name}_kl_shift") - a.given("kto_kl_ref_logp")
        z = (others * mask).sum(1).mean().clamp(min=0)
        a.check(f"kto_{name}_kl_z", z)
        actual = preferences.marked_loss(h, good, z, beta=beta).loss
        a.check(f"kto_{name}_kl_loss", actual.detach(), rtol=1e-8)
        mean = (actual * torch.where(good, torch.ones_like(actual), heavier)).mean()
        a.check(f"kto_{name}_kl_weighted_mean", mean.detach(), rtol=1e-8)
        a.check(f"kto_{name}_kl_grad", torch.autograd.grad(mean, log_prob, retain_graph=True)[0], rtol=1e-8)
    a.all_used(but="dpo_(exo_pair|bco_pair|aot|aot_unpaired|discopop).*")  # which are not built


def test_odds_and_smoothed_or_robust_labels() -> None:
    """ORPO's loss is of odds, and a model that has not moved is not right; smoothed labels lie between both orders."""
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    assert not preferences.pair_loss("sigmoid", zero, zero, beta=0.1).correct.any()
    shares = torch.tensor([0.8, 0.5], dtype=torch.float64)  # odds 4 and 1
    win, lose = 3 * shares.log()
    result = preferences.pair_loss("orpo", win[None], lose[None], 3 * one, 3 * one, beta=0.1)
    torch.testing.assert_close(result.loss, -0.1 * torch.tensor([4 / 5], dtype=torch.float64).log())
    # e over labels that are flipped with probability e of the robust loss is the loss of the right labels
    h = torch.tensor([1.5, -2.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    right, flipped = (preferences.pair_loss("sigmoid", *sides, beta=0.5).loss for sides in (h, h[::-1]))
    smooth = preferences.pair_loss("sigmoid", *h, beta=0.5, smoothing=0.2).loss
    torch.testing.assert_close(smooth, 0.8 * right + 0.2 * flipped)
    robust = [preferences.pair_loss("robust", *sides, beta=0.5, smoothing=0.2).loss for sides in (h, h[::-1])]
    torch.testing.assert_close(0.8 * robust[0] + 0.2 * robust[1], right)


# -- PRDP: golden pairwise_prdp, and properties
def test_golden_losses_pairs_and_gradients(golden) -> None:
    """Of sums over T steps: T^2 times the errors of means, with T times the beta."""
    a = Arrays(golden("pairwise_prdp"))
    for case in a.tags(r"(\w+)_logp_ref"):
        beta, clip = a.given(f"{case}_beta_eps").tolist()
        inputs = [a.given(f"{case}_{name}") for name in ("logp", "logp_ref", "logp_old", "reward")]
        steps = inputs[0].shape[2]
        errors = pair_errors(*inputs, beta=beta * steps, clip=clip)
        output, gradient = prdp_gradient(*inputs, beta=beta * steps, clip=clip)
        squares = steps**2 * torch.stack([errors.unclipped, errors.clipped], 1)
        table, name = torch.cat([errors.pairs.double(), squares], dim=1), f"{case}_sum_all"
        a.checks(name, loss=steps**2 * output.loss, pairs_n_i_j_unclipped_clipped=table)
        a.checks(name, grad_logp=steps**2 * gradient, frac_clipped_branch=output.clipped)
    a.all_used(but="opt_.*|.*_mean_positive_.*")


def test_golden_optimum(golden) -> None:
    """At p* ~ p_ref exp(r / beta) the loss is zero, whichever samples are drawn, and so is its gradient."""
    a = Arrays(golden("pairwise_prdp"))
    beta, samples = a.number("opt_beta"), a.given("opt_samples")
    rewards, ref = a.given("opt_reward"), a.given("opt_ref")
    best = (ref.log() + rewards / beta).softmax(0)
    a.check("opt_policy", best)
    log_prob, ref_log_prob = (p.log()[samples][..., None] for p in (best, ref))
    output, gradient = prdp_gradient(log_prob, ref_log_prob, log_prob, rewards[samples], beta=float(beta), clip=1e-3)
    assert output.loss < 1e-25 and a.number("opt_loss") < 1e-25 and gradient.abs().max() < 1e-12


def test_missing_scores_make_no_pair() -> None:
    new, ref, old = (0.1 * noise.keyed_noise((2, 4, 3), name).double() for name in ("new", "ref", "old"))
    scores = torch.tensor([[1.0, NAN, 1.0, 2.0], [NAN, NAN, NAN, 3.0]])
    every = pair_errors(new, ref, old, scores, beta=1.0, clip=0.1)
    assert every.pairs.tolist() == [[0, 0, 2], [0, 0, 3], [0, 2, 3]]
    leaf = new.clone().requires_grad_()
    nothing = prdp_loss(leaf, ref, old, torch.full((2, 4), NAN), beta=1.0, clip=0.1)
    nothing.loss.backward()
    assert nothing.loss == 0 and nothing.num_pairs == 0 and nothing.clipped == 0
    assert leaf.grad is not None and (leaf.grad == 0).all()
