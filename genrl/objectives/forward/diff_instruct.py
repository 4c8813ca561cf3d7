"""Diff-Instruct* (arXiv 2410.20898): a one-step generator with the reward of a sample, held to a reference diffusion.

The generator maximises `alpha E r(x_0)` less the score-based divergence `E_t w(t) E d(s_p,t(x_t) - s_ref,t(x_t))` of
its samples, noised, from the reference. The unknown score s_p is an auxiliary network's, s_phi, which learns beside it.
Shapes: samples, noise and scores [B, ...]; sigma a float, [] or [B] in (0, 1); weights a float or [B]; losses [B], sums
over the elements of a sample.

The generator's gradient needs the graph through noisy = x_t(x_0): evaluate s_phi and s_ref at it with gradients on but
their *parameters* frozen, and detach nothing here (except where a loss says so).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Scalar = Tensor | float


def score_from_velocity(noisy: Tensor, velocity: Tensor, sigma: Scalar) -> Tensor:
    """`s = -(x + (1 - sigma) v) / sigma`, [B, ...]: the score of a flow model, `x + (1 - sigma) v` being the noise."""
    time = _column(sigma, noisy)
    return -(noisy + (1.0 - time) * velocity) / time


def score_from_noise(prediction: Tensor, sigma: Scalar) -> Tensor:
    """`s = -eps / sigma`, [B, ...]: the score of a noise prediction; of the noise itself, the conditional score of x_t
    given x_0.

    sigma is the std of the noise in x_t: sqrt(1 - alpha_bar) for models of that kind.
    """
    return -prediction / _column(sigma, prediction)


def score_from_prediction(noisy: Tensor, prediction: Tensor, alpha_bar: Scalar, prediction_type: str) -> Tensor:
    """The score of a model on `x_t = sqrt(ab) x_0 + sqrt(1 - ab) eps`, [B, ...], by what it predicts.

    `s = -eps / sqrt(1 - ab)` (arXiv 2011.13456, section 3.4), with eps itself (epsilon), `sqrt(ab) v + sqrt(1 - ab) x`
    (v_prediction, arXiv 2202.00512, appendix D) or `(x - sqrt(ab) x_0) / sqrt(1 - ab)` (sample). alpha_bar a float, []
    or [B] in (0, 1). Raises ValueError for another name.
    """
    level = _column(alpha_bar, noisy)
    signal, sigma = level.sqrt(), (1.0 - level).sqrt()
    if prediction_type == "epsilon":
        return -prediction / sigma
    if prediction_type == "v_prediction":
        return -(signal * prediction + sigma * noisy) / sigma
    if prediction_type == "sample":
        return -(noisy - signal * prediction) / sigma**2
    raise ValueError(f"prediction_type must be epsilon, v_prediction or sample, got {prediction_type!r}")


def guided_score(unconditional: Tensor, conditional: Tensor, guidance_scale: float) -> Tensor:
    """`s_0 + g (s_c - s_0)`: in place of the reference score, it makes guidance an implicit reward.

    [B, ...]; classifier-free guidance (arXiv 2207.12598, eq. 6).
    """
    return unconditional + guidance_scale * (conditional - unconditional)


def huber_constant(elements: int) -> float:
    """`.00054 sqrt(D)`: c of the pseudo-Huber distance for samples of D elements (arXiv 2310.14189, section 3.3)."""
    return 0.00054 * math.sqrt(elements)


def score_divergence(score: Tensor, ref_score: Tensor, *, weight: Scalar, huber_c: float) -> Tensor:
    """`w (sqrt(|s_phi - s_ref|^2 + c^2) - c)`: the divergence itself, [B], to be logged; the loss below is not it."""
    norm = (score - ref_score).flatten(1).square().sum(dim=1)
    return _row(weight, norm) * ((norm + huber_c**2).sqrt() - huber_c)


def diff_instruct_star_loss(
    score: Tensor, ref_score: Tensor, conditional_score: Tensor, *, weight: Scalar, huber_c: float
) -> Tensor:
    """`-w d'(y)^T (s_phi - grad log q(x_t | x_0))`, [B], y = s_phi - s_ref, d'(y) = y / sqrt(|y|^2 + c^2).

    Its gradient in the generator's parameters is that of the divergence (score-projection identity, arXiv 2410.16794);
    its value is not: it is 0 on average where s_phi is exact. All three scores must carry their graph through x_t.
    conditional_score: `score_from_noise(noise, sigma)`. weight sigma^2 keeps the loss of order 1 at all levels.
    """
    difference = (score - ref_score).flatten(1)
    # c keeps the direction finite where the two scores agree, as they do at the start.
    direction = difference / (difference.square().sum(dim=1, keepdim=True) + huber_c**2).sqrt()
    residual = (score - conditional_score).flatten(1)
    product = (direction * residual).sum(dim=1)
    return -_row(weight, product) * product


def regularisation(
    noisy: Tensor, noise: Tensor, sigma: Tensor, score: Tensor, ref_score: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss of the generator, score divergence without gradient), [B], with weight sigma^2, and c set by the size of
    a sample.

    noisy, noise [B, ...], sigma [B]: x_t, and the noise in it. Gradients go through the scores.
    """
    weight, huber_c = sigma**2, huber_constant(noisy[0].numel())
    divergence = score_divergence(score, ref_score, weight=weight, huber_c=huber_c).detach()
    conditional = score_from_noise(noise, sigma)
    return diff_instruct_star_loss(score, ref_score, conditional, weight=weight, huber_c=huber_c), divergence


def score_matching_loss(score: Tensor, conditional_score: Tensor, *, weight: Scalar) -> Tensor:
    """`w |s_phi - grad log q(x_t | x_0)|^2`, [B]: denoising score matching (arXiv 2011.13456, eq. 7), by which s_phi
    follows the generator.

    x_t is data here (no gradient to the generator). With weight sigma^2 it is the usual squared error of the noise.
    """
    squares = (score - conditional_score.detach()).flatten(1).square().sum(dim=1)
    return _row(weight, squares) * squares


def _column(value: Scalar, like: Tensor) -> Tensor:
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tensor.reshape(-1, *[1] * (like.dim() - 1))


def _row(value: Scalar, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)
