"""All that has to be seen on a GPU, as one plan that loses no minute of it.

    python -m benchmarks.gpu --plan                      # what is checked, in which order, and how long it may take
    python -m benchmarks.gpu --dry-run                   # every check with stand-in sizes, on a CPU
    python -m benchmarks.gpu [CHECK ...] [--budget 540] [--out benchmarks/results]

Each check is a process of its own (`benchmarks.gpu_checks`) with a limit on its time. Those that only say whether
something is right run side by side; those that time or weigh something run alone. What each one found is written into
gpu.json as soon as it ends, with the raw samples, beside the device, the versions and the commit; what it printed into
gpu.log. A second call goes on where the first one ended: what is in gpu.json for this kind of device is not run again,
unless it failed or is named. A check begins only if its limit fits into what is left of the budget.

docs/gpu.md is made of gpu.json: `python -m benchmarks.gpu_page > docs/gpu.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.common import COMMIT, RESULTS
from genrl.runtime.run import write_atomic

KERNELS = ("qk_norm_rope", "adaln", "sde_step", "prefix_attention", "joint_attention")
FAMILIES = ("sd35_medium", "flux1_dev", "sdxl", "sd15", "qwen_image", "wan21_1_3b")
TAIL = 3000
"""Characters of what a check printed that gpu.json keeps where it failed."""


class Check(NamedTuple):
    """One row of the plan; its name is that of a function in `benchmarks.gpu_checks`, or function:argument."""

    name: str
    what: str
    limit: int
    """Seconds after which it is ended."""
    alone: bool = False
    """Whether it times or weighs something, so that nothing may run beside it."""
    dry: bool = True
    """Whether a CPU can run it with stand-in sizes."""


PLAN: tuple[Check, ...] = (
    Check("device", "name, memory, bandwidth and matrix rate of the card", 45, alone=True),
    Check("tests", "the tests marked gpu", 150),
    *(Check(f"ratio:{name}", "ratio of the first update by precision, attention, kernels", 150) for name in FAMILIES),
    Check("runs", "quickstart, language model and policy for a few iterations", 100),
    Check("group", "the quickstart by a process group of one", 100),
    Check("attention", "which of torch's attention kernels are right, backward too", 90, alone=True),
    *(Check(f"kernel:{name}", "against compiled and library, over the sizes of published models", 150)
      for name in KERNELS),
    Check("speed:sd35_medium", "seconds and memory of an iteration, by choice", 200, alone=True),
    Check("speed:flux1_dev", "the same for FLUX.1-dev at full size, and its 24 GB recipe", 200, alone=True),
    Check("peer", "the usual loop against genrl on SD3.5-medium", 120, alone=True),
    *(Check(f"compiled:{name}", "ratios again, compiled and with CUDA graphs", 280, dry=False) for name in FAMILIES),
    Check("suite", "tests that train or sample, on the card", 250, alone=True),
)  # fmt: skip
"""In the order of their value. One that runs alone waits for all before it: no more than a row of those side by side
need the card's memory at a time."""


class Running(NamedTuple):
    check: Check
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    found: Path
    began: float


def command_of(check: Check, found: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_checks", check.name, "--found", str(found)]


def start(check: Check, folder: Path, dry: bool) -> Running:
    """The process of a check; it leads a group of its own, so that nothing of it stays when it is ended."""
    found, output = folder / f"{check.name.replace(':', '-')}.json", tempfile.TemporaryFile()
    command = command_of(check, found)
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    environment["TMPDIR"] = str(folder)
    if dry:
        command.append("--dry-run")
        environment |= {"TRITON_INTERPRET": "1"}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    return Running(check, process, output, found, time.monotonic())


def ended(one: Running, log: Path) -> dict[str, Any] | None:
    """What there is to keep of a check: None while it runs within its limit."""
    seconds = time.monotonic() - one.began
    late = seconds > one.check.limit
    if one.process.poll() is None and not late:
        return None
    if one.process.poll() is None:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
    one.output.seek(0)
    text = one.output.read().decode(errors="replace")
    with log.open("a") as file:
        file.write(f"\n=== {one.check.name}\n{text}")
    status = "out of time" if late else "failed" if one.process.returncode else "done"
    row: dict[str, Any] = {"status": status, "seconds": round(seconds, 1), "commit": COMMIT}
    if one.found.exists():  # written as it goes: what was found before it failed is worth keeping
        row["found"] = json.loads(one.found.read_text())
    if status != "done":
        row["tail"] = text[-TAIL:]
    return row


def run(checks: Sequence[Check], out: Path, *, budget: float, dry: bool, side_by_side: int) -> bool:
    """Run the checks and write gpu.json; whether all were done."""
    file, log, until = out / "gpu.json", out / "gpu.log", time.monotonic() + budget
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    waiting, running, done = list(checks), list[Running](), True
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as made:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{made}/inductor")
        while waiting or running:
            for one in list(running):
                row = ended(one, log)
                if row is not None:
                    running.remove(one)
                    known[one.check.name] = row
                    done = done and row["status"] == "done"
                    write_atomic(file, json.dumps(known, indent=1) + "\n")
                    print(f"{row['seconds']:6.0f} s  {one.check.name:<24}{row['status']}", flush=True)
            while waiting and _may_begin(waiting[0], running, side_by_side):
                check = waiting.pop(0)
                if check.limit > until - time.monotonic() and not dry:
                    print(f"          {check.name:<24}left out: {check.limit} s do not fit into the budget", flush=True)
                    done = False
                    continue
                running.append(start(check, Path(made), dry))
            time.sleep(0.2)
    return done


def _may_begin(check: Check, running: Sequence[Running], side_by_side: int) -> bool:
    if check.alone or any(one.check.alone for one in running):
        return not running
    return len(running) < side_by_side


def plan(checks: Sequence[Check]) -> str:
    rows = [f"{'alone' if c.alone else 'beside':<8}{c.limit:>4} s  {c.name:<24}{c.what}" for c in checks]
    alone = sum(check.limit for check in checks if check.alone)
    beside = max((check.limit for check in checks if not check.alone), default=0)
    rows.append(f"at most {alone} s of those that run alone; those side by side take {beside} s where cores are free")
    return "\n".join(rows)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checks", nargs="*", metavar="CHECK", help="of the plan; default: those not done yet")
    arguments.add_argument("--plan", action="store_true", help="print the plan and end")
    arguments.add_argument("--dry-run", action="store_true", help="stand-in sizes on a CPU, into a folder of its own")
    arguments.add_argument("--budget", type=float, default=3600.0, help="seconds for all of it; default: 3600")
    arguments.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json; default: benchmarks/results")
    given = arguments.parse_args()
    names = {check.name: check for check in PLAN}
    if unknown := [name for name in given.checks if name not in names]:
        arguments.error(f"no check {', '.join(unknown)}; there are {', '.join(names)}")
    checks = [names[name] for name in given.checks] or list(PLAN)
    if given.plan:
        print(plan(checks))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if given.dry_run:
        checks = [check for check in checks if check.dry]
    elif not given.checks:
        checks = [check for check in checks if check.name not in _done(given.out / "gpu.json")]
    if not run(checks, given.out, budget=given.budget, dry=given.dry_run, side_by_side=_side_by_side(given.dry_run)):
        sys.exit(1)


def _done(file: Path) -> set[str]:
    """Checks that need not run again: those that another call did, unless this is another kind of card."""
    known = json.loads(file.read_text()) if file.exists() else {}
    from benchmarks.gpu_checks import card

    if known.get("device", {}).get("found", {}).get("name") != card():
        return set()
    return {name for name, row in known.items() if row["status"] == "done"}


def _fast_folder() -> str | None:
    """Where models are written and read again: in memory, if there is enough of it."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 60e9 else None


def _side_by_side(dry: bool) -> int:
    """Most of them wait for the card, or for a compiler."""
    return 1 if dry else max(2, 3 * (os.cpu_count() or 1) // 2)


if __name__ == "__main__":
    main()
