"""All that has to be seen on a GPU, as one plan that loses no minute of it.

    python -m benchmarks.gpu --plan                      # what is checked, in which call, and how long it may take
    python -m benchmarks.gpu --dry-run --out FOLDER      # the checks with stand-in sizes, on a CPU
    python -m benchmarks.gpu [CHECK ...] [--budget 360] [--out benchmarks/results]

Each check is a process of its own (`benchmarks.gpu_checks`) with a limit on its time. Those that only say whether
something is right run side by side, as many as the card has memory for; those that time or weigh something run alone.
What a check finds is written as it goes: into gpu.json once it ends, by the name of the card, with the commit and the
raw samples, and what it printed into gpu.log. A second call goes on where the first one ended: a check that was done on
such a card is not run again unless it is named, and one that was not is told what it has found already. A check begins
only if its limit fits into what is left of the budget.

docs/gpu.md is made of gpu.json: `python -m benchmarks.gpu_page > docs/gpu.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
import torch

from benchmarks.common import COMMIT, RESULTS
from genrl.runtime.folder.run import write_atomic

CALL = 360
"""Seconds of a call: a card that is lent for a quarter of an hour has two, starts included."""
KERNELS = ("prefix_attention", "joint_attention")
FAMILIES = ("sd35_medium", "flux1_dev", "sdxl", "sd15", "qwen_image", "wan21_1_3b")
CACHE = Path(tempfile.gettempdir()) / "genrl-compiled"
"""What torch has compiled: it outlives a call."""
TAIL = 3000
"""Characters of what a check printed that gpu.json keeps where it failed."""


class Check(NamedTuple):
    """One row of the plan; its name is that of a function in `benchmarks.gpu_checks`, or function:argument."""

    name: str
    what: str
    limit: int
    """Seconds after which it is ended."""
    gigabytes: int | None = None
    """Of the card, beside others; None: it times or weighs something, so that nothing may run beside it."""


PLAN: tuple[Check, ...] = (
    Check("device", "name, memory, bandwidth and matrix rate of the card", 25),
    Check("models", "SD3.5-medium and FLUX.1-dev at full size, random weights, kept for the checks that follow", 60),
    Check("peer:512", "the usual loop against genrl on SD3.5-medium at 512 px, and the share of the matrix rate", 60),
    *(Check(f"peak:{name}", f"peak against `genrl check`'s estimate, SD3.5-medium: {name.replace('_', ' ')}", 50)
      for name in ("adapters", "graph_and_whole", "int8_and_offload")),
    Check("flux", "an iteration of FLUX.1-dev at full size", 60),
    *(Check(f"ratio:{name}", "ratio of the first update by precision, attention, kernels", 45)
      for name in ("qwen_image", "wan21_1_3b", "sd15")),
    Check("attention", "which attention kernels are right, backward too", 45),
    Check("kernel:prefix_attention", "against repeating the prefix by compiled and library kernels", 45),
    Check("language", "answers per second and an update of Qwen2.5-VL-3B, by choice", 60),
    Check("runs", "quickstart, language model and policy for a few iterations", 60),
    Check("compiled:sd35_medium", "ratio, compiled and with CUDA graphs, four blocks of full width", 120),
    *(Check(f"ratio:{name}", "ratio of the first update by precision, attention, kernels", 150, gigabytes=20)
      for name in ("sd35_medium", "flux1_dev", "sdxl")),
    Check("tests", "the tests marked gpu", 150, gigabytes=4),
    Check("group", "the quickstart by a process group of one", 100, gigabytes=2),
    *(Check(f"speed:{name}", "seconds and memory of an iteration at full size, by choice", 200)
      for name in ("sd35_medium", "flux1_dev")),
    Check("kernel:joint_attention", "against compiled and library, over the sizes of published models", 120),
    *(Check(f"compiled:{name}", "ratios again, compiled and with CUDA graphs", 280, gigabytes=20)
      for name in FAMILIES if name != "sd35_medium"),
    Check("suite", "tests that train or sample, on the card", 250),
)  # fmt: skip
"""In the order of their value: two calls of `CALL` seconds end before `compiled:sd35_medium`."""


class Running(NamedTuple):
    check: Check
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    file: Path
    began: float


def command_of(check: Check, file: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_checks", check.name, "--out", str(file)]


def start(check: Check, folder: Path, earlier: Mapping[str, Any], dry: bool) -> Running:
    """The process of a check. earlier: what it has found before."""
    file, output = folder / f"{check.name.replace(':', '-')}.json", tempfile.TemporaryFile()
    file.write_text(json.dumps(earlier))
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(CACHE), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    environment |= {"TMPDIR": str(folder), "GENRL_GPU_MODELS": str(folder / "models")}
    command = command_of(check, file)
    if dry:
        command.append("--dry-run")
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return Running(check, process, output, file, time.monotonic())


def end(one: Running) -> None:
    """End the process and all that it started, in groups of their own too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(one.process.pid).children(recursive=True), one.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    one.process.wait()


def ended(one: Running, log: Path) -> dict[str, Any] | None:
    """What there is to keep of a check: None while it runs within its limit."""
    seconds = time.monotonic() - one.began
    late = seconds > one.check.limit
    if one.process.poll() is None and not late:
        return None
    end(one)
    one.output.seek(0)
    text = one.output.read().decode(errors="replace")
    with log.open("a") as file:
        file.write(f"\n=== {one.check.name}\n{text}")
    status = "out of time" if late else "failed" if one.process.returncode else "done"
    row: dict[str, Any] = {"status": status, "seconds": round(seconds, 1), "commit": COMMIT}
    row["found"] = json.loads(one.file.read_text())  # written as it goes
    if status != "done":
        row["tail"] = text[-TAIL:]
    return row


def run(
    checks: Sequence[Check], out: Path, *, budget: float, dry: bool, on: str = "no GPU", gigabytes: float = math.inf
) -> bool:
    """Run the checks and write gpu.json; whether all were done. on: name of the card, with so much memory."""
    log, until = out / "gpu.log", time.monotonic() + budget
    known = results(out)
    mine = known.pop(on, {})
    known[on] = mine  # the newest is the last
    waiting, running, done = list(checks), list[Running](), True
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as made:
        try:
            while waiting or running:
                for one in list(running):
                    row = ended(one, log)
                    if row is not None:
                        running.remove(one)
                        mine[one.check.name] = row
                        done = done and row["status"] == "done"
                        write_atomic(out / "gpu.json", json.dumps(known, indent=1) + "\n")
                        print(f"{row['seconds']:6.0f} s  {one.check.name:<24}{row['status']}", flush=True)
                while waiting and _may_begin(waiting[0], running, gigabytes):
                    check = waiting.pop(0)
                    if check.limit > until - time.monotonic() and not dry:
                        print(f"          {check.name:<24}left out: its {check.limit} s do not fit", flush=True)
                        done = False
                        continue
                    earlier = mine.get(check.name, {}).get("found", {})
                    running.append(start(check, Path(made), earlier, dry))
                time.sleep(0.2)
        finally:
            for one in running:
                end(one)
    return done


def results(out: Path) -> dict[str, Any]:
    """Card -> check -> row."""
    file = out / "gpu.json"
    cards: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return cards


def _may_begin(check: Check, running: Sequence[Running], gigabytes: float) -> bool:
    if not running:
        return True
    if check.gigabytes is None or any(one.check.gigabytes is None for one in running):
        return False
    return check.gigabytes + sum(one.check.gigabytes or 0 for one in running) <= gigabytes


def calls(checks: Sequence[Check], budget: float) -> list[list[Check]]:
    """Which checks a call of so many seconds has time for, at their limits and without any beside another."""
    parts: list[list[Check]] = [[]]
    for check in checks:
        if parts[-1] and sum(one.limit for one in parts[-1]) + check.limit > budget:
            parts.append([])
        parts[-1].append(check)
    return parts


def plan(checks: Sequence[Check], budget: float) -> str:
    lines = []
    for number, part in enumerate(calls(checks, budget), 1):
        lines.append(f"call {number}: at most {sum(check.limit for check in part)} of {budget:.0f} s")
        lines += [f"  {check.limit:>4} s  {check.name:<26}{check.what}" for check in part]
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checks", nargs="*", metavar="CHECK", help="of the plan; default: those not done yet")
    arguments.add_argument("--plan", action="store_true", help="print the plan and end")
    arguments.add_argument("--dry-run", action="store_true", help="stand-in sizes on a CPU, into a folder of its own")
    arguments.add_argument("--budget", type=float, default=CALL, help="seconds of this call; default: %(default)s")
    arguments.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json; default: benchmarks/results")
    given = arguments.parse_args()
    names = {check.name: check for check in PLAN}
    if unknown := [name for name in given.checks if name not in names]:
        arguments.error(f"no check {', '.join(unknown)}; there are {', '.join(names)}")
    checks = [names[name] for name in given.checks] or list(PLAN)
    if given.plan:
        print(plan(checks, given.budget))
        return
    if given.dry_run:
        if given.out == RESULTS:
            arguments.error("--dry-run measures nothing: give it a folder of its own by --out")
        given.out.mkdir(parents=True, exist_ok=True)
        done = run(checks, given.out, budget=given.budget, dry=True, gigabytes=20)
        sys.exit(not done)
    if not torch.cuda.is_available():
        arguments.error("torch sees no GPU here; --dry-run --out FOLDER runs the checks on a CPU")
    card = torch.cuda.get_device_name()
    if not given.checks:
        checks = [check for check in checks if not is_done(given.out, card, check.name)]
    given.out.mkdir(parents=True, exist_ok=True)
    free = torch.cuda.mem_get_info()[0] / 1e9
    sys.exit(not run(checks, given.out, budget=given.budget, dry=False, on=card, gigabytes=free))


def is_done(out: Path, card: str, check: str) -> bool:
    """Whether another call did this on such a card."""
    return bool(results(out).get(card, {}).get(check, {}).get("status") == "done")


def _fast_folder() -> str | None:
    """Where models are written and read again: in memory, if there is enough of it."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 60e9 else None


if __name__ == "__main__":
    main()
