"""Shared fixtures: golden arrays, one thread, no network."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two OpenMP threads on a busy two-core machine are far slower than one
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import numpy as np
import pytest
import torch

from rewards.models.torchvision_compat import ensure

ensure()  # before a test imports transformers or torchmetrics

if not torch.cuda.is_available():  # kernels are interpreted: to be set before triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.fsync = os.fstat  # no test cuts the power, and runs waited longer for the disk than for anything else but the model

hypothesis.settings.register_profile("busy", deadline=None)  # of a machine that does other things too
hypothesis.settings.load_profile("busy")

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(os.environ.get("GENRL_GOLDEN", ROOT.parent / "shared" / "golden"))


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


@pytest.fixture
def golden() -> Callable[[str], np.lib.npyio.NpzFile]:
    """`golden("samplers_cps")` loads that file; the test is skipped where the folder is absent."""

    def load(name: str) -> np.lib.npyio.NpzFile:
        path = GOLDEN / f"{name}.npz"
        if not path.exists():
            pytest.skip(f"golden arrays not found at {path} (set GENRL_GOLDEN to their folder)")
        return np.load(path, allow_pickle=False)

    return load


@pytest.fixture
def root() -> Path:
    """The repository's root: configs/, assets/."""
    return ROOT
