"""The run folder: what is in it, who may write into it, and how it is read back.

    runs/<name>/config.yaml     the resolved configuration
                run.json        versions, git commit, command, seed, times
                metrics.jsonl   one row per iteration
                trackers.json   what trackers with a server know the run by
                tensorboard/  samples/  checkpoints/  dumps/  lora/  report.html

Files appear under their final name only when complete. Only the main process writes here, except `dumps/`.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from genrl.config import ConfigError, dump, load
from genrl.config.yaml_source import plain
from genrl_rewards.given import is_given

EDITABLE = (
    *("iterations", "idle_iterations", "checkpoint.*", "evaluation.*", "trackers", "output"),
    *("rewards.*.remote", "rewards.*.isolate", "rewards.*.outage.*"),  # where a score comes from, not what it is
    *("environment.workers", "environment.timeout_s", "environment.worker_gb"),  # where simulators run
    *("engine", "engine.*"),  # where samples are drawn
    *("distributed.fsdp", "distributed.shard"),  # which processes hold the weights
)
KEPT = ("evaluation.right_at",)
"""Not editable after all: training may go by it (`economy.selection`, RLFR), and a curve has one meaning of right."""
_PACKAGES = ("genrl", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pillow")
DISTRIBUTIONS = {"genrl": "genrl-diffusion"}
"""Names on the package index of packages that are imported by another; genrl on the index is another project."""
logger = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"\..+\.tmp-\d+")
_BEFORE_TRAINING = {
    "train_prompts.jsonl",
    "eval_prompts.jsonl",
    "config.yaml",
    "run.json",
    "run.lock",
    "tensorboard",
    "trackers.json",
}  # what a start that failed leaves


@dataclass(frozen=True)
class Run:
    """Paths of one run. Making this object touches no file."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def info(self) -> Path:
        return self.folder / "run.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def videos(self) -> Path:
        return self.folder / "videos"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def dumps(self) -> Path:
        return self.folder / "dumps"

    @property
    def lora(self) -> Path:
        return self.folder / "lora"

    @property
    def trackers(self) -> Path:
        return self.folder / "trackers.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"


@dataclass(frozen=True)
class Script:
    """A script that trains, which goes on afterwards: asked to end twice, it gets a KeyboardInterrupt."""

    on_iteration: Callable[[Any, Mapping[str, float]], None] | None = None
    """Called in every process after each iteration, with the loop and what was logged of it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What it writes into the folder of a new run, beside the configuration: name -> text."""


def start(
    folder: Path,
    config: str,
    *,
    seed: int,
    command: Sequence[str],
    processes: int = 1,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Make the folder of a new run and write config.yaml, run.json and `files` (name -> text). Main process only.

    config: the resolved configuration as YAML. command: what the user typed, without the interpreter.
    Raises ValueError where the folder already holds a run.
    """
    run = Run(folder)
    used = [path.name for path in folder.iterdir() if _is_work(path)] if folder.is_dir() else []
    if used:
        begun = any(run.checkpoints.glob("step-*"))
        first = f"go on with it by `genrl resume {folder}`" if begun else "it has no checkpoint: delete it"
        by = run_info(run).get("command")
        made = f"; made by `{shlex.join(by)}`" if by else ""
        raise ValueError(
            f"the run folder {folder} is not empty ({', '.join(sorted(used)[:4])}{made}): {first}, "
            "or choose another one with output=FOLDER."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    run.trackers.unlink(missing_ok=True)  # of a start that failed: a new run is new to trackers, too
    for name, text in files.items():
        write_atomic(folder / name, text)
    write_atomic(run.config, config)
    info = {
        "command": list(command),
        "seed": seed,
        "processes": processes,
        "started": _now(),
        "git_commit": _git_commit(),
        "versions": versions(),
        "resumed": [],
    }
    write_atomic(run.info, json.dumps(info, indent=1))
    return run


def resume(folder: Path, config: str, *, step: int, command: Sequence[str], found: Path | None = None) -> list[str]:
    """Make the folder ready to go on after `step` finished iterations. Main process only; the lock is held.

    found: the checkpoint to go on from. Its own copy of the configuration says what may not be another: config.yaml
    may have been damaged. A key which it lacks, of an older version, has its default. Writes the (possibly edited)
    configuration, notes the resumption in run.json and cuts the rows of metrics.jsonl after `step`. Returns the edits
    as lines to print.
    Raises ValueError where a key was edited that may not be, or the folder holds no run.
    """
    run = Run(folder)
    if not run.config.is_file():
        raise ValueError(f"{folder} holds no run: there is no config.yaml in it. Runs are made by `genrl train FILE`.")
    kept = found / "config.yaml" if found is not None else run.config
    before = kept if kept.is_file() else run.config
    try:
        was = load(before)
        edits = config_edits(dump(was), config)
    except ConfigError as error:
        raise ValueError(
            f"{before} is no configuration of this version of genrl: it was damaged, or another version wrote it "
            f"(run.json says which). Nothing was changed. {error}"
        ) from None
    objects = {key for key, value in leaves(plain(dump(was))).items() if is_given(value)}
    editable = (*EDITABLE, *objects)
    forbidden = [key for key in edits if key in KEPT or not any(fnmatchcase(key, pattern) for pattern in editable)]
    if forbidden:
        raise ValueError(
            f"cannot resume {folder} with another value of {', '.join(forbidden)}: "
            + "; ".join(edits[key] for key in forbidden)
            + f". Only {', '.join(EDITABLE)} may change, and of these not {', '.join(KEPT)}; "
            + "start a new run for anything else (output=FOLDER)."
        )
    if "distributed.fsdp" in edits and was.rounds_weights and step:
        raise ValueError(
            f"cannot resume {folder} with another value of distributed.fsdp: weights in shards are float32, those that "
            "a process holds whole are rounded to bfloat16, and what was trained last would be lost; keep it"
        )
    info = _info(run)
    if step == 0:
        _check_first_save(run, config)
    _remove_leftovers(folder)
    info["resumed"].append({"step": step, "time": _now(), "command": list(command), "git_commit": _git_commit()})
    truncate_metrics(run.metrics, step if step else -1)  # from the start: row 0 is made again too
    write_atomic(run.config, config)
    write_atomic(run.info, json.dumps(info, indent=1))
    return list(edits.values())


def _check_first_save(run: Run, config: str) -> None:
    """A run without checkpoints begins again, which its rows would not survive if it had saved once."""
    rows, every = read_metrics(run.metrics), plain(config).get("checkpoint", {}).get("every", 1)
    if rows and rows[-1]["step"] > every:
        raise ValueError(
            f"{run.folder} has no checkpoint left, and it has done {rows[-1]['step']} iterations; nothing was changed. "
            f"Put its checkpoints back, or start again in another folder: genrl train {run.config} output=FOLDER"
        )


def _info(run: Run) -> dict[str, Any]:
    """What run.json holds; what a lost one would hold of the resumptions: none yet."""
    try:
        found: dict[str, Any] = json.loads(run.info.read_text(encoding="utf-8"))
        if not isinstance(found["resumed"], list):
            raise TypeError("`resumed` is no list")
    except FileNotFoundError:
        logger.warning("%s is missing, so how the run was begun is not known; a new one is written", run.info)
        return {"resumed": []}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run.info} cannot be read ({error}). It only tells how the run was begun: repair it, or delete it to go "
            "on without. Nothing was changed."
        ) from None
    return found


def run_info(run: Run) -> dict[str, Any]:
    """What run.json holds, for readers; {} where it cannot be read."""
    try:
        found = json.loads(run.info.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def prepare(
    folder: Path,
    config: str,
    *,
    seed: int,
    processes: int,
    resumed_from: int | None,
    found: Path | None = None,
    script: Script | None = None,
) -> None:
    """`start`, or, after `resumed_from` finished iterations, `resume`, which warns of every edit. Main process only.
    script: that which trains, if it is not the command line."""
    command = ["genrl", *sys.argv[1:]] if script is None else ["python", *sys.argv]
    if resumed_from is None:
        files = {} if script is None else script.files
        start(folder, config, seed=seed, command=command, processes=processes, files=files)
        return
    for line in resume(folder, config, step=resumed_from, command=command, found=found):
        logger.warning("edited since the last save: %s", line)


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


def lock(folder: Path) -> FileLock:
    """Hold the run for this process until the returned lock is released, or as a context ends. The system frees it even
    after kill -9.

    Raises ValueError where another live process holds it, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / "run.lock", timeout=0)
        held.acquire()
    except Timeout:
        raise ValueError(
            f"another process is training in {folder}: wait for it, or choose another output=FOLDER."
        ) from None
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be written to: {error.strerror}. Make it writable, or choose another one "
            "with output=FOLDER."
        ) from None
    return held


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, [] where there is none. A half-written last line is left out.

    Raises ValueError naming file and line for anything else that is no row.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = [read_row(line, path, number) for number, line in enumerate(lines[:-1], 1)]
    try:
        return [*rows, read_row(lines[-1], path, len(lines))]
    except ValueError:  # no newline after it: empty, or its write was interrupted
        return rows


def read_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """One line of metrics.jsonl. Raises ValueError naming file and line where it is no row."""
    try:
        row: dict[str, Any] = json.loads(line)
        if not isinstance(row["step"], int):
            raise TypeError("the step is no number")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise ValueError(f"{path}:{number}: not a row of metrics; delete the line to go on") from None
    return row


def truncate_metrics(path: Path, step: int) -> None:
    """Keep the rows up to and including `step`, so that a resumed run writes the rest once."""
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    if path.is_file():
        write_atomic(path, "".join(json_line(row) for row in rows))


def json_line(row: Mapping[str, object]) -> str:
    """One line of JSON, keys sorted, so that equal runs write equal bytes."""
    return json.dumps(row, sort_keys=True, allow_nan=False) + "\n"


def write_atomic(path: Path, content: str | bytes) -> None:
    """The file holds the old content or the new, whatever happens. Readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Of Python and the packages which decide the numbers; "-" where one is not installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(DISTRIBUTIONS.get(name, name))
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def _is_work(path: Path) -> bool:
    """Whether this part of a run folder is more than a start that failed leaves."""
    if _LEFTOVER.fullmatch(path.name):
        return False
    return path.name not in _BEFORE_TRAINING and not (path.is_dir() and not any(path.iterdir()))


def _remove_leftovers(folder: Path) -> None:
    """What `write_atomic` had not renamed when its process was killed."""
    for path in folder.rglob(".*.tmp-*"):
        if path.is_file() and _LEFTOVER.fullmatch(path.name):
            path.unlink()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git_commit() -> str | None:
    """Of the checkout that genrl runs from, with `+` if files were changed; None for an installed package."""
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


def leaves(tree: object, prefix: str = "") -> dict[str, object]:
    """Dotted key -> value of everything in a configuration that is no section."""
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return {prefix.rstrip("."): tree}
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.")
    return found


def _shown(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key]) if key in values else "(absent)"
