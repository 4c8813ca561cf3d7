"""How a reward is called: in smaller batches, and once per different sample, by the content of the sample.

Both are for pointwise rewards, whose scores depend on the sample alone. On most devices the last bits of a score depend
on which samples share a batch, so results with and without them may differ there.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.contract import Reward, close, move, name_of, needs, read


class Calls:
    """A reward that asks `reward` for at most `batch_size` samples at once, and for none of the last `cache` samples.

    A sample is the same where its pixels, their size and type, its prompt and its columns are. "No score" is not
    remembered. Raises ValueError for a reward that is not pointwise.
    """

    def __init__(self, reward: Reward, *, batch_size: int | None = None, cache: int = 0):
        if needs(reward).kind != "pointwise":
            raise ValueError(
                f"reward {name_of(reward)!r} compares samples with each other; batch_size and cache are for rewards "
                "that do not"
            )
        self.reward, self.batch_size, self.cache = reward, batch_size, cache
        self.__signature__ = inspect.signature(reward)
        self.hits = self.misses = 0
        self._kept: OrderedDict[bytes, _Row] = OrderedDict()

    def __call__(self, **arguments: Sequence[Any]) -> Any:
        count = len(next(iter(arguments.values())))
        if not self.cache:
            return _columns(self._ask(arguments, list(range(count))))
        keys = [digest({name: values[row] for name, values in arguments.items()}) for row in range(count)]
        known = {key: self._kept[key] for key in keys if key in self._kept}
        rows = [row for row, key in enumerate(keys) if key not in known and key not in keys[:row]]
        self.hits, self.misses = self.hits + count - len(rows), self.misses + len(rows)
        known |= zip((keys[row] for row in rows), self._ask(arguments, rows), strict=True)
        for key in keys:
            if not math.isnan(known[key][0]):
                self._kept[key] = known[key]
                self._kept.move_to_end(key)
        while len(self._kept) > self.cache:
            self._kept.popitem(last=False)
        return _columns([known[key] for key in keys])

    def to(self, device: str) -> None:
        """Move the model of the reward."""
        move(self.reward, device)

    def close(self) -> None:
        """End what the reward has started."""
        close(self.reward)

    def _ask(self, arguments: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[_Row]:
        size = self.batch_size or max(1, len(rows))
        found: list[_Row] = []
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            scores = read(
                self.reward(**{name: _select(values, chosen) for name, values in arguments.items()}),
                len(chosen),
                name_of(self.reward),
            )
            parts = scores.parts.items()
            found += [(value, {name: row[k] for name, row in parts}) for k, value in enumerate(scores.values)]
        return found


_Row = tuple[float, dict[str, float]]  # score and parts of one sample


def inner(reward: Reward) -> Reward:
    """The reward itself, where it is called in smaller batches or from a cache."""
    return reward.reward if isinstance(reward, Calls) else reward


def _columns(rows: Sequence[_Row]) -> tuple[list[float], dict[str, list[float]]]:
    names = dict.fromkeys(name for _, parts in rows for name in parts)
    return [value for value, _ in rows], {name: [parts.get(name, math.nan) for _, parts in rows] for name in names}


def _select(values: Sequence[Any], rows: Sequence[int]) -> Any:
    return [values[row] for row in rows] if isinstance(values, list) else values[list(rows)]  # type: ignore[call-overload]


def digest(sample: Mapping[str, Any]) -> bytes:
    """SHA-256 of one sample: each value with its name, type and size. Raises ValueError for one of another type."""
    hashed = hashlib.sha256()
    for name in sorted(sample):
        for piece in (name.encode(), *_pieces(name, sample[name])):
            hashed.update(len(piece).to_bytes(8, "little"))
            hashed.update(piece)
    return hashed.digest()


def _pieces(name: str, value: Any) -> list[bytes]:
    import torch
    from PIL.Image import Image

    if isinstance(value, torch.Tensor):
        return [f"{value.dtype} {list(value.shape)}".encode(), value.detach().cpu().contiguous().numpy().tobytes()]
    if isinstance(value, Image):
        return [f"{value.mode} {value.size}".encode(), value.tobytes()]
    if isinstance(value, list) and value and isinstance(value[0], Image):
        return [f"{len(value)} pictures".encode(), *(piece for image in value for piece in _pieces(name, image))]
    try:
        return [json.dumps(value, sort_keys=True).encode()]
    except (TypeError, ValueError) as error:
        raise ValueError(f"cache: the column {name!r} holds a {type(value).__name__}, which has no digest") from error
