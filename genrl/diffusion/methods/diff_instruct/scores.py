"""A pipeline's model as the score of noised samples, whatever it predicts. x_t = a x_0 + s eps: a flow has s = sigma,
a = 1 - sigma, other models a^2 = alpha_bar, s^2 = 1 - a^2."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.mdp.gaussian import per_sample
from genrl.mdp.noise import generator
from genrl.objectives.forward.diff_instruct import score_from_prediction, score_from_velocity

LOW, HIGH = 0.02, 0.98  # of the noise levels (flow) or of the training timesteps, as DMD2 has them (2405.14867)
GRID = 100  # steps of the schedule by which a noise level becomes the model's time: one step is too coarse a grid


class Noised(NamedTuple):
    """Samples on the forward process: x_t and eps, [B, ...]; the `time` that the network is told (sigma of a flow, else
    the timestep), a (`signal`) and s (`sigma`), [B]."""

    noisy: Tensor
    noise: Tensor
    time: Tensor
    signal: Tensor
    sigma: Tensor


def drawn_levels(batch: Batch, *names: int | str) -> Tensor:
    """Levels for `noised_at`, uniform between LOW and HIGH, by each sample's key and `names`, [B]."""
    uniform = torch.cat([torch.rand(1, generator=generator(*key, "level", *names)) for key in batch.keys])
    return LOW + (HIGH - LOW) * uniform


def noised_at(policy: Policy, clean: Tensor, noise: Tensor, level: Tensor) -> Noised:
    """clean, noise [B, ...]; level [B] in [0, 1): sigma of a flow, else the share of the training timesteps."""
    if policy.head.parametrisation == "flow":
        time = sigma = level.to(noise)
        signal = 1.0 - sigma
    else:
        alphas = policy.head.alphas_cumprod
        time = (level * len(alphas)).long()
        alpha_bar = alphas[time.to(alphas.device)].to(noise)
        time, signal, sigma = time.to(noise.device), alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt()
    a, s = (per_sample(value, noise, noise.dtype) for value in (signal, sigma))
    return Noised(a * clean + s * noise, noise, time, signal, sigma)


def score_of(policy: Policy, batch: Batch, given: Noised) -> Tensor:
    """The score of the model under its present weights at x_t, [B, ...]."""
    head = policy.head
    if head.parametrisation == "diffusion":
        output = policy.velocity(batch, given.noisy, given.time)
        return score_from_prediction(given.noisy, output, given.signal**2, head.prediction_type)
    fine = replace(batch, sampling={**batch.sampling, "num_inference_steps": GRID})
    return score_from_velocity(given.noisy, policy.velocity(fine, given.noisy, given.time), given.sigma)
