"""What a finished run left behind as named values, and how two such runs differ. For `same_numbers`; imports no genrl.

An entry is named `file:key` (or `file`) and its value is a short text that is equal exactly where the content is:

    metrics.jsonl:step-1:loss                          -0.25
    checkpoints/step-000002/weights.safetensors:net.a  F32 [4, 8] sum 1.5 sha256 0123456789abcdef...
    checkpoints/step-000002/state.json:optimizer_steps 2
    samples/step-000000.png                            RGB 64x64 1 frame sha256 ...
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence
from safetensors import deserialize

Entries = dict[str, str]

VARYING_METRICS = ("timing/*", "memory/*", "*_per_s", "workers/*")
"""Metrics that differ between equal runs: those that the catalogue does not call reproducible (a test compares)."""
IGNORED_FILES = (
    *("config.yaml", "*/config.yaml", "run.json", "run.lock"),  # paths, times, versions
    "*manifest.json",  # hashes of the other files
    "samples/sheet/*",  # a view for people of what other entries hold
    "tensorboard/*",  # the metrics again, with times
    *("report.html", "*README.md"),  # prose about the run
    "*adapter_config.json",  # PEFT writes a set in it, in another order in each process; ranks are those of the tensors
)
IGNORED_STATE = (
    "unfinished_row*",  # metrics of an iteration that waits for its evaluation, with times; metrics.jsonl has it later
    "*$tensor",  # the name of a tensor in a .safetensors file, whose tensors are entries of their own
)
PICTURES = (".png", ".gif", ".jpg", ".jpeg", ".webp")
_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
_STEP = re.compile(r"^checkpoints/step-\d+/")


def read(run: Path) -> Entries:
    """All entries of a run folder, metrics first. Raises FileNotFoundError where there are no metrics in it."""
    entries = dict(_metrics(run / "metrics.jsonl"))
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        if file.parent.name == "sheet":  # a view for people of what other entries hold
            continue
        name = file.relative_to(run).as_posix()
        if name == "metrics.jsonl" or any(fnmatchcase(name, pattern) for pattern in IGNORED_FILES):
            continue
        if file.suffix == ".safetensors":
            entries |= {f"{name}:{key}": value for key, value in _tensors(file)}
        elif file.name == "state.json":
            entries |= {f"{name}:{key}": value for key, value in _state(file)}
        else:
            entries[name] = _content(file)
    return entries


def varies(metric: str) -> bool:
    """Whether a metric may differ between equal runs."""
    return any(fnmatchcase(metric, pattern) for pattern in VARYING_METRICS)


def _metrics(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for key, value in row.items():
            if key != "step" and not varies(key):
                yield f"metrics.jsonl:step-{row['step']}:{key}", json.dumps(value)


def _tensors(file: Path) -> Iterator[tuple[str, str]]:
    """The sum is there to show how far apart two tensors are; equality is that of the hash."""
    for name, tensor in sorted(deserialize(file.read_bytes())):  # type: ignore[no-untyped-call]
        data, kind = bytes(tensor["data"]), _KINDS.get(tensor["dtype"])
        total = f" sum {np.frombuffer(data, kind).sum(dtype=np.float64):.9g}" if kind else ""
        yield name, f"{tensor['dtype']} {tensor['shape']}{total} sha256 {_sha256(data)}"


def _state(file: Path) -> Iterator[tuple[str, str]]:
    for key, value in _leaves(json.loads(file.read_text(encoding="utf-8")), ""):
        if not any(fnmatchcase(key, pattern) for pattern in IGNORED_STATE):
            yield key, value


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Numbers and texts by their path, whatever the order of the keys; `$dict` and `$tuple` are as runtime/state.py
    writes dicts with other keys than texts, and tuples."""
    if isinstance(tree, dict) and tree.keys() == {"$tuple"}:
        tree = tree["$tuple"]
    if isinstance(tree, dict):
        pairs = {str(key): value for key, value in tree.get("$dict", tree.items())}
    elif isinstance(tree, list):
        pairs = {str(index): value for index, value in enumerate(tree)}
    else:
        yield path, json.dumps(tree)
        return
    if not pairs and path:
        yield path, json.dumps(tree)
    for key in sorted(pairs):
        yield from _leaves(pairs[key], f"{path}.{key}" if path else key)


def _content(file: Path) -> str:
    """Pictures by their pixels, JSON whatever the order of its keys, anything else by its bytes."""
    if file.suffix in PICTURES:
        return _picture(file)
    data = file.read_bytes()
    if file.suffix == ".json":
        data = json.dumps(json.loads(data), sort_keys=True).encode()
    return f"sha256 {_sha256(data)}"


def _picture(file: Path) -> str:
    with Image.open(file) as opened:
        frames = [frame.convert("RGBA").tobytes() for frame in ImageSequence.Iterator(opened)]
        mode, (width, height) = opened.mode, opened.size
    return f"{mode} {width}x{height} {len(frames)} frames sha256 {_sha256(b''.join(frames))}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Difference:
    """An entry that is not the same in both runs; None where a run lacks it."""

    name: str
    there: str | None
    here: str | None

    def __str__(self) -> str:
        there, here = (_short(text) if text is not None else "missing" for text in (self.there, self.here))
        return f"{self.name}: there {there}, here {here}"


def _short(value: str) -> str:
    return re.sub(r"(?<=sha256 )(\w{12})\w+", r"\1", value if len(value) < 200 else f"{value[:200]}...")


def differences(there: Entries, here: Entries, renames: Mapping[str, str] | None = None) -> list[Difference]:
    """In the order of the entries there, then what is here alone.

    renames: beginnings of names there -> here, without `checkpoints/step-N/` (`optimizer.safetensors`).
    """
    renamed = {_renamed(name, renames or {}): value for name, value in there.items()}
    names = [*renamed, *(name for name in here if name not in renamed)]
    return [
        Difference(name, renamed.get(name), here.get(name)) for name in names if renamed.get(name) != here.get(name)
    ]


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    folder = match[0] if (match := _STEP.match(name)) else ""
    for old, new in renames.items():
        if name.removeprefix(folder).startswith(old):
            return folder + new + name.removeprefix(folder).removeprefix(old)
    return name


def allowed(difference: Difference, keys: Sequence[str]) -> bool:
    """Whether a key names the entry, or the part of its name after the last colon. `*` stands for anything."""
    last = difference.name.rsplit(":", 1)[-1]
    return any(fnmatchcase(difference.name, key) or fnmatchcase(last, key) for key in keys)


def trained(entries: Entries) -> bool:
    """Whether the trained weights of the last checkpoint are not those of the first."""
    folders = sorted({match[0] for name in entries if (match := _STEP.match(name))})
    if len(folders) < 2:
        return False
    first, last = folders[0], folders[-1]
    weights = [name for name in entries if name.startswith(f"{last}weights")]
    return any(entries[name] != entries.get(first + name.removeprefix(last)) for name in weights)
