"""New heads of published policies: the critic and the noise head of pi_RL (arXiv 2510.25889)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from genrl.mdp.noise import derive_seed


def critic(width: int, hidden: Sequence[int]) -> nn.Sequential:
    """[B, width] -> [B, 1], ReLU. Hidden layers are Kaiming-normal (fan out), the last N(0, .02^2), biases 0."""
    layers: list[nn.Module] = []
    for before, after in zip((width, *hidden[:-1]), hidden, strict=True):
        linear = nn.Linear(before, after)
        nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    last = nn.Linear(hidden[-1], 1)
    nn.init.normal_(last.weight, std=0.02)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def noise(width: int, action_dim: int) -> nn.Sequential:
    """The expert's state of an action [..., width] -> [..., action_dim], which `chains.bounded_std` makes a std of."""
    return nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, action_dim))


def on_expert(
    policy: Any, reads: int, hidden: Sequence[int], width: int, *, critic_too: bool, noise_head: str, seed: int
) -> None:
    """Give a flow policy exactly these heads: a critic on `reads` numbers, a noise head on the expert's `width`.

    Raises ValueError for ReinFlow's noise head, beside the expert.
    """
    if noise_head == "context":
        raise ValueError("the published policies have no noise head beside the expert: use flow_noise, on it")
    wanted: dict[str, Callable[[], nn.Module] | None] = {
        "value_head": partial(critic, reads, hidden) if critic_too else None,
        "noise_head": partial(noise, width, policy.action_dim) if noise_head == "expert" else None,
    }
    attach(policy, wanted, seed)


def attach(policy: Any, wanted: Mapping[str, Callable[[], nn.Module] | None], seed: int) -> None:
    """Give a policy the heads that are wanted, new ones by the seed, beside the weights it has; remove the others."""
    device = next(policy.parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "heads") % 2**32)
        for name, make in wanted.items():
            if make is None:
                policy._modules.pop(name, None)
            elif name not in policy._modules:
                setattr(policy, name, make().to(device))
