"""The run folder: what is in it, and how it is written and read back.

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
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from genrl.config import ConfigError, dump, load
from genrl.config.errors import command
from genrl.config.yaml_source import plain
from genrl.runtime.folder.contents import changed, config_edits, contents, git_commit, is_model, leaves, versions
from genrl_rewards.given import is_given

EDITABLE = (
    *("iterations", "idle_iterations", "checkpoint.*", "evaluation.*", "trackers", "output"),
    *("rewards.*.remote", "rewards.*.isolate", "rewards.*.outage.*"),  # where a score comes from, not what it is
    *("environment.workers", "environment.timeout_s"),  # where simulators run
    *("engine", "engine.*"),  # where samples are drawn
    "distributed.fsdp",  # which processes hold the weights
)
KEPT = ("evaluation.right_at",)
"""Not editable after all: training may go by it (RLFR), and a curve has one meaning of right."""
logger = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"\..+\.tmp-\d+")
_BEFORE_TRAINING = {
    "train_prompts.jsonl",
    "eval_prompts.jsonl",
    "config.yaml",
    "run.json",
    "run.lock",
    *("tensorboard", "wandb", "swanlog"),
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
    _check_unused(run)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    run.trackers.unlink(missing_ok=True)  # of a start that failed: a new run is new to trackers, too
    info = {
        "command": list(command),
        "seed": seed,
        "processes": processes,
        "started": _now(),
        "git_commit": git_commit(),
        "versions": versions(),
        "resumed": [],
    }
    write_atomic(run.info, json.dumps(info, indent=1))  # first: it says that the files beside it are a run's
    for name, text in files.items():
        write_atomic(folder / name, text)
    write_atomic(run.config, config)
    write_atomic(run.info, json.dumps(info | {"contents": contents(config)}, indent=1))
    return run


def _check_unused(run: Run) -> None:
    """Raises ValueError where a new run would write among other files: a run's, several runs', or a user's own."""
    folder = run.folder
    if not folder.is_dir():
        return
    begun = "command" in run_info(run)  # another program's run.json is a user's file
    used = sorted(path.name for path in folder.iterdir() if _is_work(path, begun))
    if not used:
        return
    others = sorted({str(file.parent) for depth in ("*", "*/*") for file in folder.glob(f"{depth}/run.json")})
    by = run_info(run).get("command")
    hint = f"; made by `{shlex.join(by)}`" if by else ""
    if others:
        first = f"it holds other runs ({', '.join(others[:4])}); choose one of its own, as output={folder / 'NAME'}"
    elif any(run.checkpoints.glob("step-*")):
        first = f"go on with it by `{command('resume', folder)}`, or choose another one with output=FOLDER"
    elif begun:
        first = "it has no checkpoint: delete it, or choose another one with output=FOLDER"
    else:
        first = "no run has made these files (there is no run.json of one), and none is overwritten; choose another one"
        first += " with output=FOLDER"
    raise ValueError(f"the run folder {folder} is not empty ({', '.join(used[:4])}{hint}): {first}.")


def resume(
    folder: Path, config: str, *, step: int, command: Sequence[str], last_checkpoint: Path | None = None
) -> list[str]:
    """Make the folder ready to go on after `step` finished iterations. Main process only; the lock is held.

    last_checkpoint: what the run goes on from. Its own copy of the configuration says what may not be another:
    config.yaml may have been damaged. A key which it lacks, of an older version, has its default. Writes the (possibly
    edited) configuration, notes the resumption in run.json and cuts the rows of metrics.jsonl after `step`. Returns the
    edits and what else is not as it was (prompts, rewards: `contents`), as lines to print.
    Raises ValueError where a key was edited that may not be, the model is another, or the folder holds no run.
    """
    run = Run(folder)
    if not run.config.is_file():
        raise ValueError(f"{folder} holds no run: there is no config.yaml in it. Runs are made by `genrl train FILE`.")
    file = last_checkpoint / "config.yaml" if last_checkpoint is not None else run.config
    before = file if file.is_file() else run.config
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
    sharded = bool(was.distributed.fsdp), bool(plain(config)["distributed"]["fsdp"])  # true and node hold the same
    if sharded[0] != sharded[1] and was.rounds_weights and step:
        raise ValueError(
            f"cannot resume {folder} with another value of distributed.fsdp: weights in shards are float32, those that "
            "a process holds whole are rounded to bfloat16, and what was trained last would be lost; keep it"
        )
    info = _info(run)
    if step == 0:
        _check_first_save(run, config)
    now = contents(config)
    others = changed(info.get("contents", {}), now, edits)
    if step and (models := [entry for entry in others if is_model(entry)]):
        raise ValueError(
            f"cannot resume {folder}: what it trains is not what it began with ({_some(models)}). Put the files back, "
            "or start a new run (output=FOLDER). Nothing was changed."
        )
    info["contents"] = now
    _remove_leftovers(folder)
    info["resumed"].append({"step": step, "time": _now(), "command": list(command), "git_commit": git_commit()})
    truncate_metrics(run.metrics, step if step else -1)  # from the start: row 0 is made again too
    write_atomic(run.config, config)
    write_atomic(run.info, json.dumps(info, indent=1))
    return [*edits.values(), *([f"the content of {_some(others)}"] if others else [])]


def _some(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
    return "; ".join(entries[:4]) + more


def _check_first_save(run: Run, config: str) -> None:
    """A run without checkpoints begins again, which its rows would not survive if it had saved once."""
    rows, every = read_metrics(run.metrics), plain(config).get("checkpoint", {}).get("every", 1)
    if rows and rows[-1]["step"] > every:
        raise ValueError(
            f"{run.folder} has no checkpoint left, and it has done {rows[-1]['step']} iterations; nothing was changed. "
            f"Put its checkpoints back, or start again in another folder: {command('train', run.config)} output=FOLDER"
        )


def _info(run: Run) -> dict[str, Any]:
    """What run.json holds; what a lost one would hold of the resumptions: none yet."""
    try:
        info: dict[str, Any] = json.loads(run.info.read_text(encoding="utf-8"))
        if not isinstance(info["resumed"], list):
            raise TypeError("`resumed` is no list")
        if not isinstance(info.get("contents", {}), dict):
            raise TypeError("`contents` is no object")
    except FileNotFoundError:
        logger.warning("%s is missing, so how the run was begun is not known; a new one is written", run.info)
        return {"resumed": []}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run.info} cannot be read ({error}). It only tells how the run was begun: repair it, or delete it to go "
            "on without. Nothing was changed."
        ) from None
    return info


def run_info(run: Run) -> dict[str, Any]:
    """What run.json holds, for readers; {} where it cannot be read."""
    try:
        info = json.loads(run.info.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def prepare(
    folder: Path,
    config: str,
    *,
    seed: int,
    processes: int,
    resumed_from: int | None,
    last_checkpoint: Path | None = None,
    script: Script | None = None,
) -> None:
    """`start`, or, after `resumed_from` finished iterations, `resume`, which warns of every edit. Main process only.
    script: that which trains, if it is not the command line."""
    command = ["genrl", *sys.argv[1:]] if script is None else ["python", *sys.argv]
    if resumed_from is None:
        files = {} if script is None else script.files
        start(folder, config, seed=seed, command=command, processes=processes, files=files)
        return
    for line in resume(folder, config, step=resumed_from, command=command, last_checkpoint=last_checkpoint):
        logger.warning("changed since the last save: %s", line)


@contextmanager
def unchanged_where_refused(run: Run, *, resumes: bool) -> Iterator[None]:
    """Put a resumed run's files back as they were before, where a ValueError leaves the block."""
    files = [run.config, run.info, run.metrics] if resumes else []
    before = {file: file.read_bytes() for file in files if file.is_file()}
    try:
        yield
    except ValueError:
        for file, content in before.items():
            if file.read_bytes() != content:
                write_atomic(file, content)
        raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, [] where there is none. A half-written last line is left out.

    Raises ValueError naming file and line for anything else that is no row.
    """
    if not path.is_file():
        return []
    # Bytes: a write that was cut off may end within a letter.
    lines = path.read_bytes().split(b"\n")
    rows = [read_row(line, path, number) for number, line in enumerate(lines[:-1], 1)]
    try:
        return [*rows, read_row(lines[-1], path, len(lines))]
    except ValueError:  # no newline after it: empty, or its write was interrupted
        return rows


def read_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """One line of metrics.jsonl. Raises ValueError naming file and line where it is no row."""
    try:
        row: dict[str, Any] = json.loads(line, parse_constant=_no_number)
        if not isinstance(row["step"], int):
            raise TypeError("the step is no number")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise ValueError(f"{path}:{number}: not a row of metrics; delete the line to go on") from None
    return row


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is never written")


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
    # Beside it: a rename is one step only within a file system.
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def synced(path: Path) -> None:
    """Wait until a file, or a folder's list of its files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_work(path: Path, begun: bool) -> bool:
    """Whether this part of a run folder is more than a start that failed leaves. begun: a run.json is beside it."""
    if _LEFTOVER.fullmatch(path.name) or path.name == "run.lock":
        return False
    return not (begun and path.name in _BEFORE_TRAINING) and not (path.is_dir() and not any(path.iterdir()))


def _remove_leftovers(folder: Path) -> None:
    """What `write_atomic` had not renamed when its process was killed."""
    for path in folder.rglob(".*.tmp-*"):
        if path.is_file() and _LEFTOVER.fullmatch(path.name):
            path.unlink()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
