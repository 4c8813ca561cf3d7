"""Call a reward in smaller batches, and only once per distinct sample.

Both are for pointwise rewards, whose scores depend on the sample alone. On most devices the last bits of a score depend
on which samples share a batch, so there results with and without batching may differ in them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from genrl_rewards.contract import Reward, Scored, Scores, call, close, move, name_of, needs, read

Row: TypeAlias = tuple[float, dict[str, float]]
"""Score and parts of one sample."""


class Calls:
    """A reward that passes at most `batch_size` samples at once to `reward`, and remembers the last `cache` samples.

    Two samples are the same if their pixels (with size and type), prompts and columns are. "No score" is not
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
        self._remembered: OrderedDict[bytes, Row] = OrderedDict()

    def __call__(self, **arguments: Sequence[Any]) -> Scored:
        count = len(next(iter(arguments.values())))
        if not self.cache:
            return columns(self._score(arguments, list(range(count))))
        keys = [digest({name: values[row] for name, values in arguments.items()}) for row in range(count)]
        remembered = {key: self._remembered[key] for key in keys if key in self._remembered}
        new = [row for row, key in enumerate(keys) if key not in remembered and key not in keys[:row]]
        self.hits, self.misses = self.hits + count - len(new), self.misses + len(new)
        remembered |= zip((keys[row] for row in new), self._score(arguments, new), strict=True)
        for key in keys:
            # A failure may be a server's that is down for a minute: the sample gets its chance the next time.
            if not math.isnan(remembered[key][0]):
                self._remembered[key] = remembered[key]
                self._remembered.move_to_end(key)
        while len(self._remembered) > self.cache:
            self._remembered.popitem(last=False)
        return columns([remembered[key] for key in keys])

    def to(self, device: str) -> None:
        """Move the model of the reward."""
        move(self.reward, device)

    def close(self) -> None:
        """Stop what the reward has started."""
        close(self.reward)

    def _score(self, arguments: Mapping[str, Sequence[Any]], chosen: Sequence[int]) -> list[Row]:
        size = self.batch_size or max(1, len(chosen))
        scored: list[Row] = []
        for start in range(0, len(chosen), size):
            batch = chosen[start : start + size]
            result = call(self.reward, {name: _select(values, batch) for name, values in arguments.items()})
            scored += rows(read(result, len(batch), name_of(self.reward)))
        return scored


def inner(reward: Reward) -> Reward:
    """The reward itself, if it is wrapped in `Calls`."""
    return reward.reward if isinstance(reward, Calls) else reward


def rows(scores: Scores) -> list[Row]:
    """Scores and parts, sample by sample."""
    return [(value, {name: part[k] for name, part in scores.parts.items()}) for k, value in enumerate(scores.values)]


def columns(scored: Sequence[Row]) -> Scored:
    """The reverse of `rows`: what a reward returns. NaN for a part that a sample does not have."""
    # Batches are scored apart, and a reward may name a part only where it applies.
    names = dict.fromkeys(name for _, parts in scored for name in parts)
    return [value for value, _ in scored], {name: [parts.get(name, math.nan) for _, parts in scored] for name in names}


def _select(values: Any, chosen: Sequence[int]) -> Any:
    return [values[row] for row in chosen] if isinstance(values, list) else values[list(chosen)]


def digest(sample: Mapping[str, Any]) -> bytes:
    """SHA-256 of one sample: each value with its name, type and size. Raises ValueError for values of other types."""
    hashed = hashlib.sha256()
    for name in sorted(sample):
        for piece in (name.encode(), *_pieces(name, sample[name])):
            # With its length, or "ab" + "c" and "a" + "bc" would be one sample.
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
        raise ValueError(
            f"cache: the column {name!r} holds a {type(value).__name__}, which cannot be hashed; leave `cache` out"
        ) from error
