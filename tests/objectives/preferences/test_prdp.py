"""PRDP: golden pairwise_prdp, a worked example, and properties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from genrl.diffusion.methods.prdp.train import pair_errors, prdp_gradient, prdp_loss
from genrl.mdp import noise
from tests.golden_cases import Arrays

NAN = float("nan")
CONVENTIONS = (("sum", "all"), ("mean", "positive"))


def test_golden_losses_pairs_and_gradients(golden) -> None:
    a = Arrays(golden("pairwise_prdp"))
    for case in a.tags(r"(\w+)_logp_ref"):
        beta, clip = a.given(f"{case}_beta_eps").tolist()
        inputs = [a.given(f"{case}_{name}") for name in ("logp", "logp_ref", "logp_old", "reward")]
        for reduction, pairs in CONVENTIONS:
            options = {"beta": beta, "clip": clip, "reduction": reduction, "pairs": pairs}
            errors = pair_errors(*inputs, **options)
            output, gradient = prdp_gradient(*inputs, **options)
            table = torch.cat([errors.pairs.double(), errors.unclipped[:, None], errors.clipped[:, None]], dim=1)
            name = f"{case}_{reduction}_{pairs}"
            a.check(f"{name}_loss", output.loss)
            a.check(f"{name}_pairs_n_i_j_unclipped_clipped", table)
            a.check(f"{name}_grad_logp", gradient)
            a.check(f"{name}_frac_clipped_branch", output.clipped)
    a.all_used(but="opt_.*")


def test_golden_optimum(golden) -> None:
    """At p* ~ p_ref exp(r / beta) the loss is zero, whichever samples are drawn, and so is its gradient."""
    a = Arrays(golden("pairwise_prdp"))
    beta, samples, rewards, ref = (
        a.number("opt_beta"),
        a.given("opt_samples"),
        a.given("opt_reward"),
        a.given("opt_ref"),
    )
    best = (ref.log() + rewards / beta).softmax(0)
    a.check("opt_policy", best)
    log_prob, ref_log_prob = (p.log()[samples][..., None] for p in (best, ref))
    output, gradient = prdp_gradient(log_prob, ref_log_prob, log_prob, rewards[samples], beta=float(beta), clip=1e-3)
    assert output.loss < 1e-25 and a.number("opt_loss") < 1e-25 and gradient.abs().max() < 1e-12


def sample(seed: int, shape: tuple[int, int, int] = (2, 4, 3)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, ref, old = (0.1 * noise.keyed_noise(shape, seed, name).double() for name in ("new", "ref", "old"))
    return new, ref, old, noise.keyed_noise(shape[:2], seed, "reward").double()


def test_on_policy_nothing_is_clipped_and_the_gradient_is_that_of_the_regression() -> None:
    new, ref, _, rewards = sample(0)
    output, gradient = prdp_gradient(new, ref, new, rewards, beta=0.5, clip=1e-6)
    free, same = prdp_gradient(new, ref, new, rewards, beta=0.5, clip=1e9)
    assert output.clipped == 0.0 and torch.equal(output.loss, free.loss) and torch.allclose(gradient, same)
    assert gradient.sum(dim=1).abs().max() < 1e-12  # what raises one sample lowers the others


def test_missing_scores_and_ties_make_no_pair() -> None:
    new, ref, old, _ = sample(2)
    scores = torch.tensor([[1.0, NAN, 1.0, 2.0], [NAN, NAN, NAN, 3.0]])
    every = pair_errors(new, ref, old, scores, beta=1.0, clip=0.1)
    assert every.pairs.tolist() == [[0, 0, 2], [0, 0, 3], [0, 2, 3]]
    positive = pair_errors(new, ref, old, scores, beta=1.0, clip=0.1, pairs="positive")
    assert positive.pairs.tolist() == [[0, 0, 3], [0, 2, 3]]
    leaf = new.clone().requires_grad_()
    nothing = prdp_loss(leaf, ref, old, torch.full((2, 4), NAN), beta=1.0, clip=0.1)
    nothing.loss.backward()
    assert nothing.loss == 0 and nothing.num_pairs == 0 and nothing.clipped == 0
    assert leaf.grad is not None and (leaf.grad == 0).all()


def test_gradient_flows_through_the_new_policy_only() -> None:
    leaves = [value.requires_grad_() for value in sample(3)]
    prdp_loss(*leaves, beta=0.5, clip=0.1).loss.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False, False]


def test_wrong_input_is_refused() -> None:
    new, ref, old, rewards = sample(4)
    with pytest.raises(ValueError, match="beta must be positive"):
        prdp_loss(new, ref, old, rewards, beta=0.0, clip=0.1)
    with pytest.raises(ValueError, match=r"\[prompts, samples\]"):
        prdp_loss(new, ref, old, rewards[:, :2], beta=1.0, clip=0.1)
    with pytest.raises(ValueError, match="one shape"):
        prdp_loss(new, ref[..., :2], old, rewards, beta=1.0, clip=0.1)
    with pytest.raises(ValueError, match="'sum' or 'mean'"):
        prdp_loss(new, ref, old, rewards, beta=1.0, clip=0.1, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'all' or 'positive'"):
        prdp_loss(new, ref, old, rewards, beta=1.0, clip=0.1, pairs="best")  # type: ignore[arg-type]
