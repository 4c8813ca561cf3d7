"""What the tests catch: lines of genrl/ and rewards/ changed at random, one at a time, and whether a test then fails.

    python -m benchmarks.mutations map runs/mutations            # which test runs which line: as long as the suite
    python -m benchmarks.mutations run runs/mutations            # 300 changed lines, about an hour on a core
    python -m benchmarks.mutations after runs/mutations ../later     # the same changes by the tests of a later checkout
    python -m benchmarks.mutations table runs/mutations

A change is a comparison turned, a constant, a sign, an index off by one, or a statement dropped; which ones is decided
by the seed and the sources. For each, the tests that run the line are run, cheapest first, those of the fast tier
before the slow ones, until one fails or they would cost more than `--budget` seconds. A line that is run when its
module is imported, or by processes of a test alone, is answered for by the tests that run anything of the module.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("genrl", "genrl_rewards")
TURNED: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!="}
TURNED |= {ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
SIGNS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}


@dataclass(frozen=True)
class Mutation:
    """One changed place. file: relative to the tree; start, end: offsets of bytes that `text` replaces."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str
    was: str


# -- which changes ------------------------------------------------------------------------------------------------


def mutations(tree: Path, file: Path) -> Iterator[Mutation]:
    """Every change of one file."""
    source = file.read_bytes()
    starts = [0]
    for row in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def offsets(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def change(node: Any, kind: str, start: int, end: int, text: str) -> Mutation:
        was = source[start:end].decode()
        return Mutation(str(file.relative_to(tree)), node.lineno, kind, start, end, text, was)

    def between(left: Any, right: Any, text: str, node: Any, kind: str) -> Iterator[Mutation]:
        """The operator between two operands, where it stands alone there (no bracket, no line end)."""
        start, end = offsets(left)[1], offsets(right)[0]
        if not set(source[start:end].decode()) & set("()\n#"):
            yield change(node, kind, start, end, f" {text} ")

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], TURNED[type(node.ops[0])], node, "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            yield from between(node.left, node.right, SIGNS[type(node.op)], node, "sign")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            start, end = offsets(node)
            yield change(node, "sign", start, end, source[slice(*offsets(node.operand))].decode())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield change(node, "constant", *offsets(node), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield change(node, "off by one", *offsets(node), str(node.value + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield change(node, "constant", *offsets(node), repr(node.value * 1.5 + 0.1))
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield change(node, "dropped", *offsets(node), "pass")


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs: no annotations, decorators, texts of errors, or blocks for type checkers."""
    if isinstance(node, ast.Raise) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "ctx"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def chosen(tree: Path, count: int, seed: int) -> list[Mutation]:
    """So many lines with one change each; the same for the same sources."""
    by_line: dict[tuple[str, int], list[Mutation]] = defaultdict(list)
    for folder in ("genrl", "rewards"):
        for file in sorted((tree / folder).rglob("*.py")):
            for mutation in mutations(tree, file):
                by_line[mutation.file, mutation.line].append(mutation)
    numbers = random.Random(seed)
    return [numbers.choice(by_line[line]) for line in numbers.sample(sorted(by_line), count)]


# -- which test runs which line: this module as a plugin of pytest ---------------------------------------------------


class Recorder:
    """Coverage by test, and what each test cost, of one worker."""

    def __init__(self, folder: Path, worker: str) -> None:
        import coverage

        self.coverage = coverage.Coverage(
            data_file=str(folder / f"lines.{worker}"), source_pkgs=list(PACKAGES), config_file=False
        )
        self.coverage.start()
        self.costs = (folder / f"costs.{worker}.jsonl").open("a", buffering=1, encoding="utf-8")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.coverage.switch_context(item.nodeid)
        began, slow = _cpu(), item.get_closest_marker("slow") is not None
        try:
            return (yield)
        finally:
            self.costs.write(json.dumps({"id": item.nodeid, "cpu": round(_cpu() - began, 4), "slow": slow}) + "\n")
            self.coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    """Record in pytest's workers, into the folder that `record` named."""
    folder, worker = os.environ.get("GENRL_MUTATIONS"), os.environ.get("PYTEST_XDIST_WORKER")
    if folder and worker:
        config.pluginmanager.register(Recorder(Path(folder), worker))


def _cpu() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def record(folder: Path) -> int:
    """Run the whole suite once and keep which test ran which line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tree").write_text(str(Path.cwd()), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.mutations", "-n", "2", "--dist", "loadfile"]
    return subprocess.run(command, env=os.environ | {"GENRL_MUTATIONS": str(folder.resolve())}).returncode


@dataclass
class Map:
    """What `record` left: tests by file and line, their cost in CPU seconds, and which are slow."""

    lines: dict[str, dict[int, set[str]]]
    costs: dict[str, float]
    slow: set[str]

    @classmethod
    def read(cls, folder: Path) -> Map:
        from coverage import CoverageData

        tree = (folder / "tree").read_text(encoding="utf-8")
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in sorted(folder.glob("lines.*")):
            data = CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                for line, contexts in data.contexts_by_lineno(file).items():
                    lines[os.path.relpath(file, tree)][line].update(filter(None, contexts))
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("costs.*.jsonl")))
        rows = [json.loads(row) for row in text.splitlines()]
        return cls(lines, {row["id"]: row["cpu"] for row in rows}, {row["id"] for row in rows if row["slow"]})

    def tests_of(self, mutation: Mutation, budget: float) -> list[str]:
        """Those that run the line, or else anything of its file: the fast tier before the slow, cheapest first, as
        many as cost `budget` CPU seconds together, and one at the least."""
        rows = self.lines.get(mutation.file, {})
        tests = rows.get(mutation.line) or set().union(*rows.values())
        tests &= self.costs.keys()
        picked: list[str] = []
        spent = 0.0
        for test in sorted(tests, key=lambda test: (test in self.slow, self.costs[test], test)):
            spent += self.costs[test]
            if picked and spent > budget:
                break
            picked.append(test)
        return picked


# -- running them ---------------------------------------------------------------------------------------------------


def prepare(source: Path, tests: Path, where: Path) -> None:
    """A copy of a tree to change files in, with the tests of another."""
    listed = subprocess.run(["git", "ls-files"], cwd=source, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not name.startswith("tests/") and (source / name).is_file():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, where / name)
    shutil.copytree(tests, where / "tests", ignore=shutil.ignore_patterns("__pycache__"))


@contextmanager
def mutated(tree: Path, mutation: Mutation, serial: int) -> Iterator[None]:
    """The tree with that change."""
    file = tree / mutation.file
    before, stat = file.read_bytes(), file.stat()
    file.write_bytes(before[: mutation.start] + mutation.text.encode() + before[mutation.end :])
    os.utime(file, (stat.st_atime, stat.st_mtime + 10 * serial + 10))  # so that compiled files are known to be old
    try:
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, (stat.st_atime, stat.st_mtime))


def failed(tree: Path, tests: Sequence[str], limit: float) -> str | None:
    """The first test that fails in the tree as it is: its name, "time" where none was done in `limit` CPU seconds,
    "crash" where the process died, None where all pass."""
    with tempfile.TemporaryDirectory() as scratch:
        first = Path(scratch) / "failed"
        child = os.fork()
        if child == 0:
            _run(tree, tests, first, scratch, limit)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test left running
        if os.WIFSIGNALED(status):
            return "time" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM) else "crash"
        if os.WEXITSTATUS(status) == 0:
            return None
        return first.read_text(encoding="utf-8") if first.exists() else "not collected"


class _First:
    """Of pytest: writes down the first test that fails."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid, encoding="utf-8")


def _run(tree: Path, tests: Sequence[str], first: Path, scratch: str, limit: float) -> None:
    """In the child: run the tests and leave."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    signal.alarm(int(4 * limit))  # a mutation may make it wait
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(tree)
    roots = [str(tree), str(tree / "rewards")]
    os.environ["PYTHONPATH"] = os.pathsep.join(roots)
    sys.path[:0] = roots
    options = ["-x", "-p", "no:cacheprovider", f"--basetemp={scratch}/tests", "--rootdir", str(tree)]
    os._exit(int(pytest.main([*options, *tests], plugins=[_First(first)])))


def preload() -> None:
    """Import what every test would, but nothing of this project."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE"}
    from genrl_rewards.models.torchvision_compat import ensure

    ensure()
    for module in ("diffusers", "transformers", "peft", "accelerate", "hypothesis", "scipy.stats"):
        importlib.import_module(module)
    for module in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[module]


def run(folder: Path, tree: Path, count: int, seed: int, budget: float) -> None:
    """Try every mutation and write one row each into caught.jsonl; goes on where it was stopped."""
    known, out = Map.read(folder), folder / "caught.jsonl"
    done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    preload()
    sound: set[str | None] = set()  # tests that pass where nothing is changed
    with tempfile.TemporaryDirectory() as scratch, out.open("a", buffering=1, encoding="utf-8") as rows:
        copy = Path(scratch) / "tree"
        prepare(tree, tree / "tests", copy)
        for serial, mutation in enumerate(chosen(tree, count, seed)):
            if serial < done:
                continue
            began, by = time.monotonic(), None
            picked = known.tests_of(mutation, budget)
            while picked:
                with mutated(copy, mutation, serial):
                    by = failed(copy, picked, 3 * budget)
                if by not in picked or by in sound or failed(copy, [by], 3 * budget) is None:
                    sound.add(by)
                    break
                known.costs.pop(by)  # fails here without any change
                picked, by = known.tests_of(mutation, budget), None
            row = asdict(mutation) | {"by": by, "fast": by is not None and by not in known.slow, "tests": len(picked)}
            rows.write(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}) + "\n")


def carried(mutation: Mutation, tree: Path, later: Path) -> Mutation | None:
    """The same change in a later tree: of the same line of the same file, or else of the one file that has it now;
    None where it is not there as often as it was."""
    source = (tree / mutation.file).read_bytes()
    begin, end = source.rfind(b"\n", 0, mutation.start) + 1, source.find(b"\n", mutation.end)
    begin += len(source[begin:end]) - len(source[begin:end].lstrip())
    line = re.compile(rb"^[ \t]*(" + re.escape(source[begin:end]) + rb")$", re.MULTILINE)
    was = [match.start(1) for match in line.finditer(source)]
    for files in ([later / mutation.file], [*later.glob("genrl/**/*.py"), *later.glob("rewards/**/*.py")]):
        texts = {file: file.read_bytes() for file in files if file.exists()}
        places = [(file, match.start(1)) for file, text in texts.items() for match in line.finditer(text)]
        if len(places) == len(was) and len({file for file, _ in places}) == 1:
            file, start = places[was.index(begin)]
            start += mutation.start - begin
            name, number = str(file.relative_to(later)), texts[file][:start].count(b"\n") + 1
            return replace(mutation, file=name, line=number, start=start, end=start + len(mutation.was.encode()))
    return None


def after(folder: Path, tree: Path, later: Path, limit: float) -> None:
    """The same changes in a later checkout, by its tests: by the one that caught it here, else by those of its files
    that had a test of the line here. A line that is gone counts neither way."""
    known, out = Map.read(folder), folder / "after.jsonl"
    done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    preload()
    with tempfile.TemporaryDirectory() as scratch, out.open("a", buffering=1, encoding="utf-8") as rows:
        copy = Path(scratch) / "tree"
        prepare(later, later / "tests", copy)
        for serial, row in enumerate(_rows(folder / "caught.jsonl")[done:], done):
            here = Mutation(**{field.name: row[field.name] for field in fields(Mutation)})
            there = carried(here, tree, copy)
            times = Counter(test.split("::")[0] for test in known.tests_of(here, math.inf))
            files = [file for file, _ in times.most_common() if (copy / file).exists()]
            by = there and row["by"] and _caught(copy, there, serial, [row["by"]], limit)
            by = by or (there and files and _caught(copy, there, serial, files, limit))
            rows.write(json.dumps(row | {"later": by or None, "gone": there is None}) + "\n")


def _caught(copy: Path, mutation: Mutation, serial: int, tests: Sequence[str], limit: float) -> str | None:
    """What fails with the change; None where nothing does, where no such test is left, or where it fails anyway."""
    with mutated(copy, mutation, serial):
        by = failed(copy, tests, limit)
    return None if by == "not collected" or (by and "::" in by and failed(copy, [by], limit) is not None) else by


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines()]


def table(folder: Path) -> str:
    """Shares caught, by kind of change, and what survived; beside it what the tests of the later checkout catch."""
    compared = (folder / "after.jsonl").exists()
    rows = [row for row in _rows(folder / ("after.jsonl" if compared else "caught.jsonl")) if not row.get("gone")]
    columns = {"caught": "by", "by the fast tier": "fast"} | ({"later": "later"} if compared else {})
    lines = [f"| change | lines | {' | '.join(columns)} |", "| --- | ---: |" + " ---: |" * len(columns)]
    for kind in [*sorted({row["kind"] for row in rows}), None]:
        some = [row for row in rows if kind in (None, row["kind"])]
        shares = [f"{sum(bool(row[key]) for row in some) / len(some):.1%}" for key in columns.values()]
        lines.append(f"| {kind or 'all'} | {len(some)} | {' | '.join(shares)} |")
    survived = [f"{row['file']}:{row['line']}: {row['was']!r} -> {row['text']!r}" for row in rows if not row["by"]]
    lost = [f"{row['file']}:{row['line']}: {row['by']}" for row in rows if compared and row["by"] and not row["later"]]
    return "\n".join([*lines, "", "Survived:", *survived, *(["", "No longer caught:", *lost] if compared else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("map", "run", "after", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("other", type=Path, nargs="?", help="the later checkout")
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="whose sources are changed")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="CPU seconds of tests for a line")
    asked = parser.parse_args()
    if asked.action == "map":
        sys.exit(record(asked.folder))
    if asked.action == "run":
        run(asked.folder, asked.tree.resolve(), asked.count, asked.seed, asked.budget)
    elif asked.action == "after":
        after(asked.folder, asked.tree.resolve(), asked.other.resolve(), 5 * asked.budget)
    print(table(asked.folder))


if __name__ == "__main__":
    main()
