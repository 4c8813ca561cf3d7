"""Which prompts an iteration trains on, and in which order: pure functions of (seed, iteration)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from genrl.mdp.noise import generator


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
    rows = {epoch: _permutation(num_prompts, generator(seed, "prompts", epoch)) for epoch in epochs}
    return [rows[p // num_prompts][p % num_prompts] for p in range(first, first + prompts_per_iteration)]


def shares(count: int, size: int, process: int, num_processes: int) -> Iterator[tuple[list[int], bool]]:
    """(rows, whether they count) of this process: `count` rows in batches of `size`, assigned to the processes in turn.

    All processes get the same number of batches, since sharded models sample in lockstep; a surplus one repeats the
    last and does not count.
    """
    cut = [list(range(first, min(first + size, count))) for first in range(0, count, size)]
    for k in range(process, -(-len(cut) // num_processes) * num_processes, num_processes):
        yield cut[min(k, len(cut) - 1)], k < len(cut)


def _permutation(n: int, source: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(n, generator=source).tolist()
    return order
