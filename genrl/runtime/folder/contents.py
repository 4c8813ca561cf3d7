"""What decides the numbers of a run: the versions of what computes them, and what the files held that its configuration
names; and what of it differs where the run is resumed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from genrl.config.yaml_source import plain

_PACKAGES = ("genrl", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pillow")
DISTRIBUTIONS = {"genrl": "genrl-diffusion"}
"""Names on the package index of packages that are imported by another; genrl on the index is another project."""


def versions() -> dict[str, str]:
    """Versions of Python and the packages which decide the numbers; "-" where one is not installed."""
    packages = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(DISTRIBUTIONS.get(name, name))
        except metadata.PackageNotFoundError:
            packages[name] = "-"
    return packages


def git_commit() -> str | None:
    """Commit of the checkout that genrl runs from, with `+` if files were changed; None for an installed package."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


WHOLE = 2**20
"""Bytes up to which a file is hashed whole; of a larger one its size and `BLOCKS` blocks over its length are."""
BLOCKS, BLOCK = 64, 2**14
MOST_FILES = 2_000
MODELS = ("model", "vlm", "policy")
"""Sections whose files are what is trained: another one is another run."""
_READ = (
    *(".safetensors", ".bin", ".gguf", ".pt", ".pth", ".json", ".jsonl", ".parquet", ".arrow", ".csv", ".tsv"),
    *(".txt", ".model", ".jinja", ".yaml", ".py"),
)
"""Endings of the files of a folder that are looked at; not pictures, films and pages about it."""
_PATHS = ("path", "train", "eval")
"""Endings of keys whose values are folders."""


def contents(config: str) -> dict[str, str]:
    """`key: file` -> hash, of every file and folder that a value of this YAML text names, and `key: id` -> commit, of
    what is in the hub's cache."""
    digests: dict[str, str] = {}
    for key, value in leaves(plain(config)).items():
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name and key not in ("output", "trackers") and "\n" not in name:
                digests |= {f"{key}: {file}": digest for file, digest in _named(name, key.endswith(_PATHS))}
    return digests


def changed(before: Mapping[str, Any], now: Mapping[str, str], edited: Mapping[str, object]) -> list[str]:
    """The entries that are not what they were, but for those of keys that were edited, which is told elsewhere."""
    keys = {entry.partition(": ")[0] for entry in before} - set(edited)
    entries = [entry for entry in {**before, **now} if entry.partition(": ")[0] in keys]
    return [entry for entry in entries if before.get(entry) != now.get(entry)]


def is_model(entry: str) -> bool:
    """Whether it is of what is trained, and no code, in which a mistake may have been mended."""
    return entry.partition(".")[0] in MODELS and not entry.endswith(".py")


def _named(name: str, is_path: bool) -> Iterator[tuple[str, str]]:
    """(file, hash) of what a value names: a file, `file.py:Name`, a folder, or an id in the hub's cache. is_path: the
    value is one; others are folders only where they are written like one, for a `shapes/` may be there by chance."""
    try:
        path, code = Path(name).expanduser(), Path(name.partition(".py:")[0] + ".py").expanduser()
        if path.is_file():
            yield name, fingerprint(path)
        elif ".py:" in name and code.is_file():
            yield str(code), fingerprint(code)
        elif path.is_dir() and (is_path or os.sep in name):
            for file in _files(path):
                yield f"{name}/{file.relative_to(path).as_posix()}", fingerprint(file)
        elif name.count("/") == 1:
            yield from _cached(name.partition(":")[0])
    except OSError:  # a name too long to be a file's, or one that may not be read
        return


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for place, folders, names in os.walk(folder):
        if "run.json" in names and Path(place) != folder:  # a run in it writes while this is read
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(_READ) and not name.startswith("."):
                count += 1
                if count > MOST_FILES:
                    return
                yield Path(place, name)


def _cached(name: str) -> Iterator[tuple[str, str]]:
    """The commit of a hub id that is loaded, from the cache; nothing where there is none."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for kind in ("models", "datasets"):
        ref = Path(HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "refs", "main")
        if ref.is_file():
            yield name, ref.read_text(encoding="utf-8").strip()


def fingerprint(file: Path) -> str:
    """A hash of a file's size and content; of a large one, of blocks over its whole length, in milliseconds."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        if size <= WHOLE:
            digest.update(stream.read())
        else:
            for block in range(BLOCKS):
                # The first block and the last are among them: headers and indices are there, and both ends of a cut
                # file.
                stream.seek(block * (size - BLOCK) // (BLOCKS - 1))
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()[:32]


def config_edits(old: str, new: str) -> dict[str, str]:
    """Dotted key -> "key: old -> new" for every leaf that differs between two YAML texts."""
    before, after = leaves(plain(old)), leaves(plain(new))
    keys = [*before, *(key for key in after if key not in before)]
    missing = object()
    return {
        key: f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
        for key in keys
        if before.get(key, missing) != after.get(key, missing)
    }


def leaves(tree: object, prefix: str = "") -> dict[str, object]:
    """Dotted key -> value of everything in a configuration that is no section."""
    # A list of sections (rewards) is compared key by key, or an edited URL would be an edited list.
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return {prefix.rstrip("."): tree}
    values: dict[str, object] = {}
    for key, value in tree.items():
        values |= leaves(value, f"{prefix}{key}.")
    return values


def _shown(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key]) if key in values else "(absent)"
