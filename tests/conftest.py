"""Shared fixtures: golden arrays, folders made once, one thread, no network."""

import gc
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two OpenMP threads on a busy two-core machine are far slower than one
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import numpy as np
import pytest
import torch
from filelock import FileLock

from genrl_rewards.models.torchvision_compat import ensure

ensure()  # before a test imports transformers or torchmetrics

if not torch.cuda.is_available():  # kernels are interpreted: to be set before triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Ignored by nohup or a script's `&`: children of tests would ignore them too
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

hypothesis.settings.register_profile("busy", deadline=None)  # of a machine that does other things too
hypothesis.settings.load_profile("busy")

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(os.environ.get("GENRL_GOLDEN", ROOT / "tests" / "golden"))
"""Arrays made by independent implementations; tests/golden/README.md says how."""
LEFT_OUT = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collection, which took a quarter of the time: what is imported and collected, a million objects,
    stays, and is not looked through later either."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """In a worker: tell the controller how many tests `-m "not slow"` left out."""
    if items and hasattr(items[0].config, "workeroutput"):
        items[0].config.workeroutput["left_out"] = len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the controller: every worker has left out the same ones."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what else there is to run."""
    left_out = config.stash.get(LEFT_OUT, len(terminalreporter.stats.get("deselected", ())))
    if left_out and config.option.markexpr == "not slow":
        terminalreporter.line(f"{left_out} slow tests were left out; `make test-all` runs them")


@pytest.fixture(scope="session")
def golden() -> Callable[[str], np.lib.npyio.NpzFile]:
    """`golden("samplers_cps")` loads that file."""
    return lambda name: np.load(GOLDEN / f"{name}.npz", allow_pickle=False)


@pytest.fixture(scope="session")
def golden_json() -> Callable[[str], Any]:
    """`golden_json("rewards_judge")` loads that file."""
    return lambda name: json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session", autouse=True)
def _base_of_what_is_made_without_a_fixture(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["GENRL_TESTS_BASE"] = str(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power, and runs waited longer for the disk than for anything but the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Callable[[Path], object]], Path]]:
    """`made_once("trained-vla", train_into)` is a folder that `train_into(folder)` filled once, for all workers.

    Tests look at it and copy it, and never write to it: what changed in it is an error at the end.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"
    shared.mkdir(exist_ok=True)
    before: dict[Path, dict[str, tuple[int, int]]] = {}

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker whose `fill` raised
                folder.mkdir()
                fill(folder)
                done.touch()
        before.setdefault(folder, _files(folder))
        return folder

    yield make
    changed = [str(folder) for folder, files in before.items() if _files(folder) != files]
    assert not changed, f"tests wrote into folders that others share: {changed}"


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def root() -> Path:
    """The repository's root: configs/, assets/."""
    return ROOT
