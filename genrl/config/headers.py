"""Names and shapes of a model's weights before it is on this machine: packed into the package, or read from the hub.

Of a repository on the hub the JSON files are loaded, and of its weight files the headers alone: some hundred kB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

Shape = tuple[int, ...]
TIMEOUT_S = 10.0


def unpacked(packed: Sequence[Any]) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor. `#` in a name stands for the numbers of each run, [first, last]."""
    for name, shape, *runs in packed:
        numbers = [number for first, last in runs[0] for number in range(first, last + 1)] if runs else [None]
        for number in numbers:
            yield name if number is None else name.replace("#", str(number)), tuple(shape)


def from_hub(source: str, revision: str | None, folder: Path, hub: Any = None) -> Path:
    """The folder, in which a repository now is without its weights: JSON files whole, .safetensors up to the end of
    their headers. hub: another client than huggingface_hub's. Raises OSError where the hub cannot be asked, or has no
    such repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    hub = hub or HfApi()
    try:
        # Not list_repo_files, which tries for half a minute where there is no network.
        for name in (file.rfilename for file in hub.model_info(source, revision=revision, timeout=TIMEOUT_S).siblings):
            if name.endswith(".json"):
                hub.hf_hub_download(source, name, revision=revision, local_dir=folder)
            elif name.endswith(".safetensors"):
                tensors = hub.parse_safetensors_file_metadata(source, name, revision=revision).tensors
                _write_header(folder / name, tensors)
    except hub_errors(NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise OSError(f"the hub does not say how large it is: {str(error).strip().partition(chr(10))[0]}") from error
    return folder


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Others, and what huggingface_hub raises where a request fails: OSError, and the errors of the HTTP library that
    this release of it is made with (httpx or httpx2), which it wraps in few places."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*others, *cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__))


def _write_header(file: Path, tensors: Any) -> None:
    """A .safetensors file of these tensors that ends where the first of them would begin."""
    told = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
        for name, tensor in tensors.items()
    }
    raw = json.dumps(told).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
