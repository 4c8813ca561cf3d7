"""One rule for randomness: a random tensor is a pure function of the keys that name it, and so is the order of prompts.

A sample can be re-made alone, and results do not depend on batch size, number of processes or order of work: which
prompts an iteration trains on is a function of (seed, iteration), and which process computes what changes no number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def derive_seed(*keys: int | str) -> int:
    """A seed in [0, 2**63) from any sequence of integers and strings; the same on every platform and Python.

    Keys are length-prefixed and typed before hashing (blake2b), so ("a", "bc") differs from ("ab", "c"), 1 from "1".
    """
    digest = hashlib.blake2b(digest_size=8)
    for key in keys:
        # True is an int, and would silently share the seed of 1.
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise TypeError(f"a seed key must be an int or a str, got {type(key).__name__}: {key!r}")
        text = key.encode() if isinstance(key, str) else str(key).encode()
        digest.update(f"{'s' if isinstance(key, str) else 'i'}{len(text)}:".encode() + text)
    # 63 bits: what a signed integer of 64 holds, as numpy, JSON readers and tensors keep it.
    return int.from_bytes(digest.digest(), "big") >> 1


def generator(*keys: int | str) -> torch.Generator:
    """A fresh CPU generator seeded by the keys.

    torch's CPU generator keeps the low 32 bits of a seed only: of n seeds two agree with a probability of about
    n^2 / 2^33 (1 % for 10,000). Two samples with the same noise do no harm; do not rely on more than that.
    """
    return torch.Generator().manual_seed(derive_seed(*keys))


@contextmanager
def seeded(*keys: int | str) -> Iterator[None]:
    """Within the block torch's global CPU generator begins from the keys; afterwards it is as it was."""
    # Without devices: forking their generators would start CUDA in processes that never use it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(*keys))
        yield


def keyed_noise(shape: Sequence[int], *keys: int | str) -> Tensor:
    """Standard normal float32 CPU tensor [shape], a function of (shape, keys) alone up to torch's own rounding."""
    return torch.randn(tuple(shape), generator=generator(*keys), dtype=torch.float32)


def prompt_indices(num_prompts: int, prompts_per_iteration: int, *, seed: int, iteration: int) -> list[int]:
    """Rows of the prompt file for one iteration, in slot order; slot j of every process count is the same row.

    Slot j of iteration i is position `i * prompts_per_iteration + j` of an endless sequence of epochs, each a
    permutation of all rows keyed by (seed, epoch): every row is used once before any is used twice, iterations may
    straddle epochs, and nothing needs to be saved to resume.
    Raises ValueError for an empty file, no slot or a negative iteration.
    """
    if num_prompts < 1 or prompts_per_iteration < 1 or iteration < 0:
        raise ValueError(
            "prompt_indices needs at least one prompt, one prompt per iteration and an iteration >= 0; got "
            f"{num_prompts}, {prompts_per_iteration} and {iteration}"
        )
    first = iteration * prompts_per_iteration
    epochs = range(first // num_prompts, (first + prompts_per_iteration - 1) // num_prompts + 1)
    # An iteration may lie across two epochs, or hold several where there are few prompts.
    rows = {epoch: _permutation(num_prompts, generator(seed, "prompts", epoch)) for epoch in epochs}
    return [rows[p // num_prompts][p % num_prompts] for p in range(first, first + prompts_per_iteration)]


def bucketed_indices(
    buckets: Sequence[Hashable], prompts_per_iteration: int, together: int, *, seed: int, iteration: int
) -> list[int]:
    """Deal prompts as `prompt_indices` does, where `together` rows in a row of slots are of one bucket. buckets: that
    of every row.

    An epoch holds as many rows of each bucket as `together` divides, chosen and cut by a permutation keyed by (seed,
    epoch, bucket), and the pieces in an order keyed by (seed, epoch): at most together - 1 rows of a bucket sit out an
    epoch. Raises ValueError where `together` does not divide the prompts of an iteration, or no bucket has as many.
    """
    members: dict[Hashable, list[int]] = {}
    for row, bucket in enumerate(buckets):
        members.setdefault(bucket, []).append(row)
    pieces, pieces_per_iteration = (
        sum(len(rows) // together for rows in members.values()),
        prompts_per_iteration // together,
    )
    if prompts_per_iteration % together or not pieces:
        raise ValueError(f"{prompts_per_iteration} prompts by {together} of one bucket, of {len(buckets)} rows")
    first = iteration * pieces_per_iteration
    epochs: dict[int, list[list[int]]] = {}
    for epoch in range(first // pieces, (first + pieces_per_iteration - 1) // pieces + 1):
        cut = []
        for number, rows in enumerate(members.values()):
            order = [rows[k] for k in _permutation(len(rows), generator(seed, "prompts", epoch, number))]
            cut += [order[s : s + together] for s in range(0, len(rows) - together + 1, together)]
        epochs[epoch] = [cut[k] for k in _permutation(pieces, generator(seed, "buckets", epoch))]
    return [row for p in range(first, first + pieces_per_iteration) for row in epochs[p // pieces][p % pieces]]


def shares(count: int, size: int, process: int, num_processes: int) -> Iterator[tuple[list[int], bool]]:
    """(rows, whether they count) of this process: `count` rows in batches of `size`, assigned to the processes in turn.

    All processes get the same number of batches, since sharded models sample in lockstep; a surplus one repeats the
    last and does not count.
    """
    cut = [list(range(first, min(first + size, count))) for first in range(0, count, size)]
    return turns(cut, process, num_processes)


def turns(cut: Sequence[list[int]], process: int, num_processes: int) -> Iterator[tuple[list[int], bool]]:
    """`shares` of rows that are cut into batches."""
    for k in range(process, -(-len(cut) // num_processes) * num_processes, num_processes):
        yield cut[min(k, len(cut) - 1)], k < len(cut)


def _permutation(n: int, source: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(n, generator=source).tolist()
    return order
