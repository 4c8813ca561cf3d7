"""Text encoding once per distinct prompt: `encode_prompt` of a pipeline, memoised on the instance."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn


class _Opaque(Exception):
    """An argument that cannot be part of a key."""


class _Ragged(Exception):
    """Encodings of single prompts that do not make a batch."""


MAX_ENTRIES = 4096
"""Distinct prompts kept; the least recently used goes first."""
PER_PROMPT = ("prompt", "negative_prompt", "image", "lyrics", "vocal_language")
"""How the arguments of `encode_prompt` begin that hold one entry per prompt where they are lists as long as it. Other
lists (layers to read, lines of a system message) may be as long by chance."""


def memoise_encode_prompt(pipe: Any, *, offload: bool = False) -> None:
    """Wrap `pipe.encode_prompt` so that each distinct (prompt, negative prompt, settings) is encoded once.

    A batch is put together from its rows, each encoded alone: embeddings of a prompt do not depend on its
    neighbours. Where rows differ in length (encoders that pad to the longest of the batch) the batch is encoded as a
    whole and kept under the whole of its prompts. Pictures (an editing model reads its text beside them) are known by
    their content; calls with tensors as arguments are passed through. Encodings are kept on the CPU where the device
    is an accelerator. With `offload` the text encoders wait on the CPU and are on the device only while they encode.
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
    axes: dict[Hashable, Any] = {}

    def remember(key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in cache:
            with torch.no_grad(), _on_device(encoders, home):
                cache[key] = _to(make(), torch.device("cpu"))
            if len(cache) > MAX_ENTRIES:
                cache.popitem(last=False)
        cache.move_to_end(key)
        return cache[key]

    def axes_of(key: Hashable, row: dict[str, Any], split: Sequence[str], encoded: Any) -> Any:
        """Found once for all calls with the same settings, by encoding one prompt twice over: the batch is not always
        the first axis, and some outputs (position ids of the text) have none."""
        if key not in axes:
            doubled = {k: v * 2 if k in split else v for k, v in row.items()}
            with torch.no_grad(), _on_device(encoders, home):
                axes[key] = _batch_axes(encoded, _to(original(**doubled), torch.device("cpu")))
        return axes[key]

    @functools.wraps(original)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        try:
            whole_key = _frozen(arguments)
        except _Opaque:
            with torch.no_grad(), _on_device(encoders, home):
                return original(*args, **kwargs)
        device = torch.device(arguments.get("device") or pipe._execution_device)
        # Copies: an encoder may write into the lists it is given (Z-Image puts its chat template around each prompt).
        whole = functools.partial(original, **{k: _copy(v) for k, v in arguments.items()})
        prompts = arguments.get("prompt")
        if not isinstance(prompts, list):
            return _to(remember(whole_key, whole), device)
        split = [k for k, v in arguments.items() if _per_prompt(k, v, len(prompts))]
        rows, row = [], arguments
        for r in range(len(prompts)):
            row = {k: [v[r]] if k in split else v for k, v in arguments.items()}
            rows.append(remember(_frozen(row), functools.partial(original, **{k: _copy(v) for k, v in row.items()})))
        if len(rows) == 1:
            return _to(rows[0], device)
        settings = _frozen({k: k if k in split else v for k, v in arguments.items()})
        try:
            return _to(_join(rows, axes_of(settings, row, split, rows[-1])), device)
        except _Ragged:
            return _to(remember(whole_key, whole), device)

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


def _per_prompt(name: str, value: Any, length: int) -> bool:
    return name.startswith(PER_PROMPT) and isinstance(value, list) and len(value) == length


def _frozen(value: Any) -> Hashable:
    """A hashable that stands for a plain value or a picture. Raises _Opaque for anything else."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, Mapping):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    if isinstance(value, Image.Image):
        return value.mode, value.size, hashlib.blake2b(value.tobytes(), digest_size=16).digest()
    if value is None or isinstance(value, (str, int, float, bool, torch.device, torch.dtype)):
        return value
    raise _Opaque


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


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
