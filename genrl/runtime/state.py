"""Training state as named tensors and JSON: optimisers, schedulers, averages, random-number generators.

Nothing is pickled. The round trip is exact: tensors keep their bits, floats their repr, tuples stay tuples.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MARKS = ("$tensor", "$tuple", "$dict")


def pack(tree: object) -> tuple[dict[str, Tensor], Any]:
    """Any nesting of dict, list, tuple, numbers, strings, None and tensors -> (named tensors, JSON).

    A tensor is named by its path, `state/0/exp_avg`. `optimizer.state_dict()` is such a tree.
    Raises TypeError naming the path of anything else.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(tree, "", tensors)


def unpack(tensors: Mapping[str, Tensor], packed: Any) -> Any:
    """The tree that `pack` was given. Raises KeyError where a tensor is missing."""
    if isinstance(packed, list):
        return [unpack(tensors, value) for value in packed]
    if not isinstance(packed, dict):
        return packed
    if "$tensor" in packed:
        return tensors[packed["$tensor"]]
    if "$tuple" in packed:
        return tuple(unpack(tensors, value) for value in packed["$tuple"])
    pairs = packed["$dict"] if "$dict" in packed else packed.items()
    return {key: unpack(tensors, value) for key, value in pairs}


def _encode(tree: object, path: str, tensors: dict[str, Tensor]) -> Any:
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Tensor):
        while path in tensors:  # {"a/b": ..., "a": {"b": ...}}, or the keys 0 and "0"
            path += "~"
        tensors[path] = tree
        return {"$tensor": path}
    if isinstance(tree, (list, tuple)):
        values = [_encode(value, f"{path}/{i}".lstrip("/"), tensors) for i, value in enumerate(tree)]
        return values if isinstance(tree, list) else {"$tuple": values}
    if isinstance(tree, Mapping):
        return _encode_mapping(tree, path, tensors)
    raise TypeError(f"cannot store {path or 'the state'} without pickle: it is a {type(tree).__name__}")


def _encode_mapping(tree: Mapping[Any, object], path: str, tensors: dict[str, Tensor]) -> Any:
    for key in tree:
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise TypeError(f"cannot store {path or 'the state'}: key {key!r} is neither a string nor an integer")
    pairs = [(key, _encode(value, f"{path}/{key}".lstrip("/"), tensors)) for key, value in tree.items()]
    plain = all(isinstance(key, str) and key not in _MARKS for key in tree)
    return dict(pairs) if plain else {"$dict": [list(pair) for pair in pairs]}


def rng_state() -> dict[str, Tensor]:
    """The state of the global generators of torch (CPU, and the current CUDA device), Python and numpy."""
    version, words, gauss = random.getstate()
    assert version == 3
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937" and isinstance(key, np.ndarray)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(key.astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Put every generator back. A CUDA state is ignored where there is no such device."""
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, state["numpy_gauss"].item()))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
