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

    def remember(key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in cache:
            with torch.no_grad(), _on_device(encoders, home):
                cache[key] = _to(make(), torch.device("cpu"))
            if len(cache) > MAX_ENTRIES:
                cache.popitem(last=False)
        cache.move_to_end(key)
        return cache[key]

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
        joined = _join(rows, int(arguments.get("num_images_per_prompt", 1) or 1))
        if joined is None:
            joined = remember(_freeze(arguments), functools.partial(original, **arguments))
        return _to(joined, device)

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


def _join(rows: Sequence[Any], copies: int) -> Any:
    """Batch of the rows' outputs, or None where they do not fit together (different lengths)."""
    first = rows[0]
    if isinstance(first, tuple):
        parts = [_join([row[k] for row in rows], copies) for k in range(len(first))]
        missing = any(part is None and first[k] is not None for k, part in enumerate(parts))
        return None if missing else tuple(parts)
    if isinstance(first, list):  # one entry per prompt, of any length
        return [item for row in rows for item in row]
    if isinstance(first, Tensor):
        if any(row.shape != first.shape for row in rows):
            return None
        # An output without a batch dimension (position ids of the text) is the same for every prompt.
        return torch.cat(list(rows)) if first.shape[0] == copies else first
    return first


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_to(v, device) for v in value)
    return value
