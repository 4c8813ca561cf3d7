"""One rule for randomness: a random tensor is a pure function of the keys that name it.

A sample can be re-made alone, and results do not depend on batch size, number of processes or order of work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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
