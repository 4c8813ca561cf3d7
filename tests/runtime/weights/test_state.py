"""State survives the round trip through named tensors and JSON, bit for bit (optimisers': `test_optimizers`)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from genrl.runtime.weights.state import pack, unpack


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_trees_keep_their_types_and_bits() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0)}, 7: {}},
        **{"0": torch.ones(1), 0: torch.zeros(1), "a/b": torch.tensor([1])},
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
