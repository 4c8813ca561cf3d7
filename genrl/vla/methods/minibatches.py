"""Decisions of a rollout dealt to optimiser steps, over several processes: the same minibatches however many there are.

Every process has some of the decisions. All know how many each has, and draw one permutation of all of them; each then
computes its own part of a minibatch, and the gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.mdp.noise import generator


class Minibatch(NamedTuple):
    """mine int64 [n]: which of this process's decisions; total: how many there are over all processes; most: the n of
    the process that has most of them."""

    mine: Tensor
    total: int
    most: int


def minibatches(counts: Sequence[int], process: int, size: int, *keys: int | str) -> Iterator[Minibatch]:
    """One pass over all decisions in parts of about `size`, in an order that the keys decide.

    counts: decisions of each process. The parts differ by one decision at most, so that none is a small remainder; a
    process may have nothing of a part. Without decisions there is no part.
    """
    total = sum(counts)
    if total == 0:
        return
    ends = torch.tensor(counts).cumsum(0)
    order = torch.randperm(total, generator=generator(*keys))
    for part in order.tensor_split(max(1, round(total / size))):
        owner = torch.bucketize(part, ends, right=True)
        own = part[owner == process] - sum(counts[:process])
        yield Minibatch(own, len(part), int(owner.bincount().max()))
