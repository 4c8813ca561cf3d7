"""What a run survives: kills, damage, full disks, stops, numbers that are not finite, broken reward servers.

    python -m benchmarks.drills [--kills 100] [--flips 3000] [--only "killed at random" ...]

Each drill does its worst many times, to runs on the embedded models where it needs runs, and says of how many tries the
outcome was right and what was lost. Right is one of: the run goes on and ends with the bits of one that was left alone;
or it stops with a message, and nothing on disk was changed. Lost is work after the last save, or worse. Prints the
table of docs/reliability.md and writes drills.json.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from benchmarks.common import parser, save
from benchmarks.drill import ROOT, Row, begun, config_of, newest, train_file
from benchmarks.ray_drills import killed_on_ray
from benchmarks.server_drills import broken_servers, mutated_bodies, slow_strangers
from genrl.config import RunConfig, dump, load
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder import run as run_folder
from genrl.runtime.folder.contents import config_edits
from genrl.runtime.folder.run import Run, read_metrics
from genrl.runtime.loop import frame
from tests import run_folders
from tests.planted import replayed

KINDS = {"pipeline": "flow_grpo.yaml", "policy in simulation": "vla/flow_sde.yaml", "token model": "vlm/grpo.yaml"}
PLANTED = [
    *("flow_grpo.yaml", "diffusion/diffusion_nft.yaml", "diffusion/tree_rpo.yaml", "diffusion/dpo.yaml"),
    *("vla/flow_sde.yaml", "vla/dppo.yaml", "vla/sft.yaml"),
    *("vlm/grpo.yaml", "vlm/bgpo.yaml", "vlm/grid_grpo.yaml"),
]


# -- processes that end ----------------------------------------------------------------------------------------------


def killed_at_random(kills: int, chance: random.Random) -> Iterator[Row]:
    """SIGKILL while a run loads, samples, trains or saves; then it is let go on to its end."""
    for kind, name in KINDS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            yield _killed(kind, name, folder, -(-kills // len(KINDS)), chance)


def _killed(kind: str, name: str, folder: Path, kills: int, chance: random.Random) -> Row:
    run, path = folder / "cut", folder / "run.yaml"
    # the length of a run must not matter: it is not known how far it comes
    path.write_text(dump(config_of(name, run, 10**6, **{"optimizer.schedule": "constant"})))
    startup, least, notes = 0.0, -1, list[str]()
    for number in range(kills):
        started, process = time.monotonic(), begun(path, run, folder / "log")
        if number == 0:  # how long it takes until the first save
            while newest(run) < 1 and process.exitcode is None:
                time.sleep(0.01)
            startup = time.monotonic() - started
        else:
            process.join(chance.uniform(0.0, 1.5 * startup))
        if process.exitcode is not None:
            notes.append(f"{kind}, before kill {number + 1}: ended by itself: {(folder / 'log').read_text()[-300:]}")
        process.kill()
        process.join()
        now = newest(run)
        if now < least:
            notes.append(f"{kind}, kill {number + 1}: a checkpoint was lost")
        least = max(least, now)
    end = load(path, [f"iterations={least + 2}"])
    straight = frame.train(load(path, [f"iterations={least + 2}", f"output={folder / 'straight'}"]))
    notes += run_folders.differences(straight, frame.train(end, run))
    lost = "work since the last save" if not notes else "; ".join(notes)[:200]
    return Row(f"killed at random: {kind}", kills, 0 if notes else kills, lost, tuple(notes[:20]))


def stopped_and_continued(tries: int, chance: random.Random) -> Iterator[Row]:
    """SIGSTOP for longer than `distributed.timeout_s`, then SIGCONT."""
    with tempfile.TemporaryDirectory() as place:
        run, path = Path(place) / "run", Path(place) / "run.yaml"
        path.write_text(dump(config_of("vla/flow_sde.yaml", run, 1000, **{"distributed.timeout_s": 3})))
        process, survived = begun(path, run, Path(place) / "log"), 0
        while newest(run) < 1 and process.exitcode is None:
            time.sleep(0.01)
        for _ in range(tries):
            if process.exitcode is not None or process.pid is None:
                break
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(4.0 + chance.random())
            os.kill(process.pid, signal.SIGCONT)
            before, until = newest(run), time.monotonic() + 60
            while process.exitcode is None and newest(run) <= before and time.monotonic() < until:
                process.join(0.2)
            survived += process.exitcode is None and newest(run) > before
        process.kill()
        process.join()
    yield Row("stopped for longer than timeout_s", tries, survived, "nothing" if survived == tries else "the run ended")


def two_starters(tries: int, _: random.Random) -> Iterator[Row]:
    """Two processes train into one folder: one does, the other is refused."""
    survived = 0
    for _number in range(tries):
        with tempfile.TemporaryDirectory() as place:
            run, path = Path(place) / "run", Path(place) / "run.yaml"
            path.write_text(dump(config_of("vla/flow_sde.yaml", run, 2)))
            both = [run_folders.start(train_file, str(path), None, log=Path(place) / f"log-{k}") for k in range(2)]
            codes = sorted(code or 0 for code in run_folders.wait(both, 300))
            said = "".join((Path(place) / f"log-{k}").read_text() for k in range(2))
            refused = "another process is training" in said or "is not empty" in said
            survived += codes == [0, 1] and refused and len(read_metrics(Run(run).metrics)) == 2
    yield Row("two starters in one folder", tries, survived, "nothing")


# -- files that are damaged ------------------------------------------------------------------------------------------


def _flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped": _flip,
    "cut": lambda file, chance: os.truncate(file, chance.randrange(max(1, file.stat().st_size))),
    "deleted": lambda file, _: file.unlink(),
    "emptied": lambda file, _: file.write_bytes(b""),
}


@contextmanager
def finished_run(name: str) -> Iterator[tuple[RunConfig, Path]]:
    """A run of two iterations with a checkpoint of each."""
    with tempfile.TemporaryDirectory() as place:
        config = config_of(name, Path(place) / "run", 2)
        frame.train(config)
        yield config, Path(place) / "run"


def damaged_files(_: int, chance: random.Random) -> Iterator[Row]:
    """Every file of the newest checkpoint, and of the run folder: flipped, cut, deleted, emptied."""
    for kind, name in KINDS.items():
        with finished_run(name) as (config, run):
            newest = checkpoint.steps(Run(run).checkpoints)[0]
            inside = [file for file in sorted(newest.rglob("*")) if file.is_file()]
            outside = [run / one for one in ("config.yaml", "run.json", "metrics.jsonl")]
            notes = list[str]()
            for file in [*inside, *outside]:
                for damage, apply in DAMAGE.items():
                    notes += _after_damage(config, run, file, damage, apply, chance)
            tries = len(DAMAGE) * (len(inside) + len(outside))
            yield Row(f"files damaged: {kind}", tries, tries - len(notes), "nothing that could be read", tuple(notes))


def _after_damage(
    config: RunConfig,
    run: Path,
    file: Path,
    damage: str,
    apply: Callable[[Path, random.Random], None],
    chance: random.Random,
) -> list[str]:
    """Damage a copy of the run, and make it ready to go on."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "run"
        shutil.copytree(run, copy)
        whole = _content(copy)
        apply(copy / file.relative_to(run), chance)
        damaged = _content(copy)
        name = f"{file.relative_to(run)} {damage}"
        try:
            last_checkpoint = checkpoint.to_resume(Run(copy).checkpoints)
            step = int(last_checkpoint.name.removeprefix("step-")) if last_checkpoint else 0
            again = load(copy / "config.yaml")
            run_folder.resume(copy, dump(again), step=step, command=["drill"], last_checkpoint=last_checkpoint)
            assert last_checkpoint is not None
            checkpoint.load(last_checkpoint)
        except ValueError:
            inside = file.is_relative_to(run / "checkpoints")  # there the one before is good
            wrong = "something was changed" if _content(copy) != damaged else "for nothing" if inside else ""
            return [f"{name}: refused, {wrong}"] if wrong else []
        except Exception as error:  # noqa: BLE001  # any other is a failure of the drill
            return [f"{name}: {type(error).__name__}: {error}"]
        if dump(again) != dump(config):
            edits = config_edits(dump(config), dump(again))
            allowed = all(any(fnmatchcase(key, one) for one in run_folder.EDITABLE) for key in edits)
            return [] if allowed else [f"{name}: another configuration was taken: {list(edits.values())[:2]}"]
        unread = file.is_relative_to(run / "checkpoints") and damaged != whole
        return [f"{name}: taken as complete"] if unread and step == 2 else []


def _content(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "run.lock")
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def flipped_manifests(flips: int, chance: random.Random) -> Iterator[Row]:
    """Single bits of the newest manifest: the checkpoint before it is taken, unless the manifest says the same."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in (1, 2):
            tensors = {"weights": {"a": torch.full((8,), float(step))}, "optimizer": {}}
            checkpoint.save(folder, step, tensors=tensors, state={"step": step}, keep=2)
        manifest, survived = folder / "step-000002" / checkpoint.MANIFEST, 0
        whole = manifest.read_bytes()
        for _ in range(flips):
            manifest.write_bytes(whole)
            _flip(manifest, chance)
            with suppress(ValueError):
                last_checkpoint = checkpoint.to_resume(folder)
                assert last_checkpoint is not None
                loaded = checkpoint.load(last_checkpoint)
                survived += float(loaded.tensors["weights"]["a"][0]) == loaded.step == loaded.state["step"]
    yield Row("bits of a manifest flipped", flips, survived, "nothing" if survived == flips else "see survived")


def full_disk(_: int, __: random.Random) -> Iterator[Row]:
    """No space left at each file operation of a save."""
    points: list[str] = []

    def fail_at(number: int) -> Callable[[str], None]:
        def fault(point: str) -> None:
            points.append(point)
            if len(points) == number:
                raise OSError(errno.ENOSPC, "No space left on device")

        return fault

    tries = survived = 0
    kept, tensors = checkpoint._fault, {"weights": {"a": torch.ones(8)}, "optimizer": {}}
    try:
        while True:
            with tempfile.TemporaryDirectory() as place:
                checkpoint._fault = lambda _: None  # type: ignore[assignment]
                checkpoint.save(Path(place), 1, tensors=tensors, state={}, keep=1)
                points.clear()
                checkpoint._fault = fail_at(tries + 1)  # type: ignore[assignment]
                with suppress(checkpoint.CheckpointError):
                    checkpoint.save(Path(place), 2, tensors=tensors, state={}, keep=1)
                if len(points) <= tries:
                    break
                tries += 1
                last_checkpoint = checkpoint.latest(Path(place))
                survived += last_checkpoint is not None and checkpoint.load(last_checkpoint).step in (1, 2)
    finally:
        checkpoint._fault = kept  # type: ignore[assignment]
    yield Row("disk full during a save", tries, survived, "that save")


def read_only(_: int, __: random.Random) -> Iterator[Row]:
    """A run folder on a file system that is mounted read-only; left out where nothing can be mounted."""
    with tempfile.TemporaryDirectory() as place:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], capture_output=True)
        if mounted.returncode:
            yield Row("read-only run folder: nothing can be mounted here", 0, 0, "-")
            return
        try:
            config = config_of("vla/flow_sde.yaml", Path(place) / "run", 2)
            frame.train(config)
            yield Row("read-only run folder", 1, 0, "-", ("it was not refused",))
        except ValueError as error:
            yield Row("read-only run folder", 1, int("cannot be written to" in str(error)), "nothing", (str(error),))
        finally:
            subprocess.run(["umount", place], check=True)


# -- numbers that are not finite -------------------------------------------------------------------------------------


def planted_nan(tries: int, _: random.Random) -> Iterator[Row]:
    """A gradient of NaN in the second iteration: the run stops before the update, and its dump replays to the bit."""
    notes = []
    chosen = PLANTED[:tries]
    for name in chosen:
        with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
            try:
                replayed(config_of(name, Path(place) / "run", 2), patch)
            except (AssertionError, RuntimeError) as error:
                notes.append(f"{name}: {error}"[:200])
    yield Row("NaN in a gradient", len(chosen), len(chosen) - len(notes), "the iteration", tuple(notes))


DRILLS: dict[str, tuple[Callable[[int, random.Random], Iterator[Row]], int]] = {
    "killed at random": (killed_at_random, 100),
    "killed on Ray": (killed_on_ray, 50),
    "files damaged": (damaged_files, 0),
    "bits of a manifest flipped": (flipped_manifests, 3000),
    "disk full": (full_disk, 0),
    "read-only": (read_only, 0),
    "stopped": (stopped_and_continued, 3),
    "two starters": (two_starters, 3),
    "NaN": (planted_nan, 10),
    "broken reward servers": (broken_servers, 0),
    "mutated requests": (mutated_bodies, 2500),
    "slow strangers": (slow_strangers, 0),
}
"""Name -> (drill, how often)."""


def run_drill(name: str, tries: int | None = None, seed: int = 0) -> list[Row]:
    """Its rows."""
    drill, usual = DRILLS[name]
    return list(drill(usual if tries is None else tries, random.Random(seed)))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=100, help="over all kinds of run; default: 100")
    arguments.add_argument("--ray-kills", type=int, default=50, help="of a run on a Ray cluster; default: 50")
    arguments.add_argument("--flips", type=int, default=3000, help="of bits of a manifest; default: 3000")
    arguments.add_argument("--only", nargs="+", choices=DRILLS, default=list(DRILLS), metavar="DRILL")
    given = arguments.parse_args()
    os.chdir(ROOT)
    tries = {
        "killed at random": given.kills,
        "killed on Ray": given.ray_kills,
        "bits of a manifest flipped": given.flips,
    }
    rows: list[Row] = []
    print("| drill | tries | survived | lost |\n| --- | --- | --- | --- |", flush=True)
    for name in given.only:
        for row in run_drill(name, tries.get(name)):
            rows.append(row)
            print(f"| {row.drill} | {row.tries} | {row.survived} | {row.lost} |", flush=True)
    for row in rows:
        for note in row.notes:
            print(f"{row.drill}: {note}")
    save(given.out, "drills", [row._asdict() for row in rows])


if __name__ == "__main__":
    main()
