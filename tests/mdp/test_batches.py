"""Prompt order: this project's rule, and the released trainers' orders against golden trainers_samplers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import batches


@given(st.integers(1, 40), st.integers(1, 25), st.integers(0, 2**40), st.integers(0, 30))
def test_every_row_is_used_once_before_any_is_used_twice(rows: int, per_iteration: int, seed: int, start: int) -> None:
    used = []
    for iteration in range(start + 3):
        used += batches.prompt_indices(rows, per_iteration, seed=seed, iteration=iteration)
    for epoch in range(len(used) // rows):
        assert sorted(used[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 100))
def test_an_iteration_is_the_same_whatever_was_asked_before(rows: int, per_iteration: int, iteration: int) -> None:
    """Resuming needs no saved position, and a different number of prompts per iteration reads the same sequence."""
    alone = batches.prompt_indices(rows, per_iteration, seed=3, iteration=iteration)
    one_by_one = [
        batches.prompt_indices(rows, 1, seed=3, iteration=position)[0]
        for position in range(iteration * per_iteration, (iteration + 1) * per_iteration)
    ]
    assert alone == one_by_one


def test_seeds_and_epochs_give_different_orders() -> None:
    epochs = [tuple(batches.prompt_indices(50, 50, seed=s, iteration=i)) for s in range(3) for i in range(3)]
    assert len(set(epochs)) == 9


def test_the_order_is_pinned() -> None:
    """A run must read the same prompts tomorrow: a change of the rule is a change of every seed."""
    assert batches.prompt_indices(7, 5, seed=0, iteration=0) == PINNED[:5]
    assert batches.prompt_indices(7, 5, seed=0, iteration=1) == PINNED[5:]


PINNED = [4, 3, 5, 0, 6, 2, 1, 6, 3, 5]


@pytest.mark.parametrize(("rows", "count", "iteration"), [(0, 1, 0), (3, 0, 0), (3, 1, -1)])
def test_impossible_requests_are_refused(rows: int, count: int, iteration: int) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        batches.prompt_indices(rows, count, seed=0, iteration=iteration)


def test_released_orders(golden) -> None:
    data = golden("trainers_samplers")
    size = {"world_size": int(data["in_world"]), "batch_size": int(data["in_batch"])}
    rows, seed, asked = int(data["in_dataset"]), int(data["in_seed"]), int(data["in_m"])
    group = int(data["in_k"])
    compared = set()

    def same(name: str, ours: list[torch.Tensor]) -> None:
        compared.add(name)
        assert torch.equal(torch.stack(ours), torch.from_numpy(data[name])), name

    for name, shuffled in (("out_flow_grpo", True), ("out_dgpo_official", False)):
        epochs = range(len(data[name]))
        common = {"group_size": group, "seed": seed, "shuffled": shuffled}
        same(name, [batches.k_repeat_order(rows, iteration=e, **size, **common) for e in epochs])
    orders = {
        "paco_k_repeat": batches.distributed_k_repeat_order,
        "ff_k_repeat": batches.distributed_k_repeat_order,
        "ff_group_contiguous": batches.group_contiguous_order,
        "ff_group_distributed": batches.group_distributed_order,
    }
    for name, order in orders.items():
        k = int(data[f"in_{name}_k"]) if f"in_{name}_k" in data else group
        epochs = range(len(data[f"out_{name}"]))
        ours = [order(rows, asked, group_size=k, seed=seed, epoch=e, **size) for e in epochs]
        same(f"out_{name}", ours)
        assert ours[0].unique().numel() == int(data[f"out_{name}_m"])
    assert compared == {n for n in data.files if n.startswith("out_") and not n.endswith("_m")}


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 99))
def test_distributed_k_repeat_gives_whole_groups_per_epoch(
    world: int, batch: int, group: int, prompts: int, epoch: int
) -> None:
    order = batches.distributed_k_repeat_order(
        500, prompts, world_size=world, batch_size=batch, group_size=group, seed=0, epoch=epoch
    )
    assert order.shape[0] == world and order.shape[2] == batch
    counts = Counter(order.flatten().tolist())
    assert set(counts.values()) == {group} and len(counts) >= prompts


def test_indivisible_sizes_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="12 must divide by 5; nearest that does: 10 or 15"):
        batches.k_repeat_order(50, world_size=4, batch_size=3, group_size=5, seed=0, iteration=0)
    with pytest.raises(ValueError, match="9 must divide by 4"):
        batches.group_contiguous_order(50, 9, world_size=4, batch_size=3, group_size=6, seed=0, epoch=0)
    with pytest.raises(ValueError, match="6 must divide by 4"):
        batches.group_distributed_order(50, 8, world_size=4, batch_size=3, group_size=6, seed=0, epoch=0)
    with pytest.raises(ValueError, match="only 5"):
        batches.distributed_k_repeat_order(5, 8, world_size=4, batch_size=3, group_size=6, seed=0, epoch=0)


@given(count=st.integers(0, 40), size=st.integers(1, 7), processes=st.integers(1, 5))
def test_shares_have_every_row_once_and_processes_in_step(count: int, size: int, processes: int) -> None:
    found = [list(batches.shares(count, size, process, processes)) for process in range(processes)]
    assert len({len(mine) for mine in found}) == 1
    assert sorted(row for mine in found for rows, counts in mine if counts for row in rows) == list(range(count))
    assert all(0 < len(rows) <= size for mine in found for rows, _ in mine)
