"""Diff-Instruct*: golden onestep_diff_instruct_star, and the identity that the loss rests on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from genrl.mdp import noise
from genrl.objectives.forward import diff_instruct


def load(data: np.lib.npyio.NpzFile) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(data[name])) for name in data.files}


def toy_nodes(mu: float, tau: float, m: float, v: float, t: float, c: float) -> tuple[Tensor, Tensor, Tensor]:
    """z, e [K, 1] and their mass [K]: exact to rounding for the toys' integrands, whatever c.

    x_t = (1 - t) mu + s u, u standard normal. Along u the integrand bends where the scores are equal, within c over the
    slope of their difference: panels that halve towards that place. Across u it is a polynomial of low degree.
    """
    spread, ref_variance = math.hypot((1 - t) * tau, t), (1 - t) ** 2 * v + t**2
    slope = spread / ref_variance - 1 / spread  # of the scores' difference in u
    offset = (1 - t) * (mu - m) / ref_variance
    bend, width = (-offset / slope, min(c / abs(slope), 1.0)) if slope else (0.0, 1.0)
    edges = set(np.linspace(-13, 13, 27).tolist())
    while width < 26:
        edges |= {place for place in (bend, bend - width, bend + width) if abs(place) < 13}
        width *= 2
    ends = np.array(sorted(edges))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(ends)[:, None] / 2
    u = (ends[:-1, None] + half * (1 + nodes)).reshape(-1)
    along = (half * weights).reshape(-1) * np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
    across, other = np.polynomial.hermite_e.hermegauss(6)
    u, across = (torch.from_numpy(part.copy()).reshape(-1, 1) for part in np.meshgrid(u, across))
    mass = torch.from_numpy(np.outer(other / math.sqrt(2 * math.pi), along).reshape(-1))
    return ((1 - t) * tau * u - t * across) / spread, (t * u + (1 - t) * tau * across) / spread, mass


def test_golden_toys(golden) -> None:
    """1-D Gaussians by quadrature over x_0 = mu + tau z and the noise e: generator N(mu, tau^2), reference N(m, v)."""
    rows = torch.from_numpy(golden("onestep_diff_instruct_star")["toy_mu_tau_m_v_t_c_w_div_gradmu_gradtau_lossvalue"])
    assert len(rows)
    for row in rows:
        mu, tau = row[0].clone().requires_grad_(), row[1].clone().requires_grad_()
        m, v, t, c, w, *want = row[2:].tolist()
        z, e, mass = toy_nodes(*row[:6].tolist())
        noisy = (1 - t) * (mu + tau * z) + t * e
        # frozen parameters, open graph through x_t
        variance = (1 - t) ** 2 * row[1] ** 2 + t**2
        score = -(noisy - (1 - t) * row[0]) / variance
        ref_score = -(noisy - (1 - t) * m) / ((1 - t) ** 2 * v + t**2)
        conditional = diff_instruct.score_from_noise(e, t)
        divergence = diff_instruct.score_divergence(score, ref_score, weight=w, huber_c=c)
        loss = diff_instruct.diff_instruct_star_loss(score, ref_score, conditional, weight=w, huber_c=c)
        value = (mass * loss).sum()
        ours = [(mass * divergence).sum(), *torch.autograd.grad(value, (mu, tau)), value]
        assert torch.stack(ours).tolist() == pytest.approx(want, rel=1e-9, abs=1e-10)


def test_golden_linear_generator(golden) -> None:
    arrays = load(golden("onestep_diff_instruct_star"))
    matrix, bias = arrays["lin_A"].requires_grad_(), arrays["lin_b"].requires_grad_()
    e, t, weight = arrays["lin_eps"], arrays["lin_t"], arrays["lin_wt"]
    huber_c = float(arrays["lin_huber_c"])
    alpha_reward, alpha_cfg, scale = arrays["lin_arew_acfg_guidance"].tolist()
    sample = arrays["lin_z"] @ matrix.T + bias
    noisy = (1 - t)[:, None] * sample + t[:, None] * e
    score = noisy @ arrays["lin_Wphi"].T + arrays["lin_cphi"]
    ref_score = noisy @ arrays["lin_Wref"].T + arrays["lin_cref"]
    unconditional = noisy @ arrays["lin_Wuncond"].T
    conditional = diff_instruct.score_from_noise(e, t)
    guided = diff_instruct.guided_score(unconditional, ref_score, scale)

    def regulariser(reference: Tensor) -> Tensor:
        loss = diff_instruct.diff_instruct_star_loss(score, reference, conditional, weight=weight, huber_c=huber_c)
        return loss.mean()

    terms = {
        "reg": regulariser(ref_score),
        "reg_cfg_in": regulariser(guided),
        "reward": -alpha_reward * torch.tanh(sample @ arrays["lin_reward_dir"]).mean(),
        "cfg_out": alpha_cfg * diff_instruct.outer_guidance_loss(noisy, unconditional, ref_score, weight=weight).mean(),
    }
    terms["total_out"] = terms["reg"] + terms["reward"] + terms["cfg_out"]
    terms["total_in"] = terms["reg_cfg_in"] + terms["reward"]
    compared = {"lin_ta_dsm_loss"}
    matching = diff_instruct.score_matching_loss(score.detach(), conditional, weight=weight).mean()
    assert torch.allclose(matching, arrays["lin_ta_dsm_loss"], rtol=1e-9)
    for name, loss in terms.items():
        on_matrix, on_bias = torch.autograd.grad(loss, (matrix, bias), retain_graph=True)
        for key, value in ((f"{name}_loss", loss), (f"{name}_gradA", on_matrix), (f"{name}_gradb", on_bias)):
            compared.add(f"lin_{key}")
            assert torch.allclose(value, arrays[f"lin_{key}"], rtol=1e-9, atol=1e-10), key
    results = {name for name in arrays if name.startswith("lin_") and name.endswith(("_loss", "_gradA", "_gradb"))}
    assert compared == results


def gaussians(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x_t of a generator N(mu, 1) at sigma = .5, its exact score with frozen parameters, and the leaf mu."""
    mu = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    z, e = (noise.keyed_noise((60_000, 2), seed, name).double() for name in "ze")
    noisy = 0.5 * (mu + z) + 0.5 * e
    score = -(noisy - 0.5 * mu.detach()) / 0.5
    return mu, noisy, score


def test_the_kl_variant_has_the_gradient_of_the_kl() -> None:
    """KL of N(mu/2, 1/2) from N(0, 1/2) is |mu|^2 / 4."""
    mu, noisy, score = gaussians(0)
    ref_score = -noisy / 0.5
    loss = diff_instruct.diff_instruct_loss(noisy, score, ref_score, weight=1.0).mean()
    gradient = torch.autograd.grad(loss, mu)[0]
    assert torch.allclose(gradient, mu.detach() / 2, atol=1e-9)


def test_no_gradient_and_no_divergence_where_the_generator_is_the_reference() -> None:
    mu, noisy, score = gaussians(1)
    conditional = diff_instruct.score_from_noise(noisy.detach() * 0.0, 0.5)
    loss = diff_instruct.diff_instruct_star_loss(score, score, conditional, weight=2.0, huber_c=0.1).sum()
    assert loss == 0 and torch.autograd.grad(loss, mu)[0].abs().max() == 0
    assert (diff_instruct.score_divergence(score, score, weight=2.0, huber_c=0.1) == 0).all()


@given(st.integers(0, 99), st.floats(0.05, 0.95))
def test_scores_of_velocity_and_noise_are_one(seed: int, sigma: float) -> None:
    clean, e = (noise.keyed_noise((3, 2, 4), seed, name).double() for name in ("clean", "noise"))
    noisy = (1 - sigma) * clean + sigma * e
    levels = torch.tensor([sigma, 0.5, sigma], dtype=torch.float64)
    of_velocity = diff_instruct.score_from_velocity(noisy, e - clean, sigma)
    assert torch.allclose(of_velocity, diff_instruct.score_from_noise(e, sigma), rtol=1e-9, atol=1e-9)
    assert torch.allclose(of_velocity, -(noisy - (1 - sigma) * clean) / sigma**2, rtol=1e-6, atol=1e-9)
    each = diff_instruct.score_from_noise(e, levels)
    assert torch.allclose(each[1], -2 * e[1]) and torch.allclose(each[0], of_velocity[0])


@given(st.integers(0, 99), st.floats(0.05, 0.95))
def test_with_weight_sigma_squared_score_matching_is_noise_prediction(seed: int, sigma: float) -> None:
    predicted, e = (noise.keyed_noise((3, 2, 4), seed, name).double() for name in ("predicted", "noise"))
    scores = [diff_instruct.score_from_noise(x, sigma) for x in (predicted, e)]
    got = diff_instruct.score_matching_loss(*scores, weight=sigma**2)
    assert torch.allclose(got, (predicted - e).square().flatten(1).sum(1), rtol=1e-9)


def test_the_direction_is_bounded() -> None:
    """Pseudo-Huber: a large score difference counts by its direction alone."""
    y = 1e6 * noise.keyed_noise((4, 3), "y").double()
    zero = torch.zeros_like(y)
    unit = diff_instruct.diff_instruct_star_loss(y, zero, y - y / y.norm(dim=1, keepdim=True), weight=1.0, huber_c=0.1)
    assert torch.allclose(unit, -torch.ones(4).double(), rtol=1e-6)
    assert diff_instruct.huber_constant(10_000) == pytest.approx(0.054)
    assert torch.equal(diff_instruct.guided_score(zero, y, 1.0), y)
