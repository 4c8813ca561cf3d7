"""Whether this tree trains exactly as another commit does: brief runs of every configuration, there and here, compared.

    python -m benchmarks.same_numbers COMMIT [--only PATTERN] [--processes 1 2] [--jobs 2] [--cache DIR] [--keep]

Makes a worktree of the commit, runs every YAML file of its configs/ that trains an embedded model (`brief_runs`) with
the commit's code and with this tree's, uncommitted changes included: in one process, and every third of them in two,
too. Compares what they left (`run_entries`) byte for byte: metrics but times, trained weights, optimiser and kept
states, samples. Prints a table and exits with 1 where anything differs or a run fails.

A configuration is run from the file of the same path on each side; `--rename configs/a.yaml=configs/b.yaml` says that
it has moved. `--rename optimizer.safetensors=adamw.safetensors` says that a file of a checkpoint has, and
`--rename state.json:a=state.json:b` a key of one. `--allow KEY` names entries (`updates`, `*state.json:memory.*`) that
may differ. The table says which were used.

`--cache` keeps what the other commit's runs left, so that they are run once. Use one per machine: processors round
differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

from benchmarks import brief_runs, run_entries
from benchmarks.run_in_tree import REFUSED, Outcome, Tree

HERE = Path(__file__).resolve().parents[1]
GOOD = ("equal", "left out")


@dataclass(frozen=True)
class Job:
    """One configuration by so many processes; `here` is where this tree has it."""

    config: str
    here: str
    processes: int
    changes: list[str]


@dataclass(frozen=True)
class Result:
    """What came of a job: a word for the table, and what there is to say about it."""

    job: Job
    word: str
    notes: str
    seconds: float = 0.0

    def __str__(self) -> str:
        first, *more = self.notes.splitlines() or [""]
        line = f"{self.job.config:<49} {self.job.processes}  {self.word:<12} {self.seconds:5.0f} s  {first}"
        return "\n".join([line, *(f"    {text}" for text in more)])


class Cache:
    """What the other commit's runs left, by everything that it depends on except the machine."""

    def __init__(self, folder: Path | None, commit: str) -> None:
        self._folder, self._commit = folder, commit
        self._versions = {name: version(name) for name in ("torch", "diffusers", "transformers", "peft", "accelerate")}
        self._reader = hashlib.sha256(Path(run_entries.__file__).read_bytes()).hexdigest()

    def get(self, job: Job) -> Outcome | None:
        file = self._file(job)
        return Outcome(**json.loads(file.read_text())) if file is not None and file.is_file() else None

    def put(self, job: Job, outcome: Outcome) -> None:
        """Failures are not kept: they may be the machine's."""
        file = self._file(job)
        if file is None or outcome.code not in (0, REFUSED):
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".tmp-{os.getpid()}-{threading.get_ident()}")
        temporary.write_text(json.dumps(asdict(outcome)))
        temporary.replace(file)

    def _file(self, job: Job) -> Path | None:
        if self._folder is None:
            return None
        about = [self._commit, job.config, job.processes, sorted(job.changes), self._versions, self._reader]
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        return self._folder / self._commit / f"{Path(job.config).stem}-{job.processes}-{name}.json"


@dataclass(frozen=True)
class Comparison:
    """Both sides, and what may be otherwise."""

    there: Tree
    here: Tree
    cache: Cache
    renames: dict[str, str]
    allow: Sequence[str]

    def run(self, job: Job) -> Result:
        base = self.cache.get(job)
        if base is None:
            base = self.there.train(job.config, job.changes, job.processes)
            self.cache.put(job, base)
        if base.code == REFUSED and job.processes > 1:
            return Result(job, "left out", base.log.splitlines()[-1] if base.log else "refused")
        if base.code:
            return Result(job, "FAILED there", f"exit code {base.code}\n{base.log}", base.seconds)
        mine = self.here.train(job.here, job.changes, job.processes)
        if mine.code:
            return Result(job, "FAILED here", f"exit code {mine.code}\n{mine.log}", mine.seconds)
        word, notes = compare(base.entries, mine.entries, self.renames, self.allow)
        return Result(job, word, notes, mine.seconds)


def compare(
    there: run_entries.Entries, here: run_entries.Entries, renames: dict[str, str], allow: Sequence[str]
) -> tuple[str, str]:
    """(word, notes) of two runs."""
    differences = run_entries.differences(there, here, renames)
    bad = [one for one in differences if not run_entries.allowed(one, allow)]
    if bad:
        files = _counted(one.name.split(":", 1)[0] for one in bad)
        keys = _counted(one.name.rsplit(":", 1)[-1] for one in bad)
        return "DIFFERS", f"{len(bad)} of {len(there)} entries\nfirst {bad[0]}\nin {files}\nkeys {keys}"
    notes = f"{len(there)} entries"
    if differences:
        notes += f", but (allowed) {_counted(one.name.rsplit(':', 1)[-1] for one in differences)}"
    if not run_entries.trained(there):
        notes += "; no weight moves between its checkpoints"
    return "equal", notes


def _counted(names: Iterable[str], most: int = 6) -> str:
    counts = Counter(names)
    others = len(counts) - most
    text = ", ".join(f"{name} {count}" for name, count in counts.most_common(most))
    return text + (f" and {others} others" if others > 0 else "")


def select(there: Path, here: Path, given: argparse.Namespace) -> tuple[list[Job], list[Result]]:
    """What is to be run, and what is not with the reason. Every third is run by two processes, too."""
    renames = dict(given.rename)
    jobs: list[list[Job]] = []
    others: list[Result] = []
    for file in sorted((there / "configs").rglob("*.yaml")):
        name = file.relative_to(there).as_posix()
        tree = brief_runs.load(file)
        changes = [f"{key}={number}" for key, number in brief_runs.overrides(tree, given.iterations).items()]
        both = [Job(name, renames.get(name, name), processes, changes) for processes in (1, 2)]
        reason = brief_runs.left_out(tree, there)
        if reason is not None:
            others.append(Result(both[0], "left out", reason))
        elif not (here / both[0].here).is_file():
            others.append(Result(both[0], "MISSING", f"{both[0].here} is not here; --rename {name}=NEW says where"))
        else:
            jobs.append(both)
    chosen = [one for one, _ in jobs] + [two for _, two in jobs[::3]]
    return [job for job in chosen if _wanted(job, given)], [result for result in others if _wanted(result.job, given)]


def _wanted(job: Job, given: argparse.Namespace) -> bool:
    return job.processes in given.processes and any(fnmatch(job.config, f"*{pattern}*") for pattern in given.only)


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit in a new folder, which is gone afterwards."""
    git = ["git", "-C", str(HERE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def _arguments() -> argparse.Namespace:
    def pair(text: str) -> tuple[str, str]:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
        return old, new

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what this tree is compared with")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="configurations: grpo, vla/*")
    parser.add_argument("--processes", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="default: both")
    parser.add_argument("--iterations", type=int, default=2, help="of each run; default 2")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default 2")
    parser.add_argument("--cache", type=Path, help="folder for what the other commit's runs left; default: none")
    parser.add_argument("--rename", action="append", type=pair, default=[], metavar="OLD=NEW", help="see above")
    parser.add_argument("--allow", action="append", default=[], metavar="KEY", help="entry that may differ")
    parser.add_argument("--keep", action="store_true", help="leave the run folders where they are")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    revision = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--verify", f"{given.commit}^{{commit}}"], capture_output=True, text=True
    )
    if revision.returncode:
        sys.exit(f"{given.commit} is no commit: {revision.stderr.strip()}")
    commit = revision.stdout.strip()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="same_numbers-"))
        if not given.keep:
            stack.callback(shutil.rmtree, folder)
        other = stack.enter_context(worktree(commit, folder / folder.name))
        there = stack.enter_context(closing(Tree(other, folder / "there")))
        here = stack.enter_context(closing(Tree(HERE, folder / "here")))
        results = _compare_all(
            Comparison(there, here, Cache(given.cache, commit), dict(given.rename), given.allow), other, given
        )
        if given.keep:
            print(f"runs: {folder}/there and {folder}/here")
    counts = Counter(result.word for result in results)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    sys.exit(int(any(result.word not in GOOD for result in results) or not counts["equal"]))


def _compare_all(comparison: Comparison, there: Path, given: argparse.Namespace) -> list[Result]:
    """Prints each result as it comes. Two processes take two places."""
    jobs, results = select(there, HERE, given)
    for result in results:
        print(result)
    for title, pairs in (("renamed", comparison.renames.items()), ("may differ", [(key, "") for key in given.allow])):
        for old, new in pairs:
            print(f"{title}: {old} {new}".rstrip())
    for processes, places in ((1, given.jobs), (2, max(1, given.jobs // 2))):
        with ThreadPoolExecutor(places) as pool:
            try:
                for result in pool.map(comparison.run, [job for job in jobs if job.processes == processes]):
                    print(result, flush=True)
                    results.append(result)
            except BaseException:  # Ctrl-C: what runs is ended, not waited for
                comparison.there.close()
                comparison.here.close()
                raise
    return results


if __name__ == "__main__":
    main()
