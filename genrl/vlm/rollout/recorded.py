"""A micro-batch of answers as what a loss is made of: prompts, tokens, and the estimated tensors of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from pydantic import TypeAdapter
from torch import Tensor

from genrl.runtime.weights import state
from genrl.vlm.policies.policy import Encoded
from genrl.vlm.policies.processor import Tokens
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.rollout.token_batch import TokenBatch

TOTALS = ("rows", "tokens", "groups")
PRESET: TypeAdapter[Preset] = TypeAdapter(Preset)


@dataclass(frozen=True)
class Asked:
    """What the policy is called with. group int64 [B]: which of the prompts each answer is to; changed: the same
    prompts with degraded pictures, where the loss reads them. preset: the method of this iteration, None where it is
    not made of named functions. round: see `contract.Estimating`."""

    prompts: Sequence[Encoded]
    group: Tensor
    temperature: float
    preset: Preset | None = None
    changed: Sequence[Encoded] | None = None
    round: tuple[int | str, ...] = ()

    def dumped(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON, tensors): the prompts that are asked alone."""
        # The prompts that this micro-batch asks: pictures of all others would make the dump many times as large.
        numbers, group = torch.unique(self.group, return_inverse=True)
        used = [self.prompts[n] for n in numbers.tolist()]
        changed = None if self.changed is None else [self.changed[n] for n in numbers.tolist()]
        tree = {
            "prompts": [tree_of(prompt) for prompt in used],
            "changed": None if changed is None else [tree_of(prompt) for prompt in changed],
            "group": group,
        }
        tensors, packed = state.pack(tree)
        preset = None if self.preset is None else PRESET.dump_python(self.preset, mode="json")
        info = {"asked": packed, "temperature": self.temperature, "preset": preset, "round": self.round}
        return info, {f"inputs/{name}": tensor for name, tensor in tensors.items()}

    @classmethod
    def from_dump(cls, info: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self | None:
        """The reverse of `dumped`; None for a micro-batch without answers."""
        if "asked" not in info:
            return None
        inputs = {n.removeprefix("inputs/"): value for n, value in tensors.items() if n.startswith("inputs/")}
        tree = state.unpack(inputs, info["asked"])
        changed = None if tree["changed"] is None else [encoded_of(prompt) for prompt in tree["changed"]]
        preset = None if info["preset"] is None else PRESET.validate_python(info["preset"])
        prompts = [encoded_of(prompt) for prompt in tree["prompts"]]
        return cls(prompts, tree["group"], info["temperature"], preset, changed, tuple(info["round"]))


def tree_of(prompt: Encoded) -> dict[str, Any]:
    """A prompt as `runtime.state.pack` takes it."""
    tokens = {"ids": prompt.tokens.ids, "kinds": prompt.tokens.kinds, "pixels": prompt.tokens.pixels}
    return {"tokens": tokens, "positions": prompt.positions, "next": prompt.next_position, "where": prompt.where}


def encoded_of(tree: Mapping[str, Any]) -> Encoded:
    """The reverse of `tree_of`."""
    return Encoded(Tokens(**tree["tokens"]), tree["positions"], tree["next"], tree["where"])


def token_tensors(batch: TokenBatch) -> dict[str, Tensor]:
    """The rows of a batch as tensors by name, for `token_batch`."""
    tensors: dict[str, Tensor] = {f"extra/{name}": value for name, value in batch.extra.items()}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value
        elif isinstance(value, int):
            tensors[field.name] = torch.tensor(value)
    return tensors


def token_batch(tensors: Mapping[str, Tensor]) -> TokenBatch:
    """The reverse of `token_tensors`; other names are left out. Rows are scored on the CPU."""
    names = {field.name for field in fields(TokenBatch)}
    named: dict[str, Any] = {name: value.cpu() for name, value in tensors.items() if name in names}
    named |= {name: int(value) for name, value in named.items() if name in TOTALS}
    extra = {name.removeprefix("extra/"): value.cpu() for name, value in tensors.items() if name.startswith("extra/")}
    return TokenBatch(**named, extra=extra)
