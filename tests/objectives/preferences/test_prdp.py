"""PRDP: golden pairwise_prdp, the spec's worked example, and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import noise
from genrl.objectives.preferences.prdp import pair_errors, prdp_gradient, prdp_loss

NAN = float("nan")
CONVENTIONS = (("sum", "all"), ("mean", "positive"))


def test_golden_losses_pairs_and_gradients(golden) -> None:
    data = golden("pairwise_prdp")
    arrays = {name: torch.from_numpy(data[name]) for name in data.files}
    cases = [name.removesuffix("_logp_ref") for name in arrays if name.endswith("_logp_ref")]
    compared = set()
    for case in cases:
        beta, clip = arrays[f"{case}_beta_eps"].tolist()
        inputs = [arrays[f"{case}_{name}"] for name in ("logp", "logp_ref", "logp_old", "reward")]
        for reduction, pairs in CONVENTIONS:
            options = {"beta": beta, "clip": clip, "reduction": reduction, "pairs": pairs}
            errors = pair_errors(*inputs, **options)
            output, gradient = prdp_gradient(*inputs, **options)
            table = torch.cat([errors.pairs.double(), errors.unclipped[:, None], errors.clipped[:, None]], dim=1)
            ours = {
                "loss": output.loss,
                "pairs_n_i_j_unclipped_clipped": table,
                "grad_logp": gradient,
                "frac_clipped_branch": torch.tensor(output.clipped, dtype=torch.float64),
            }
            for field, value in ours.items():
                name = f"{case}_{reduction}_{pairs}_{field}"
                compared.add(name)
                assert torch.allclose(value, arrays[name], rtol=1e-9, atol=1e-10), name
    inputs_of = {f"{case}_{name}" for case in cases for name in ("logp", "logp_ref", "logp_old", "reward", "beta_eps")}
    optimum = {"opt_ref", "opt_reward", "opt_beta", "opt_policy", "opt_samples", "opt_loss"}
    assert compared | inputs_of | optimum == set(arrays)


def test_golden_optimum(golden) -> None:
    """At p* ~ p_ref exp(r / beta) the loss is zero, whichever samples are drawn, and so is its gradient."""
    data = golden("pairwise_prdp")
    arrays = {name: torch.from_numpy(data[name]) for name in data.files}
    beta, samples = float(arrays["opt_beta"]), arrays["opt_samples"]
    best = arrays["opt_ref"] * (arrays["opt_reward"] / beta).exp()
    assert torch.allclose(best / best.sum(), arrays["opt_policy"], rtol=1e-9)
    log_prob, ref = (arrays[name].log()[samples][..., None] for name in ("opt_policy", "opt_ref"))
    output, gradient = prdp_gradient(log_prob, ref, log_prob, arrays["opt_reward"][samples], beta=beta, clip=1e-3)
    assert output.loss < 1e-25 and arrays["opt_loss"] < 1e-25 and gradient.abs().max() < 1e-12


def test_the_worked_example() -> None:
    """A clipped pair keeps the gradient of its unclipped steps."""
    new = torch.tensor([[[0.02, 0.01], [-0.01, 0.0]]], dtype=torch.float64)
    old = torch.tensor([[[0.01, 0.01], [0.0, 0.0]]], dtype=torch.float64)
    rewards = torch.tensor([[0.02, 0.0]], dtype=torch.float64)
    errors = pair_errors(new, torch.zeros_like(new), old, rewards, beta=0.5, clip=0.005)
    assert errors.unclipped.item() == pytest.approx(0.0, abs=1e-20)
    assert errors.clipped.item() == pytest.approx(1e-4)
    output, gradient = prdp_gradient(new, torch.zeros_like(new), old, rewards, beta=0.5, clip=0.005)
    assert output.clipped == 1.0 and output.num_pairs == 1
    assert torch.allclose(gradient, torch.tensor([[[0.0, -0.02], [0.0, 0.02]]], dtype=torch.float64), atol=1e-12)


def sample(seed: int, shape: tuple[int, int, int] = (2, 4, 3)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, ref, old = (0.1 * noise.keyed_noise(shape, seed, name).double() for name in ("new", "ref", "old"))
    return new, ref, old, noise.keyed_noise(shape[:2], seed, "reward").double()


@given(st.integers(0, 99), st.floats(0.01, 5.0), st.floats(0.0, 0.2), st.sampled_from(CONVENTIONS))
def test_it_is_the_definition(seed: int, beta: float, clip: float, convention: tuple) -> None:
    new, ref, old, rewards = sample(seed)
    reduction, pairs = convention
    total, count = 0.0, 0
    for n in range(2):
        for a in range(4):
            for b in range(a + 1, 4):
                target = (rewards[n, a] - rewards[n, b]) / beta
                squares = []
                for low_high in (None, clip):
                    ratios = []
                    for k in (a, b):
                        ratio, before = new[n, k] - ref[n, k], old[n, k] - ref[n, k]
                        if low_high is not None:
                            ratio = torch.minimum(torch.maximum(ratio, before - clip), before + clip)
                        ratios.append(ratio.sum() / (3 if reduction == "mean" else 1))
                    squares.append(float((ratios[0] - ratios[1] - target) ** 2))
                total, count = total + max(squares), count + 1
    output = prdp_loss(new, ref, old, rewards, beta=beta, clip=clip, reduction=reduction, pairs=pairs)
    assert output.num_pairs == count == 12
    assert output.loss.item() == pytest.approx(total / count, rel=1e-9)


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
