"""Text encoding once per distinct prompt: `encode_prompt` of a pipeline, memoised on the instance."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _Ragged(Exception):
    """Encodings of single prompts that do not make a batch."""


MAX_ENTRIES = 4096
"""Distinct prompts kept; the least recently used goes first."""


def memoise_encode_prompt(pipe: Any, *, offload: bool = False) -> None:
    """Wrap `pipe.encode_prompt` so that each distinct (prompt, negative prompt, settings) is encoded once.

    A batch is put together from its rows, each encoded alone: embeddings of a prompt do not depend on its
    neighbours. Where rows differ in length (encoders that pad to the longest of the batch) the batch is encoded as a
    whole and kept under the whole of its prompts. Calls with tensors or images as arguments are passed through.
    Encodings are kept on the CPU where the device is an accelerator. With `offload` the text encoders wait on the CPU
    and are on the device only while they encode.
    """
    original = pipe.encode_prompt
    encoders = [c for name, c in pipe.components.items() if name.startswith("text_encoder") and c is not None]
    encoders = encoders if offload else []
    home = pipe._execution_device
    for encoder in encoders:
        encoder.to("cpu")
    if offload:
        _keep_execution_device(pipe, home)
    signature = inspect.signature(original)
    cache: OrderedDict[Hashable, Any] = OrderedDict()
    axes: list[Any] = []

    def remember(key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in cache:
            with torch.no_grad(), _on_device(encoders, home):
                cache[key] = _to(make(), torch.device("cpu"))
            if len(cache) > MAX_ENTRIES:
                cache.popitem(last=False)
        cache.move_to_end(key)
        return cache[key]

    def axes_of(row: dict[str, Any], encoded: Any) -> Any:
        """Found once, by encoding one prompt twice over: pipelines differ, and text ids have no batch axis."""
        if not axes:
            doubled = {k: v * 2 if _per_prompt(v, 1) else v for k, v in row.items()}
            with torch.no_grad(), _on_device(encoders, home):
                axes.append(_batch_axes(encoded, _to(original(**doubled), torch.device("cpu"))))
        return axes[0]

    @functools.wraps(original)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        prompts = arguments.get("prompt")
        if not isinstance(prompts, list) or not all(_hashable(v) for v in arguments.values()):
            with torch.no_grad(), _on_device(encoders, home):
                return original(*args, **kwargs)
        device = torch.device(arguments.get("device") or pipe._execution_device)
        rows = []
        for r in range(len(prompts)):
            row = {k: [v[r]] if _per_prompt(v, len(prompts)) else v for k, v in arguments.items()}
            rows.append(remember(_freeze(row), functools.partial(original, **row)))
        if len(rows) == 1:
            return _to(rows[0], device)
        try:
            return _to(_join(rows, axes_of(row, rows[-1])), device)
        except _Ragged:
            return _to(remember(_freeze(arguments), functools.partial(original, **arguments)), device)

    pipe.encode_prompt = encode_prompt


@contextmanager
def _on_device(encoders: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    for encoder in encoders:
        encoder.to(device)
    try:
        yield
    finally:
        for encoder in encoders:
            encoder.to("cpu")


def _keep_execution_device(pipe: Any, device: torch.device) -> None:
    """A pipeline takes its device from its first module, which may now wait on the CPU."""
    kind = type(pipe)
    pipe.__class__ = type(kind.__name__, (kind,), {"_execution_device": property(lambda self: device)})


def _per_prompt(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _hashable(value: Any) -> bool:
    if isinstance(value, list):
        return all(_hashable(v) for v in value)
    return value is None or isinstance(value, (str, int, float, bool, torch.device, torch.dtype))


def _freeze(arguments: dict[str, Any]) -> Hashable:
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(arguments.items()))


def _batch_axes(one: Any, two: Any) -> Any:
    """Which axis of each output grows with the number of prompts; None for an output that does not."""
    if isinstance(one, tuple):
        return tuple(_batch_axes(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, Tensor):
        grown = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        return grown[0] if grown else None
    return None


def _join(rows: Sequence[Any], axes: Any) -> Any:
    """Batch of the rows' outputs. Raises _Ragged where they do not fit together (different lengths)."""
    first = rows[0]
    if isinstance(first, tuple):
        return tuple(_join([row[k] for row in rows], axes[k]) for k in range(len(first)))
    if isinstance(first, list):  # one entry per prompt, of any length
        return [item for row in rows for item in row]
    if isinstance(first, Tensor):
        if any(row is None or row.shape != first.shape for row in rows):
            raise _Ragged
        return first if axes is None else torch.cat(list(rows), dim=axes)
    if any(row is not None for row in rows) and first is None:
        raise _Ragged
    return first


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_to(v, device) for v in value)
    return value
