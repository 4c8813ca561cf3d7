"""The flow of RLFR: a velocity field over hidden states of the language model, and how it is given them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genrl.mdp.noise import generator
from genrl.objectives.tokens.flow_rewards import Deviation, Velocity, velocity_deviation, velocity_error
from genrl.vlm.policies.policy import Encoded, Policy

WAVES = 16
"""Frequencies by which the network is told a number."""


class Latents(NamedTuple):
    """Hidden states [N, L, H] of N tokens after L layers, and those of the token before each, float32. places [L]: of
    the layers, as shares of the model's depth."""

    states: Tensor
    before: Tensor
    places: Tensor


@torch.no_grad()
def latents(
    policy: Policy, prompts: Sequence[Encoded], tokens: Tensor, mask: Tensor, shares: Sequence[float]
) -> Latents:
    """Of the tokens of answers [B, T], one to each prompt, row by row without those that the mask leaves out."""
    kept = mask.bool().to(policy.device)
    read = torch.where(mask.bool(), tokens.cpu(), policy.pad_id)  # padding, which no answer sees, may be an image's
    found = policy.body(**policy.inputs(prompts, read), use_cache=False, output_hidden_states=True).hidden_states
    layers = layers_of(shares, len(found) - 1)
    read_at = [found[layer + 1][:, -1 - tokens.shape[1] :].float() for layer in layers]
    return Latents(
        torch.stack([states[:, 1:][kept] for states in read_at], 1),
        torch.stack([states[:, :-1][kept] for states in read_at], 1),
        torch.tensor([layer / (len(found) - 1) for layer in layers], device=policy.device),
    )


def layers_of(shares: Sequence[float], number: int) -> list[int]:
    """The layers, 0 to number - 1, at these shares of a model's depth, each once."""
    return sorted({min(round(share * number), number - 1) for share in shares})


class LatentFlow(nn.Module):
    """Velocities of hidden states: a residual network whose blocks are scaled and shifted by the time, the layer and
    the hidden state before. It begins as 0."""

    def __init__(self, width: int, depth: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.enter, self.before = nn.Linear(width, width), nn.Linear(width, width)
            self.numbers = nn.Linear(4 * WAVES, width)
            self.norm = nn.RMSNorm(width, elementwise_affine=False)
            self.modulation = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(depth)])
            self.inner = nn.ModuleList(
                [nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(depth)]
            )
            self.leave = nn.Linear(width, width)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor, t: Tensor, before: Tensor, places: Tensor) -> Tensor:
        """x and before [N, H], t and places [N] -> [N, H]."""
        frequencies = math.pi * torch.arange(1, WAVES + 1, device=x.device) / 2
        angles = torch.cat([t[:, None] * frequencies, places[:, None] * frequencies], -1)
        given = nn.functional.silu(self.before(before) + self.numbers(torch.cat([angles.sin(), angles.cos()], -1)))
        x = self.enter(x)
        for modulation, inner in zip(self.modulation, self.inner, strict=True):
            shift, scale, gate = modulation(given).chunk(3, -1)
            x = x + gate * inner(self.norm(x) * (1 + scale) + shift)
        found: Tensor = self.leave(self.norm(x))
        return found

    def deviation(self, of: Latents, noise: Tensor, times: Sequence[float]) -> Deviation:
        """At fixed times, means over the layers, [N]; noise [N, L, H]."""
        found = velocity_deviation(self._given(of), *_rows(of, noise), times)
        return Deviation(*(each.view(of.states.shape[:2]).mean(1) for each in found))

    def error(self, of: Latents, noise: Tensor, t: Tensor) -> Tensor:
        """At a time of each token, [N], a mean over the layers; t [N], noise [N, L, H]."""
        at = t.to(of.states.device).repeat_interleave(of.states.shape[1])
        return velocity_error(self._given(of), *_rows(of, noise), at).view(of.states.shape[:2]).mean(1)

    def _given(self, of: Latents) -> Velocity:
        before, places = of.before.flatten(0, 1), of.places.repeat(len(of.before))
        return lambda x, t: self(x, t, before, places)


def _rows(of: Latents, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and noise [N, L, H] -> [N L, H]."""
    return of.states.flatten(0, 1), noise.to(of.states.device).flatten(0, 1)


def noise_of(keys: Sequence[Sequence[int | str]], lengths: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Of the tokens of answers, [N, L, H], each answer's by a key of its own: the same however they are shared out."""
    drawn = [torch.randn(n, *shape, generator=generator(*key)) for key, n in zip(keys, lengths, strict=True)]
    return torch.cat(drawn)
