"""Makes missing runs: one at a time, resumable, beside others that do the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from benchmarks.claims import files, plan, stored
from benchmarks.claims.plan import Plan, Recipe
from genrl.config import load
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run, write_atomic

SECOND = {"name": "clipscore", "weight": 0, "args": {"model": "assets/tiny-clip"}}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
NICE = 10
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
Command = Callable[[list[str], Path, float, int], tuple[int, float]]


class Failed(RuntimeError):
    """A run ended with an error; its folder has the log."""


class Stopped(KeyboardInterrupt):
    """This process was asked to stop; what was under way has saved. code, spent: as `genrl` returns them."""

    def __init__(self, code: int, spent: float) -> None:
        super().__init__()
        self.code, self.spent = code, spent


def genrl(arguments: list[str], log: Path, until: float, threads: int) -> tuple[int, float]:
    """`genrl ...` in a process of its own: its exit code, and the processor's seconds of it and of its own processes,
    which have so many threads each. At `until` (time.monotonic) it is asked to save and stop, as when this process is.
    """
    environment = os.environ | ENVIRONMENT | dict.fromkeys(THREADS, str(threads))
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, "-m", "genrl", *arguments], env=environment, stdout=out, stderr=out)
    asked, left = False, False
    while True:
        try:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                process.returncode = os.waitstatus_to_exitcode(status)
                result = (process.returncode, usage.ru_utime + usage.ru_stime)
                if left:
                    raise Stopped(*result)
                return result
            if time.monotonic() > until and not asked:
                asked = True
                process.terminate()
            time.sleep(0.5)
        except Stopped:
            raise
        except KeyboardInterrupt:
            if left:
                raise
            left = asked = True
            process.terminate()


def work(
    given: Plan, minutes: float, folder: Path, store: Path = stored.FOLDER, command: Command = genrl, only: str = ""
) -> list[str]:
    """Make missing runs until the minutes are over; what is under way then is stopped, and goes on the next time.
    Returns what was stored. only: a pattern of names."""
    folder.mkdir(parents=True, exist_ok=True)
    until, made, tried = time.monotonic() + 60 * minutes, list[str](), set[str]()
    while time.monotonic() < until:
        kept = stored.read(store)
        todo = [
            (recipe, seed)
            for recipe, seed in plan.missing(given, kept, begun(folder))
            if (key := f"{recipe.name}-{seed}") not in tried
            and re.search(only, key)
            and not _place(folder, key).with_suffix(".failed").exists()
        ]
        if not todo:
            print("nothing is left that is missing and free", flush=True)
            break
        recipe, seed = todo[0]
        key = f"{recipe.name}-{seed}"
        about = plan.minutes(recipe, kept)
        print(f"{time.strftime('%H:%M')} {key}, about {about:.0f} CPU minutes, priority {recipe.priority}", flush=True)
        try:
            if make(given, recipe, seed, folder, until, store, command):
                made.append(key)
        except Timeout:
            tried.add(key)
            print("  another process makes it", flush=True)
        except Failed as error:
            tried.add(key)
            print(f"  {error}", flush=True)
    return made


def make(given: Plan, recipe: Recipe, seed: int, folder: Path, until: float, store: Path, command: Command) -> bool:
    """Make one run and store it; False where the time was over before. Raises Timeout where another process is at it or
    at one that it needs, and Failed."""
    key, kept = f"{recipe.name}-{seed}", stored.read(store)
    with _held(folder, key):
        for name, same in plan.needs(recipe):
            if not train(given, given.recipes[name], seed if same else 0, folder, until, command):
                return False
        if not train(given, recipe, seed, folder, until, command, held=True):
            return False
        run = Run(_place(folder, key))
        entry = stored.harvest(recipe, run) | {"cpu_s": _cost(run)["cpu_s"]}
        if entry["commit"] and not _cost(run).get("changed"):
            entry["commit"] = entry["commit"].rstrip("+")  # only runs and pages differed, as they do between two calls
        if recipe.diversity:
            import torch

            from benchmarks.diversity import measure

            torch.set_num_threads(1)
            entry["diversity"] = measure(run, recipe.evaluation)
        if old := kept.get(key):
            print(f"  it replaces a stored run of commit {old.get('commit') or 'unknown'}", flush=True)
        stored.write(key, entry, store)
        if recipe.name not in {name for one in given.recipes.values() for name, _ in plan.needs(one)}:
            shutil.rmtree(run.folder)
    return True


def train(
    given: Plan, recipe: Recipe, seed: int, folder: Path, until: float, command: Command, *, held: bool = False
) -> bool:
    """Train a run to its end in its folder, from where it was left; False where the time was over before."""
    key = f"{recipe.name}-{seed}"
    run = Run(_place(folder, key))
    if not held:
        with _held(folder, key):
            for name, same in plan.needs(recipe):
                if not train(given, given.recipes[name], seed if same else 0, folder, until, command):
                    return False
            return train(given, recipe, seed, folder, until, command, held=True)
    cost = _cost(run)
    if cost.get("done"):
        return True
    if run.folder.with_suffix(".failed").exists():
        raise Failed(f"{key}, which is needed, has failed before: see {run.folder.name}.failed")
    resumes = checkpoint.latest(run.checkpoints) is not None
    if not resumes:
        shutil.rmtree(run.folder, ignore_errors=True)
        cost = {"cpu_s": 0.0}
    lost = cost.get("open")  # it was killed: what that part cost is not known
    before = None if lost else cost["cpu_s"]
    log = run.folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    changed = bool(cost.get("changed")) or changes_of_code()
    write_atomic(_cost_file(run), json.dumps({"cpu_s": before, "open": True, "changed": changed}))
    arguments = ["resume", str(run.folder)] if resumes else ["train", *command_of(recipe, seed, folder, run)]
    if recipe.processes > 1:
        arguments.append(f"--nproc={recipe.processes}")
    asked: Stopped | None = None
    try:
        code, spent = command(arguments, log, until, recipe.threads)
    except Stopped as stopped:
        asked, code, spent = stopped, stopped.code, stopped.spent
    total = None if before is None else round(before + spent, 1)
    write_atomic(_cost_file(run), json.dumps({"cpu_s": total, "done": code == 0, "changed": changed}))
    if asked is not None:
        raise asked
    if code and code not in STOPPED and code not in (-signal.SIGINT, -signal.SIGTERM):
        run.folder.with_suffix(".failed").write_text(f"{' '.join(arguments)}\nended with {code}\n")
        raise Failed(f"{key} ended with {code}: see {log}; remove {run.folder.name}.failed beside it to try again")
    return code == 0


def changes_of_code() -> bool:
    """Whether files that decide a run differ from the commit."""
    command = ["git", "status", "--porcelain", "-uno", "--", "genrl", "rewards", "configs", "assets", "benchmarks/*.py"]
    return bool(subprocess.run(command, capture_output=True, text=True).stdout.strip())


def command_of(recipe: Recipe, seed: int, folder: Path, run: Run) -> list[str]:
    """Configuration and overrides of `genrl train`."""
    changes = [filled(change, seed, folder) for change in recipe.changes]
    own = [f"seed={seed}", f"output={run.folder}", "checkpoint.keep=1", "trackers=[]"]
    return [recipe.config, *changes, *(second_scorer(recipe.config, changes) if recipe.second else []), *own]


def filled(change: str, seed: int, folder: Path) -> str:
    """An override with the folders and files that it names."""

    def path_of(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "file":
            return str(files.written(name, folder))
        return str(_place(folder, f"{name}-{seed if kind == 'seed' else 0}"))

    return re.sub(r"\{(run|seed|file):([^}]*)\}", path_of, change)


def second_scorer(config: str, changes: list[str]) -> list[str]:
    """The change that adds one which is logged and never trained on, where there is no reward of weight 0."""
    rewards: list[dict[str, Any]] = [
        reward.model_dump(mode="json", exclude_defaults=True)
        for reward in load(config, changes).rewards  # type: ignore[union-attr]
    ]
    if any(reward.get("weight") == 0 for reward in rewards):
        return []
    flow = yaml.safe_dump([*rewards, SECOND], default_flow_style=True, width=10_000).strip()
    return [f"rewards={flow}"]


def begun(folder: Path) -> set[str]:
    """Runs that were left before their end."""
    folders = [path.parent for path in folder.glob("*/*/checkpoints")]
    return {path.relative_to(folder).as_posix() for path in folders}


@contextmanager
def _held(folder: Path, key: str) -> Iterator[None]:
    """Raises Timeout where another process holds the run; the system frees it after kill -9."""
    lock = FileLock(_place(folder, key).with_suffix(".lock"), timeout=0)
    lock_file = Path(lock.lock_file)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock:
        yield


def _place(folder: Path, key: str) -> Path:
    return folder.resolve() / key


def _cost_file(run: Run) -> Path:
    return run.folder.with_suffix(".cost")


def _cost(run: Run) -> dict[str, Any]:
    file = _cost_file(run)
    if not run.folder.exists() or not file.exists():
        return {"cpu_s": 0.0}
    cost: dict[str, Any] = json.loads(file.read_text())
    return cost
