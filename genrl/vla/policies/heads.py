"""New heads of published policies: the critic and the noise head of pi_RL (arXiv 2510.25889)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from genrl.mdp.noise import seeded


def critic(width: int, hidden: Sequence[int], values: int) -> nn.Sequential:
    """[B, width] -> [B, values], ReLU. Hidden layers are Kaiming-normal (fan out), the last N(0, .02^2), biases 0."""
    layers: list[nn.Module] = []
    for before, after in zip((width, *hidden[:-1]), hidden, strict=True):
        linear = nn.Linear(before, after)
        nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    last = nn.Linear(hidden[-1], values)
    nn.init.normal_(last.weight, std=0.02)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def noise(width: int, action_dim: int) -> nn.Sequential:
    """The expert's state of an action [..., width] -> [..., action_dim], which `chains.bounded_std` makes a std of."""
    return nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, action_dim))


def on_expert(
    policy: Any, reads: int, hidden: Sequence[int], width: int, *, values: int, noise_head: str, seed: int
) -> None:
    """Give a flow policy exactly these heads: a critic of so many values on `reads` numbers (0: none), a noise head on
    the expert's `width`.

    Raises ValueError for ReinFlow's noise head, beside the expert.
    """
    if noise_head == "context":
        raise ValueError("the published policies have no noise head beside the expert: use flow_noise, on it")
    wanted: dict[str, Callable[[], nn.Module] | None] = {
        "value_head": partial(critic, reads, hidden, values) if values else None,
        "noise_head": partial(noise, width, policy.action_dim) if noise_head == "expert" else None,
    }
    attach(policy, wanted, values, seed)


def critic_of(policy: nn.Module) -> nn.Module:
    """The critic of any policy. Raises ValueError where it has none."""
    head = policy._modules.get("value_head")
    if head is None:
        raise ValueError("this policy has no critic: see with_heads")
    return head


def values_of(policy: nn.Module) -> int:
    """How many values the critic of a published policy gives; 0 without one."""
    head: Any = policy._modules.get("value_head")
    return 0 if head is None else int(head[-1].out_features)


def attach(policy: Any, wanted: Mapping[str, Callable[[], nn.Module] | None], values: int, seed: int) -> None:
    """Give a policy the heads that are wanted, new ones by the seed, beside the weights it has; remove the others, and
    a critic of another number of values."""
    device = next(policy.parameters()).device
    if values_of(policy) != values:
        policy._modules.pop("value_head", None)
    with seeded(seed, "heads"):
        for name, make in wanted.items():
            if make is None:
                policy._modules.pop(name, None)
            elif name not in policy._modules:
                setattr(policy, name, make().to(device))
