"""The released trainers' prompt orders: golden trainers_samplers, exactly."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import prompt_orders


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
        same(name, [prompt_orders.k_repeat_order(rows, iteration=e, **size, **common) for e in epochs])
    orders = {
        "paco_k_repeat": prompt_orders.distributed_k_repeat_order,
        "ff_k_repeat": prompt_orders.distributed_k_repeat_order,
        "ff_group_contiguous": prompt_orders.group_contiguous_order,
        "ff_group_distributed": prompt_orders.group_distributed_order,
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
    order = prompt_orders.distributed_k_repeat_order(
        500, prompts, world_size=world, batch_size=batch, group_size=group, seed=0, epoch=epoch
    )
    assert order.shape[0] == world and order.shape[2] == batch
    counts = Counter(order.flatten().tolist())
    assert set(counts.values()) == {group} and len(counts) >= prompts


def test_indivisible_sizes_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="12 must divide by 5; nearest that does: 10 or 15"):
        prompt_orders.k_repeat_order(50, world_size=4, batch_size=3, group_size=5, seed=0, iteration=0)
    with pytest.raises(ValueError, match="9 must divide by 4"):
        prompt_orders.group_contiguous_order(50, 9, world_size=4, batch_size=3, group_size=6, seed=0, epoch=0)
    with pytest.raises(ValueError, match="6 must divide by 4"):
        prompt_orders.group_distributed_order(50, 8, world_size=4, batch_size=3, group_size=6, seed=0, epoch=0)
    with pytest.raises(ValueError, match="only 5"):
        prompt_orders.distributed_k_repeat_order(5, 8, world_size=4, batch_size=3, group_size=6, seed=0, epoch=0)
