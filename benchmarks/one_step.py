"""What keeps a one-step generator's variety in Diff-Instruct*: reward and variety together, where scores are exact.

    python -m benchmarks.one_step [--cases "weight 1" ...] [--seeds 0 1 2]

The teacher is a ring of eight Gaussians in the plane (radius 2, deviation .2), its score known at all noise levels;
with the caption, four of them have e times the weight of the others. The reward, exp(-|x - m|^2 / 4), is highest at the
centre m of one of these. Generator and assistant are perceptrons that learn by the losses of
`methods.diff_instruct.train`: the generator begins as the teacher's one step from pure noise, nearly one
point, the assistant as the teacher. Per case: reward, deviation of a sample's numbers (about 1.4 on the ring), share of
samples within .6 of a Gaussian, Gaussians that have more than 2 % of the samples, and the norms of the two gradients at
x_0 over the last 100 updates.
"""

from __future__ import annotations

import math
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import parser
from genrl.diffusion.methods.diff_instruct.train import (
    diff_instruct_star_loss,
    guided_score,
    huber_constant,
    score_from_noise,
    score_matching_loss,
)
from genrl.mdp.levels import flow_sample

ANGLES = 2 * math.pi * torch.arange(8) / 8
CENTRES = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
VARIANCE = 0.04
CAPTION = torch.tensor([1.0] * 4 + [0.0] * 4)
SAMPLES = 128


class Case(NamedTuple):
    weight: float = 1.0
    """Of the reward."""
    guidance: float = 1.0
    assistant_steps: int = 1
    momentum: float = 0.9
    huber: float = 1.0
    """Times the constant of the pseudo-Huber distance."""


CASES = {
    "weight 0": Case(0.0),
    "weight .03": Case(0.03),
    "weight .1": Case(0.1),
    "weight .3": Case(0.3),
    "weight 1": Case(1.0),
    "weight 1, 5 assistant steps": Case(1.0, assistant_steps=5),
    "weight 1, no momentum": Case(1.0, momentum=0.0),
    "weight 1, c 100 times": Case(1.0, huber=100.0),
    "weight .1, 5 assistant steps": Case(0.1, assistant_steps=5),
    "weight .1, guidance 3": Case(0.1, guidance=3.0),
}


def teacher(x: Tensor, sigma: Tensor, preference: Tensor) -> Tensor:
    """The score of the ring, noised, [B, 2]. sigma [B, 1]; preference: log-weights of the Gaussians."""
    variance = (1 - sigma) ** 2 * VARIANCE + sigma**2
    away = x[:, None] - (1 - sigma)[:, None] * CENTRES
    share = torch.softmax(preference - away.square().sum(-1) / (2 * variance), 1)
    return -(share[..., None] * away).sum(1) / variance


def reward(x: Tensor) -> Tensor:
    return torch.exp(-(x - CENTRES[0]).square().sum(1) / 4)


def network(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))


def noised(x0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, the noise, sigma [B, 1]."""
    sigma, noise = 0.02 + 0.96 * torch.rand(len(x0), 1), torch.randn_like(x0)
    return flow_sample(x0, noise, sigma.flatten()), noise, sigma


def run(case: Case, seed: int, updates: int) -> dict[str, float]:
    torch.manual_seed(seed)
    generator, assistant = network(2), network(4)

    def score(x: Tensor, sigma: Tensor) -> Tensor:
        return score_from_noise(assistant(torch.cat([x, sigma, sigma**2], 1)), sigma.flatten())

    def follow(x0: Tensor, optimizer: torch.optim.Optimizer) -> None:
        x, noise, sigma = noised(x0)
        target = score_from_noise(noise, sigma.flatten())
        score_matching_loss(score(x, sigma), target, weight=sigma.flatten() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    begin = torch.optim.Adam([*generator.parameters(), *assistant.parameters()], 2e-3)
    for _ in range(400):
        z = torch.randn(SAMPLES, 2)
        (generator(z) - 0.1 * z).square().mean().backward()
        ring = CENTRES[torch.multinomial(CAPTION.exp(), SAMPLES, replacement=True)]
        follow(ring + VARIANCE**0.5 * torch.randn(SAMPLES, 2), begin)
    betas = (case.momentum, 0.999)
    ours = torch.optim.AdamW(generator.parameters(), 2e-3, betas=betas)
    theirs = torch.optim.AdamW(assistant.parameters(), 4e-3, betas=betas)
    pulls: list[tuple[float, float]] = []
    for _ in range(updates):
        x0 = generator(torch.randn(SAMPLES, 2))
        for _ in range(case.assistant_steps):
            follow(x0.detach(), theirs)
        leaf = x0.detach().requires_grad_()
        x, noise, sigma = noised(leaf)
        plain = teacher(x, sigma, torch.zeros(8))
        reference, weight = guided_score(plain, teacher(x, sigma, CAPTION), case.guidance), sigma.flatten() ** 2
        conditional = score_from_noise(noise, sigma.flatten())
        loss = diff_instruct_star_loss(
            score(x, sigma), reference, conditional, weight=weight, huber_c=case.huber * huber_constant(2)
        )
        pull = torch.autograd.grad(loss.sum(), leaf)[0]
        rewarded = torch.autograd.grad(-case.weight * reward(leaf).sum(), leaf)[0]
        pulls.append((float(pull.norm(dim=1).mean()), float(rewarded.norm(dim=1).mean())))
        ours.zero_grad()
        x0.backward((pull + rewarded) / SAMPLES)
        ours.step()
    return figures(generator, pulls[-100:])


def figures(generator: nn.Module, pulls: list[tuple[float, float]]) -> dict[str, float]:
    with torch.no_grad():
        x = generator(torch.randn(4000, 2))
        distance, nearest = torch.cdist(x, CENTRES).min(1)
        shares = torch.bincount(nearest[distance < 0.6], minlength=8) / len(x)
        return {
            "reward": float(reward(x).mean()),
            "deviation": float(x.std(0).mean()),
            "on the ring": float(shares.sum()),
            "Gaussians": float((shares > 0.02).sum()),
            "pull": mean(a for a, _ in pulls),
            "reward_pull": mean(b for _, b in pulls),
        }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments.add_argument("--updates", type=int, default=800)
    given: Any = arguments.parse_args()
    for number, name in enumerate(given.cases):
        rows = [run(CASES[name], seed, given.updates) for seed in given.seeds]
        if number == 0:
            print(f"| case | {' | '.join(rows[0])} |\n|{' --- |' * (1 + len(rows[0]))}")
        cells = (" / ".join(f"{row[key]:.2g}" for row in rows) for key in rows[0])
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
