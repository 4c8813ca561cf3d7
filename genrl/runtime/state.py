"""Training state as named tensors and JSON: optimisers, schedulers, averages.

Nothing is pickled. The round trip is exact: tensors keep their bits, floats their repr, tuples stay tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
