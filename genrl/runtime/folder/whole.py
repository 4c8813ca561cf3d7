"""Folders that appear under their name when they are complete, and files that are a folder's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, whose content is under `final` when the block ends without an error, and not before.

    What was there gives way to it. Where the block ends by an error, or the process is killed, it is as it was.
    """
    final = final.absolute()
    is_empty = final.is_dir() and not any(final.iterdir())  # it may be where somebody works, or another disk
    beside = final if is_empty else final.parent
    temporary, old = (beside / f".{final.name}{end}.tmp-{os.getpid()}" for end in ("", "-old"))
    for path in list(beside.iterdir()) if beside.is_dir() else []:
        if path.name.startswith((f".{final.name}.tmp-", f".{final.name}-old.tmp-")):  # of a process that was killed
            shutil.rmtree(path, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):  # a full disk may say so only here
            if file.is_file():
                _sync(file)
        if is_empty:
            for path in list(temporary.iterdir()):
                path.rename(final / path.name)
        else:
            if final.exists():
                final.rename(old)
            try:
                temporary.rename(final)
            except OSError:
                if old.exists():
                    old.rename(final)
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def own_files(folder: Path) -> list[Path]:
    """The files of a folder, in order of their names, but for links that lead out of it. In the hub's cache all are
    links into `blobs`, which is the same repository's."""
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":
        inside.append(folder.parent.parent.resolve() / "blobs")
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and any(file.resolve().is_relative_to(place) for place in inside)
    ]


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
