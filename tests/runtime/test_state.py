"""Optimiser state survives the round trip through named tensors and JSON, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.runtime.checkpoint import load, save
from genrl.runtime.state import pack, unpack


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-3 / 3},
        {"params": model[2].parameters(), "betas": (0.8, 0.95)},
    ]
    return model, torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.017)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: object, updates: int) -> None:
    for _ in range(updates):
        optimizer.zero_grad()
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(model, optimizer, scheduler, 3)
    tensors, packed = pack({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    path = save(
        tmp_path,
        3,
        tensors={"model": model.state_dict(), "state": tensors},
        state={"p": packed},
        keep=1,
    )
    torch.manual_seed(1)
    train(model, optimizer, scheduler, 4)

    other, fresh = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.LambdaLR(fresh, lambda step: 1 / (1 + step))
    loaded = load(path)
    other.load_state_dict(loaded.tensors["model"])
    state = unpack(loaded.tensors["state"], loaded.state["p"])
    fresh.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["scheduler"])
    torch.manual_seed(1)
    train(other, fresh, schedule, 4)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    assert equal(optimizer.state_dict(), fresh.state_dict())
    assert equal(scheduler.state_dict(), schedule.state_dict())


def test_trees_keep_their_types() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0)}, 7: {}},
        "0": torch.ones(1),
        0: torch.zeros(1),
        "a/b": torch.tensor([1]),
        "a": {"b": torch.tensor([2]), "$tuple": (1, [2.5, None]), "$tensor": "x"},
        "numbers": (0.1, 1e-300, -0.0, 2**70, True, float("inf")),
        "empty": [(), [], {}],
    }
    tensors, packed = pack(tree)
    assert equal(tree, unpack(tensors, json.loads(json.dumps(packed))))


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), {(1, 2): 3}])
def test_what_cannot_be_stored_is_named(value: object) -> None:
    with pytest.raises(TypeError, match="optimizer/what"):
        pack({"optimizer": {"what": value}})
