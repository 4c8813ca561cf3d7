"""Text encoding once per distinct prompt: `encode_prompt` of a pipeline, memoised on the instance."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from genrl.diffusion.config.model_rules import is_text_encoder
from genrl.diffusion.policy.encoding_store import Store
from genrl.runtime.weights.devices import empty_cache

Fetch = Callable[[], None]
Encode = Callable[[dict[str, Any]], Any]


class _Opaque(Exception):
    """An argument that cannot be part of a key."""


class _Ragged(Exception):
    """Encodings of single prompts that do not make a batch."""


_NO_ROWS = "no rows"
"""In place of axes: a batch's outputs are not its rows' one after the other."""
MAX_BYTES = 2 * 2**30
"""Encodings kept (a prompt of FLUX.1 takes 4 MB in bfloat16); the least recently used goes first."""
PER_PROMPT = ("prompt", "negative_prompt", "image", "lyrics", "vocal_language")
"""How the arguments of `encode_prompt` begin that hold one entry per prompt where they are lists as long as it. Other
lists (layers to read, lines of a system message) may be as long by chance."""


class NotEncoded(RuntimeError):
    """An encoding is asked for that was not made before the text encoders were dropped."""


class Memo:
    """What a pipeline's wrapped `encode_prompt` keeps, and where the text encoders are between its calls.

    waits: they wait on the CPU and are on the device only while they encode. ahead: everything is encoded before
    training, by encoders that are there for that time alone (`present`). trained: nothing is kept beyond a call, and
    gradients run through where they are enabled.
    """

    def __init__(self, pipe: Any, store: Store | None, *, waits: bool, ahead: bool, trained: bool) -> None:
        self.pipe, self.waits, self.ahead, self.home = pipe, waits, ahead, pipe._execution_device
        self.trained = trained
        self.store = store
        self.kept = _Kept(store, bounded=not ahead or store is not None)
        self.axes: dict[Hashable, Any] = {}
        self.last: _Last | None = None

    @property
    def encoders(self) -> list[nn.Module]:
        """The text encoders that are there."""
        return [c for name, c in self.pipe.components.items() if is_text_encoder(name) and isinstance(c, nn.Module)]

    @contextmanager
    def present(self, encoders: Mapping[str, nn.Module]) -> Iterator[None]:
        """Within the block these are the pipeline's text encoders, on its device; afterwards it has none."""
        try:
            for name, encoder in encoders.items():
                setattr(self.pipe, name, encoder.eval().requires_grad_(False).to(self.home))
            yield
        finally:
            for name in encoders:
                setattr(self.pipe, name, None)
            empty_cache(self.home)

    def require_encoders(self, arguments: Mapping[str, Any]) -> None:
        """Raise NotEncoded where they have been dropped."""
        if self.ahead and not self.encoders:
            raise NotEncoded(
                f"model.offload.text_encoders: {type(self.pipe).__name__} asks for an encoding of "
                f"{str(arguments.get('prompt'))[:80]!r} that was not made before the text encoders were dropped; write "
                "between"
            )

    def must_keep(self, why: str) -> None:
        """Raise ValueError where what is not kept cannot be made later."""
        if self.ahead:
            raise ValueError(f"model.offload.text_encoders: {type(self.pipe).__name__} {why}; write between")


def memoise_encode_prompt(
    pipe: Any, *, offload: bool = False, ahead: bool = False, trained: bool = False, store: Store | None = None
) -> Memo:
    """Wrap `pipe.encode_prompt` so that each distinct (prompt, negative prompt, settings) is encoded once.

    A batch is put together from its rows, each encoded alone: embeddings of a prompt do not depend on its
    neighbours. Where rows differ in length (encoders that pad to the longest of the batch) the batch is encoded as a
    whole and kept under the whole of its prompts. Pictures (an editing model reads its text beside them) are known by
    their content; calls with tensors as arguments are passed through. Encodings are kept on the CPU where the device
    is an accelerator, and in `store` where there is one. With `offload` the text encoders wait on the CPU and are on
    the device only while they encode; with `ahead` they are not there at all but within `Memo.present`. With `trained`
    every call encodes anew, each of its distinct prompts once.
    """
    memo = Memo(pipe, store, waits=offload, ahead=ahead, trained=trained)
    if offload:
        for encoder in memo.encoders:
            encoder.to("cpu")
        keep_execution_device(pipe, memo.home)
    original = pipe.encode_prompt
    signature = inspect.signature(original)

    @functools.wraps(original)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        if memo.last is not None and memo.last.answers(arguments):
            return _to(memo.last.value, arguments["device"])
        memo.last = None  # a batch of another micro-batch is not held beside its own
        grad, cache = trained and torch.is_grad_enabled(), _Once() if trained else memo.kept
        # What is kept must not hold a graph.
        with torch.set_grad_enabled(grad), _on_demand(memo.encoders if offload else [], memo.home) as fetch:

            def encode(given: dict[str, Any]) -> Any:
                memo.require_encoders(given)
                fetch()
                # Copies: an encoder may write into the lists it is given (Z-Image puts its chat template around
                # prompts).
                return original(**{k: _copy(v) for k, v in given.items()})

            try:
                key = _frozen(arguments)
            except _Opaque:
                memo.must_keep("hands tensors to its text encoders, so that prompts cannot be encoded ahead")
                return encode(arguments)
            device = torch.device(arguments.get("device") or pipe._execution_device)
            if isinstance(arguments.get("prompt"), list):
                with suppress(_Ragged):
                    value = _to(_by_row(encode, arguments, memo, cache), device)
                    if not trained and arguments.get("device") is not None and _are_plain(arguments):
                        memo.last = _Last(arguments, value)
                    return _to(value, device)
                memo.must_keep("encodes prompts to different lengths, so that a batch has to be encoded as a whole")
            return _to(cache.get(key, lambda: encode(arguments)), device)

    pipe.encode_prompt = encode_prompt
    return memo


def _by_row(encode: Encode, arguments: dict[str, Any], memo: Memo, kept: _Kept | _Once) -> Any:
    """The encoding of a list of prompts, put together from those of its rows, which are looked for in `kept`. Raises
    _Ragged where these do not make a batch.

    `memo.axes`: which axes are those of the batch, found once for all calls with the same settings, by encoding one
    prompt twice over: the batch is not always the first axis, and some outputs (position ids of the text) have none.
    """
    length = len(arguments["prompt"])
    split = [k for k, v in arguments.items() if _per_prompt(k, v, length)]

    # Some are told the number of prompts beside the list of them: a row alone is one.
    def counted(prompts: int) -> dict[str, Any]:
        return {"batch_size": prompts} if "batch_size" in arguments else {}

    rows, row = [], arguments
    for r in range(length):
        row = {k: [v[r]] if k in split else v for k, v in (arguments | counted(1)).items()}
        rows.append(kept.get(_frozen(row), functools.partial(encode, row)))
    if length == 1:
        return rows[0]
    settings = _frozen({k: k if k in split else v for k, v in arguments.items()})

    def grown() -> Any:
        doubled = encode({k: v * 2 if k in split else v for k, v in (row | counted(2)).items()})
        axes = _batch_axes(rows[-1], doubled)
        # Some outputs (sums of lengths) have an axis that grows, and are no rows one after the other all the same.
        return axes if _equal_shapes(_join([rows[-1]] * 2, axes), doubled) else _NO_ROWS

    if settings not in memo.axes:
        memo.axes[settings] = kept.get(("axes", settings), grown)
    if memo.axes[settings] == _NO_ROWS:
        raise _Ragged
    return _join(rows, memo.axes[settings])


class _Kept:
    """Encodings on the CPU, if bounded the most recently used ones up to MAX_BYTES, and all of them in `store`."""

    def __init__(self, store: Store | None, *, bounded: bool) -> None:
        self._store, self._bounded = store, bounded
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self.size = 0

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._entries:
            value = self._entries[key] = self._value(key, make)
            self.size += _bytes(value)
            while self._bounded and self.size > MAX_BYTES and len(self._entries) > 1:
                self.size -= _bytes(self._entries.popitem(last=False)[1])
        self._entries.move_to_end(key)
        return self._entries[key]

    def _value(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if self._store is None:
            return _to(make(), torch.device("cpu"))
        name = self._store.name(key)
        if (entry := self._store.read(name)) is not None:
            return entry[0]
        value = _to(make(), torch.device("cpu"))
        self._store.write(name, value)
        return value


class _Last:
    """The last batch of encodings, as it was handed out: a micro-batch asks for it again at every step it replays."""

    def __init__(self, arguments: Mapping[str, Any], value: Any) -> None:
        self._arguments, self.value = {k: _copy(v) for k, v in arguments.items()}, value
        self._versions = _versions(value)

    def answers(self, arguments: Mapping[str, Any]) -> bool:
        """Whether it is what these would give: equal ones do, unless a pipeline has written into the tensors."""
        same = _are_plain(arguments) and arguments == self._arguments
        return same and _versions(self.value) == self._versions


class _Once:
    """Encodings of one call."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._entries:
            self._entries[key] = make()
        return self._entries[key]


def _bytes(value: Any) -> int:
    """Memory that the tensors within hold; that of a view is all of what it looks at."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0


@contextmanager
def _on_demand(encoders: Sequence[nn.Module], device: torch.device) -> Iterator[Fetch]:
    """A function that moves the encoders to the device when it is first called; afterwards they are on the CPU."""
    fetched = False

    def fetch() -> None:
        nonlocal fetched
        if not fetched:
            fetched = True
            for encoder in encoders:
                encoder.to(device)

    try:
        yield fetch
    finally:
        if fetched:
            for encoder in encoders:
                encoder.to("cpu")


def keep_execution_device(pipe: Any, device: torch.device) -> None:
    """A pipeline takes its device from its first module, which may now wait on the CPU. diffusers looks for it among
    all modules several times a call, too, which is a good part of what the smallest models cost."""
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
        # By content: every epoch opens the file anew, so the object is another one.
        return value.mode, value.size, hashlib.blake2b(value.tobytes(), digest_size=16).digest()
    if isinstance(value, torch.device):
        # Not the index: encodings are kept on the CPU, and moved to whichever device asks.
        return value.type
    if value is None or isinstance(value, (str, int, float, bool, torch.dtype)):
        return value
    raise _Opaque


def _are_plain(arguments: Mapping[str, Any]) -> bool:
    """Whether it costs little to see that they are equal to others: no tensor, no picture."""
    plain = (str, int, float, torch.dtype, torch.device, type(None))
    return all(
        all(isinstance(v, plain) for v in value) if isinstance(value, list) else isinstance(value, plain)
        for value in arguments.values()
    )


def _versions(value: Any) -> list[int]:
    """How often each of the tensors within was written into."""
    if isinstance(value, (tuple, list)):
        return [version for part in value for version in _versions(part)]
    return [value._version] if isinstance(value, Tensor) else []


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


def _equal_shapes(one: Any, two: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_equal_shapes, one, two))
    return not isinstance(one, Tensor) or one.shape == two.shape


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
