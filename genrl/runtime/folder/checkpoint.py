"""Checkpoints which survive a crash at any instant. The only module that writes or reads them.

A checkpoint is a folder `step-000123/`: `<stem>.safetensors`, `state.json`, whatever `extra` wrote, and `manifest.json`
with the size and sha256 of every other file. What processes hold in shares (FSDP) is in `shards/<stem>/`, where each
has written its own (`runtime/weights/sharding.py`). It is written as `step-000123.tmp-<pid>/`, every file and folder is
synced, the folder is renamed, its parent is synced, and only then are older ones deleted, which begins with renaming
them back. So at every instant there is a complete checkpoint under its final name, once there has been one, and a
folder under a final name that is not complete was damaged by something else: it is never deleted. A folder is
*complete* when its manifest is there, has the checksum that it says and the step of the folder's name, and every listed
file has the listed size and hash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from genrl.config.errors import command
from genrl.runtime.folder.run import synced
from genrl.runtime.weights import sharding
from genrl.runtime.weights.sharding import local

FORMAT = 2
IN_SHARES = 3
"""The format of a checkpoint with a folder `shards`, which earlier versions of genrl do not know."""
SHARDS = "shards"
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step-(\d{6,})")
_REPLACED = re.compile(r"(step-\d{6,})\.replaced-\d+")
_LEFTOVER = re.compile(r"step-\d{6,}(\.replaced-\d+)?\.tmp-\d+")

logger = logging.getLogger(__name__)


class UnknownFormat(ValueError):
    """A manifest of another version of genrl, which is no damage."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not complete; the message says which, why and what to do."""


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: `tensors[stem][name]` on the CPU (or its `Shares`), and the JSON state as it was given."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Any]]
    state: dict[str, Any]


def save(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, object],
    keep: int,
    spared: int | None = None,
    extra: Callable[[Path], None] | None = None,
    replace: bool = False,
) -> Path:
    """Write `folder/step-<step>/` and then delete all but the newest `keep` complete checkpoints, and that of the
    step `spared`, the best one. Rank 0 only; the others call `save_shares`.

    tensors: file stem -> named tensors, any device and layout. state: JSON. extra: called with the temporary
    folder before the manifest is made, to write further files (the LoRA folder).

    A step is saved once: a complete checkpoint of this step is returned as it is, or with `replace` makes way for the
    new one, under another name until that is there. A damaged folder of this step is set aside, under another name.
    Complete ones of later steps belong to a future that was given up; they are deleted.
    Raises CheckpointError where the disk refuses; earlier checkpoints are then untouched.
    """
    assert keep >= 1 and step >= 0
    final = of_step(folder, step)
    temporary = folder / f"{final.name}.tmp-{os.getpid()}"
    shared = sharding.shares_of(tensors)
    try:
        with _telling(shared) as folders:
            _make_folder(folder)
            _remove_leftovers(folder)
            complete, aside = problem(final) is None, None
            if complete and not replace:
                return final
            _make_folder(temporary)
            folders.append(temporary)
        written = _write_shares(temporary, shared)
        for stem, named in tensors.items():
            tensors_here = {name: tensor for name, tensor in named.items() if name not in shared.get(stem, ())}
            if tensors_here or not named:
                _write_tensors(temporary / f"{stem}.safetensors", tensors_here)
        _write_text(temporary / STATE, json.dumps(state, indent=1))
        if extra is not None:
            extra(temporary)
        _seal(temporary, step, written)
        if final.exists():
            aside = _set_aside(final, "replaced" if complete else "damaged")
        _rename(temporary, final)
        _sync(folder)
        if complete and aside is not None:
            _remove(aside)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_write_failure(final, error)) from error
    _rotate(folder, step, keep, spared)
    return final


def save_shares(tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write, in every other process while the main one is in `save`, its shares of these tensors, if it has any.

    Raises CheckpointError in all processes where one of them could not write.
    """
    shared = sharding.shares_of(tensors)
    if not shared:
        return
    folders: list[Path | None] = [None]
    torch.distributed.broadcast_object_list(folders)
    if folders[0] is not None:
        try:
            _write_shares(folders[0], shared)
        except OSError as error:
            raise CheckpointError(_write_failure(folders[0], error)) from error


@contextmanager
def _telling(shared: Mapping[str, object]) -> Iterator[list[Path]]:
    """The other processes wait for the folder that is appended within the block; for none where there is no save."""
    folders: list[Path] = []
    try:
        yield folders
    finally:
        if shared:
            torch.distributed.broadcast_object_list([folders[0] if folders else None])


def of_step(folder: Path, step: int | None) -> Path:
    """Folder in which the checkpoint of this step is, if there is one."""
    return folder / f"step-{step or 0:06d}"


def best_step(folder: Path) -> int:
    """The step of the best evaluation, as the newest complete checkpoint remembers it; raises ValueError where it was
    that of the model before training, or nothing was judged."""
    newest = latest(folder)
    memory = {} if newest is None else json.loads((newest / STATE).read_text(encoding="utf-8"))["memory"]
    step = memory.get("collapse", {}).get("best")
    if not step or problem(of_step(folder, step)) is not None:
        why = "training has not bettered the model that it began with" if step == 0 else "no evaluation judged it yet"
        raise ValueError(f"{folder.parent} has no best checkpoint: {why}; leave --best out for the newest")
    return int(step)


def steps(folder: Path) -> list[Path]:
    """Every `step-*` folder, complete or not, newest first."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; a warning names each newer one that was skipped, and why."""
    best, skipped = _newest(steps(folder))
    _warn(skipped)
    return best


def _newest(candidates: Sequence[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The first complete one, and what is wrong with those before it."""
    skipped: dict[Path, str] = {}
    for path in candidates:
        reason = problem(path)
        if reason is None:
            return path, skipped
        skipped[path] = reason
    return None, skipped


def _warn(skipped: Mapping[Path, str]) -> None:
    for path, reason in skipped.items():
        logger.warning("skipped checkpoint %s: %s", path, reason)


def to_resume(folder: Path) -> Path | None:
    """The checkpoint that a run goes on from: the newest complete one, or None where none was ever saved. One that made
    way for another of its step, which its process did not live to see, is under its name again.

    Raises ValueError, and nothing is changed, where there are some and none can be read, or another version of genrl
    wrote the newest: it would be lost by going on from an older one.
    """
    _put_back(folder)
    candidates = steps(folder)
    if candidates and (newer := _other_version(candidates[0])) is not None:
        raise ValueError(
            f"{candidates[0]} cannot be read: {newer}. Nothing was changed. If there is an older checkpoint, the run "
            f"goes on from it once {candidates[0].name} is moved out of {folder}."
        )
    best, skipped = _newest(candidates)
    if candidates and best is None:
        listed = "\n".join(f"  {path.name}: {reason}" for path, reason in skipped.items())
        raise ValueError(
            f"no checkpoint in {folder} can be read; nothing was changed:\n{listed}\nPut back what is missing, or "
            f"start again in another folder: {command('train', folder.parent / 'config.yaml')} output=FOLDER"
        )
    _warn(skipped)
    return best


def _put_back(folder: Path) -> None:
    for path in list(folder.glob("step-*.replaced-*")):
        if match := _REPLACED.fullmatch(path.name):
            final = folder / match[1]
            if final.exists():
                _remove(path)
            else:
                _rename(path, final)


def problem(path: Path, *, hashes: bool = True) -> str | None:
    """Why this folder is not a complete checkpoint; None if it is. Without `hashes` only sizes are compared."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        files = _read_manifest(path)["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except UnknownFormat as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, entry in files.items():
        file = path / name
        try:
            if not _is_inside(name) or not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, {entry['bytes']} were written"
            if hashes and sharding.sha256(file) != entry["sha256"]:
                return f"{name} was altered: its sha256 is not the one in {MANIFEST}"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def load(path: Path, *, in_shares: bool = False, hashes: bool = True) -> Loaded:
    """Verify sizes and hashes, then read. Raises CheckpointError naming the file that is wrong.

    in_shares: what was written in shares is left as `Shares`, for each process to read what it needs of it. hashes:
    False where they were just verified (`to_resume`).
    """
    reason = problem(path, hashes=hashes)
    if reason is not None:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {reason}. Resume from another step folder beside it; "
            "`genrl resume RUN` takes the newest complete one by itself."
        )
    try:
        return _loaded(path, in_shares)
    except FileNotFoundError as error:  # with checkpoint.keep=1 the next one takes its place at any time
        raise CheckpointError(
            f"{path} was deleted while it was read: a run that goes on keeps its newest ones only. Again, or "
            "with a larger checkpoint.keep."
        ) from error


def _loaded(path: Path, in_shares: bool) -> Loaded:
    manifest = _read_manifest(path)
    stems = [name.removesuffix(".safetensors") for name in manifest["files"] if _is_tensor_file(name)]
    # cloned: load_file maps the file, and kernels may round differently on memory that torch has not aligned
    tensors: dict[str, dict[str, Any]] = {
        stem: {name: tensor.clone() for name, tensor in load_file(path / f"{stem}.safetensors").items()}
        for stem in stems
    }
    parents = [PurePosixPath(name).parent for name in manifest["files"]]
    for folder in sorted({parent for parent in parents if parent.is_relative_to(SHARDS)}):
        stem, shared_tensors = str(folder.relative_to(SHARDS)), sharding.read(path / folder)
        tensors.setdefault(stem, {}).update((n, one if in_shares else one.whole()) for n, one in shared_tensors.items())
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    return Loaded(path, manifest["step"], tensors, state)


def _is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _is_inside(name: str) -> bool:
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    format_name, checksum, formats = manifest["format"], manifest.get("checksum"), (FORMAT, IN_SHARES)
    # The checksum tells damage from another version: a flipped digit of `format` would else send people to another
    # genrl.
    meant = next(
        (candidate for candidate in formats if checksum == _checksum(manifest | {"format": candidate})), format_name
    )
    if meant not in formats:
        newer = format_name > max(formats)
        who = "a newer genrl wrote it: update genrl" if newer else "an older genrl wrote it: resume with that"
        raise UnknownFormat(
            f"it is of format {format_name}, and this version of genrl reads formats {FORMAT} and {IN_SHARES}; {who}"
        )
    if checksum != _checksum(manifest):
        other = "" if format_name == meant else f" (it says format {format_name}, but was written as format {meant})"
        raise ValueError(f"it was altered: its checksum is not that of its content{other}")
    if (match := _STEP.fullmatch(path.name)) and int(match[1]) != manifest["step"]:
        raise ValueError(f"it belongs to step {manifest['step']}, but its folder's name says another")
    if STATE not in manifest["files"]:
        raise ValueError(f"it does not list {STATE}")
    return manifest


def _checksum(manifest: Mapping[str, object]) -> str:
    """SHA-256 of all of a manifest but this, in one canonical form."""
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _other_version(path: Path) -> str | None:
    try:
        _read_manifest(path)
    except UnknownFormat as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # damage, of which `problem` tells
    return None


def _write_shares(folder: Path, shared: Mapping[str, Mapping[str, Any]]) -> sharding.Entries:
    """All processes together. Returns, to the main one, the entries of the manifest."""
    return {
        f"{SHARDS}/{stem}/{name}": entry
        for stem, named in shared.items()
        for name, entry in sharding.write(folder / SHARDS / stem, named, _fault).items()
    }


def _seal(folder: Path, step: int, written: sharding.Entries) -> None:
    """Sync every file, write the manifest, sync every folder from the deepest up. written: entries of files that those
    who wrote them have synced."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for file in files:
        name = file.relative_to(folder).as_posix()
        if name not in written:
            _sync(file)
        entries[name] = written.get(name) or sharding.entry(file)
    manifest = {"format": IN_SHARES if written else FORMAT, "step": step, "files": entries}
    _write_text(folder / MANIFEST, json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1))
    _sync(folder / MANIFEST)
    # A folder's entry is on the disk only when its parent was synced after it.
    inner = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
    for path in [*inner, folder]:
        _sync(path)


def _rotate(folder: Path, step: int, keep: int, spared: int | None) -> None:
    """After the commit, so a failure here costs disk space only and must not stop the training."""
    num_kept = 0
    unwanted = []
    for path in steps(folder):
        later = int(path.name.removeprefix("step-")) > step
        if problem(path, hashes=later) is not None:
            continue
        if not later and num_kept < keep:
            num_kept += 1
        elif later or path != of_step(folder, spared):
            unwanted.append(path)
    for path in unwanted:
        try:
            _remove(path)
        except OSError as error:
            logger.warning("could not delete old checkpoint %s: %s", path, error)


def _remove_leftovers(folder: Path) -> None:
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            _remove(path)


def _write_failure(path: Path, error: Exception) -> str:
    free = shutil.disk_usage(path.parent if path.parent.is_dir() else Path.cwd()).free / 2**20
    return (
        f"could not write checkpoint {path}: {error} ({free:.0f} MiB free there). Earlier checkpoints are intact. "
        "Free some space (one more checkpoint than checkpoint.keep must fit), or set another output=, then resume."
    )


# -- every file operation of a save goes through one of these, so that a test can fail or kill at each ------------


def _fault(point: str) -> None:
    """Nothing. Tests replace it; `point` is the operation about to happen, for example `rename:step-000003`."""


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _fault(f"mkdir:{path.name}")
        path.mkdir(parents=True)
        _sync(path.parent)


def _write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    _fault(f"write:{path.name}")
    storages: set[int] = set()  # safetensors refuses tensors which share memory (tied weights)
    flat: dict[str, Tensor] = {}
    for name, tensor in named.items():
        plain = local(tensor.detach()).to("cpu").contiguous()
        pointer = plain.untyped_storage().data_ptr()
        flat[name] = plain.clone() if pointer in storages or plain.untyped_storage().nbytes() != plain.nbytes else plain
        storages.add(pointer)
    save_file(flat, path)


def _write_text(path: Path, text: str) -> None:
    _fault(f"write:{path.name}")
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    _fault(f"fsync:{path.name}")
    synced(path)


def _rename(source: Path, target: Path) -> None:
    _fault(f"rename:{target.name}")
    source.rename(target)


def _remove(path: Path) -> None:
    """Under another name first, so that what is under a final name was not deleted by half."""
    doomed = path if _LEFTOVER.fullmatch(path.name) else path.with_name(f"{path.name}.tmp-{os.getpid()}")
    if doomed != path:
        _rename(path, doomed)
    _fault(f"rmtree:{doomed.name}")
    shutil.rmtree(doomed)


def _set_aside(path: Path, why: str) -> Path:
    """Make the name free for a new save, by a name that nobody deletes: what is damaged may be repaired by hand."""
    number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.{why}-{n}").exists())
    aside = path.with_name(f"{path.name}.{why}-{number}")
    if why == "damaged":
        logger.warning("%s is not complete (%s): it is kept as %s", path, problem(path), aside.name)
    _rename(path, aside)
    return aside
