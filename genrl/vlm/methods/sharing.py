"""How the rows of an iteration are shared out to updates and micro-batches, and the rows of all processes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.updating import deal
from genrl.vlm.rollout.token_batch import TokenBatch, micro_batches

PER_TOKEN = (
    "mask", "sampler", "old", "ref", "entropy", "masked_image", "ema", "answer_mask", "divergence",
    "credit", "returns", "old_value", "step", "draw", "turn", "turn_reward", "matched",
    "kl_cov", "proxy", "held", "height",
)  # fmt: skip
"""Tensors that are [B, T] where they have two dimensions; others have a row's numbers."""


class Update(NamedTuple):
    """One optimiser step's share of an iteration.

    parts: int64 rows of this process, micro-batch by micro-batch. most: the parts of the process that has most.
    rows, tokens, groups: of all processes together.
    """

    parts: list[Tensor]
    most: int
    rows: int
    tokens: int
    groups: int

    @property
    def passes(self) -> list[Tensor]:
        """The parts, then an empty one for each that only another process has."""
        return [*self.parts, *[torch.zeros(0, dtype=torch.int64)] * (self.most - len(self.parts))]

    def part(self, batch: TokenBatch, rows: Tensor) -> TokenBatch:
        """Some rows of a batch, with the totals of this update."""
        return replace(batch.select(rows), rows=self.rows, tokens=self.tokens, groups=self.groups)


def updates_of(
    mask: Tensor,
    size: int,
    *,
    updates: int,
    micro: int | None,
    seed: int,
    loop: Loop,
    whole_groups: bool = False,
) -> list[Update]:
    """The updates of this process's rows, mask [B, T], whole groups of `size` each, in an order that the seed decides,
    the same for any number of processes. whole_groups: a micro-batch has no part of a group."""
    rank, own_groups = loop.process.accelerator.process_index, len(mask) // size
    group = torch.arange(own_groups).repeat_interleave(size)
    bare = TokenBatch(mask, group, extra={"row": torch.arange(len(mask))})
    lengths = gather_object([mask.sum(1).reshape(own_groups, size).sum(1)])  # tokens of each group
    tokens = torch.cat(lengths)
    counts = [len(one) for one in lengths]
    made = []
    # by groups of all processes, so that their number changes no update
    for dealt in deal(counts, rank, min(updates, len(tokens)), seed, "updates", loop.iteration):
        number = len(dealt.every)
        # Sorted, so that answers of similar place stay together; the order within an update changes no sum but its
        # rounding.
        rows = (dealt.mine.sort().values[:, None] * size + torch.arange(size)).flatten()
        at_once = micro or number * size
        # cut by a batch of masks alone: what is estimated later is cut in the same places
        parts = micro_batches(bare.select(rows), at_once, whole_groups=whole_groups) if len(rows) else []
        tokens_here = int(tokens[dealt.every].sum())
        made.append(Update([part.extra["row"] for part in parts], 0, number * size, tokens_here, number))
    # Where weights are in shards every process makes as many passes as the busiest.
    most = [max(counts) for counts in zip(*gather_object([[len(u.parts) for u in made]]), strict=True)]
    return [update._replace(most=number) for update, number in zip(made, most, strict=True)]


def batch_of_all(mine: Mapping[str, Tensor], size: int) -> TokenBatch:
    """The rows of all processes, one process after the other, padded to the longest, in groups of `size`. What is no
    field of the batch is in `extra`."""
    every = gather_object([dict(mine)])
    longest = max(one["mask"].shape[1] for one in every)
    whole = {
        name: torch.cat([padded(one[name], longest) if _per_token(name, one[name]) else one[name] for one in every])
        for name in mine
    }
    mask = whole.pop("mask")
    return TokenBatch(
        mask=mask,
        group=torch.arange(len(mask)) // size,
        rewards=whole.pop("rewards", None),
        old_log_prob=whole.pop("old", None),
        sampler_log_prob=whole.pop("sampler", None),
        ref_log_prob=whole.pop("ref", None),
        extra=whole,
    )


def ours(batch: TokenBatch, counts: Sequence[int], rank: int, length: int) -> TokenBatch:
    """This process's rows (`counts`: of each process), with their numbers as extra["row"], and without the padding that
    other processes' longer answers brought."""
    first = sum(counts[:rank])
    own = batch.select(torch.arange(first, first + counts[rank]))

    def short(value: Tensor | None) -> Tensor | None:
        return value[:, :length] if value is not None and value.dim() == 2 else value  # [B, 1] stays as it is

    extra = {name: value[:, :length] if _per_token(name, value) else value for name, value in own.extra.items()}
    return replace(
        own,
        mask=own.mask[:, :length],
        old_log_prob=short(own.old_log_prob),
        sampler_log_prob=short(own.sampler_log_prob),
        ref_log_prob=short(own.ref_log_prob),
        advantage=short(own.advantage),
        weight=short(own.weight),
        extra=extra | {"row": torch.arange(counts[rank])},
    )


def padded(values: Tensor, length: int) -> Tensor:
    """[B, T] -> [B, length], with zeros on the right. Raises ValueError where T is more."""
    if values.shape[1] > length:
        raise ValueError(f"values of {list(values.shape)} tokens cannot be padded to {length}: some would be lost")
    return torch.nn.functional.pad(values, (0, length - values.shape[1]))


def _per_token(name: str, value: Tensor) -> bool:
    return name in PER_TOKEN and value.dim() == 2
