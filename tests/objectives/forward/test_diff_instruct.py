"""Diff-Instruct*: golden onestep_diff_instruct_star, and the identity that the loss rests on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from genrl.mdp import noise
from genrl.objectives.forward import diff_instruct
from tests.golden_cases import Arrays


def toy_nodes(tau: float, t: float) -> tuple[Tensor, Tensor, Tensor]:
    """z, e [K] and their mass [K]. x_t = (1 - t) mu + s u, u standard normal: fine along u, along which the integrand
    bends where the scores are equal; across u it is a polynomial of low degree."""
    spread, step = math.hypot((1 - t) * tau, t), 2e-4
    u = torch.arange(-13.0, 13.0, step, dtype=torch.float64)[:, None]
    across, weights = map(torch.from_numpy, hermegauss(6))
    mass = weights * step * (-(u**2) / 2).exp() / (2 * math.pi)
    z, e = ((1 - t) * tau * u - t * across) / spread, (t * u + (1 - t) * tau * across) / spread
    return z.reshape(-1, 1), e.reshape(-1, 1), mass.reshape(-1)


def test_golden_toys(golden) -> None:
    """1-D Gaussians by quadrature over x_0 = mu + tau z and the noise e: generator N(mu, tau^2), reference N(m, v)."""
    rows = torch.from_numpy(golden("onestep_diff_instruct_star")["toy_mu_tau_m_v_t_c_w_div_gradmu_gradtau_lossvalue"])
    assert len(rows)
    for row in rows:
        mu, tau = row[0].clone().requires_grad_(), row[1].clone().requires_grad_()
        m, v, t, c, w, *want = row[2:].tolist()
        z, e, mass = toy_nodes(float(row[1]), t)
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
    a = Arrays(golden("onestep_diff_instruct_star"))
    matrix, bias = a.given("lin_A").requires_grad_(), a.given("lin_b").requires_grad_()
    e, t, weight, huber_c = (*(a.given(f"lin_{name}") for name in ("eps", "t", "wt")), a.number("lin_huber_c"))
    alpha_reward, alpha_cfg, scale = a.given("lin_arew_acfg_guidance").tolist()
    sample = a.given("lin_z") @ matrix.T + bias
    noisy = (1 - t)[:, None] * sample + t[:, None] * e
    score = noisy @ a.given("lin_Wphi").T + a.given("lin_cphi")
    ref_score = noisy @ a.given("lin_Wref").T + a.given("lin_cref")
    unconditional = noisy @ a.given("lin_Wuncond").T
    conditional = diff_instruct.score_from_noise(e, t)

    def regulariser(reference: Tensor) -> Tensor:
        loss = diff_instruct.diff_instruct_star_loss(score, reference, conditional, weight=weight, huber_c=huber_c)
        return loss.mean()

    terms = {
        "reg": regulariser(ref_score),
        "reg_cfg_in": regulariser(diff_instruct.guided_score(unconditional, ref_score, scale)),
        "reward": -alpha_reward * torch.tanh(sample @ a.given("lin_reward_dir")).mean(),
    }
    terms["total_in"] = terms["reg_cfg_in"] + terms["reward"]
    matching = diff_instruct.score_matching_loss(score.detach(), conditional, weight=weight).mean()
    a.check("lin_ta_dsm_loss", matching)
    for name, loss in terms.items():
        a.check(f"lin_{name}_loss", loss)
        for part, gradient in zip("Ab", torch.autograd.grad(loss, (matrix, bias), retain_graph=True), strict=True):
            a.check(f"lin_{name}_grad{part}", gradient)
    a.all_used("lin_.*(_loss|_grad[Ab])", but="lin_(cfg|total)_out.*")


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


def test_the_direction_is_bounded() -> None:
    """Pseudo-Huber: a large score difference counts by its direction alone."""
    y = 1e6 * noise.keyed_noise((4, 3), "y").double()
    zero = torch.zeros_like(y)
    unit = diff_instruct.diff_instruct_star_loss(y, zero, y - y / y.norm(dim=1, keepdim=True), weight=1.0, huber_c=0.1)
    assert torch.allclose(unit, -torch.ones(4).double(), rtol=1e-6)
    assert diff_instruct.huber_constant(10_000) == pytest.approx(0.054)
    assert torch.equal(diff_instruct.guided_score(zero, y, 1.0), y)
