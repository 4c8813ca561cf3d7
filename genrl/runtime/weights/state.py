"""Training state as named tensors and JSON: optimisers, schedulers, averages.

Nothing is pickled. The round trip is exact: tensors keep their bits, floats their repr, tuples stay tuples.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MARKS = ("$tensor", "$tuple", "$dict", "$subclass", "$dtype")


def pack(tree: object) -> tuple[dict[str, Tensor], Any]:
    """Any nesting of dict, list, tuple, numbers, strings, None and tensors -> (named tensors, JSON).

    A tensor is named by its path, `state/0/exp_avg`; one of a subclass made of plain tensors (torchao's quantised
    states) is taken apart by its `__tensor_flatten__`. `optimizer.state_dict()` is such a tree.
    Raises TypeError naming the path of anything else.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(tree, "", tensors)


def unpack(tensors: Mapping[str, Tensor], packed: Any) -> Any:
    """The tree that `pack` was given. Raises KeyError where a tensor is missing, ValueError where it is of a subclass
    that this process has not imported: nothing is imported because a file names it."""
    if isinstance(packed, list):
        return [unpack(tensors, value) for value in packed]
    if not isinstance(packed, dict):
        return packed
    if "$tensor" in packed:
        return tensors[packed["$tensor"]]
    if "$dtype" in packed:
        return getattr(torch, packed["$dtype"])
    if "$subclass" in packed:
        parts, context = unpack(tensors, packed["parts"]), unpack(tensors, packed["context"])
        return _subclass(packed["$subclass"]).__tensor_unflatten__(parts, context, None, None)
    if "$tuple" in packed:
        return tuple(unpack(tensors, value) for value in packed["$tuple"])
    pairs = packed["$dict"] if "$dict" in packed else packed.items()
    return {key: unpack(tensors, value) for key, value in pairs}


class Unchanging(dict[str, Any]):
    """A part of a state whose tensors nobody changes in place, however many there are: data, which grow by new ones."""


def copied(tree: Any) -> Any:
    """A tree as `pack` takes it, with tensors of its own but those in an `Unchanging`."""
    if isinstance(tree, dict) and not isinstance(tree, Unchanging):
        return {key: copied(value) for key, value in tree.items()}
    tensors, packed = pack(tree)
    if isinstance(tree, Unchanging):
        return unpack(tensors, packed)
    return unpack({name: tensor.detach().clone() for name, tensor in tensors.items()}, packed)


def _subclass(name: str) -> Any:
    module, _, attribute = name.partition(":")
    # Of what is imported already: a file must not have this process import what it names.
    kind = getattr(sys.modules.get(module), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise ValueError(f"the state holds tensors of {name}, which the optimiser of this run does not use")
    return kind


def _encode(tree: object, path: str, tensors: dict[str, Tensor]) -> Any:
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, torch.dtype):
        return {"$dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, Tensor) and is_traceable_wrapper_subclass(tree) and not isinstance(tree, DTensor):
        names, context = tree.__tensor_flatten__()
        parts = {name: _encode(getattr(tree, name), f"{path}/{name}", tensors) for name in names}
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        return {"$subclass": kind, "parts": parts, "context": _encode(context, path, tensors)}
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
    # JSON has string keys only, and an optimiser's state is keyed by numbers.
    plain = all(isinstance(key, str) and key not in _MARKS for key in tree)
    return dict(pairs) if plain else {"$dict": [list(pair) for pair in pairs]}
