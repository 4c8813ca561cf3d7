"""Devices by torch's own interface: which one is taken, and what is asked of one that is not at hand here."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.runtime.loop.process import make_accelerator
from genrl.runtime.weights import devices


def pretend(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.delenv(devices.VARIABLE, raising=False)


def test_the_accelerator_at_hand_is_taken_but_one_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, taken in ((None, "cpu"), ("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu")):
        pretend(kind, monkeypatch)
        assert devices.default_device() == taken
    monkeypatch.setenv(devices.VARIABLE, "mps")
    assert devices.default_device() == "mps"
    pretend("cuda", monkeypatch)
    monkeypatch.setenv(devices.VARIABLE, "cpu")
    assert devices.default_device() == "cpu"
    monkeypatch.setenv(devices.VARIABLE, "xpu")
    with pytest.raises(ValueError, match="GENRL_DEVICE=xpu: there is no such device here; .* one of cpu, cuda"):
        devices.default_device()


WITHOUT_UNIX = """
import importlib, pkgutil, sys
import psutil, torch  # which ask for another module on Windows
for name in ("fcntl", "resource", "pwd", "termios"):
    sys.modules[name] = None
import genrl, rewards
from genrl_rewards.models.torchvision_compat import ensure
ensure()
for package in ("genrl.cli", "genrl.config", "genrl.data", "genrl.interface", "genrl.runtime"):
    for entry in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(entry.name)
print("imported")
"""


@pytest.mark.slow
def test_all_that_starts_a_run_imports_without_what_windows_lacks(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_UNIX], cwd=root, capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr[-2000:]


def test_a_run_leaves_cudnns_attention_out() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        make_accelerator(60)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def rounds() -> tuple[bool, bool]:
    """Whether products and convolutions do."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("wanted", "then"), [(True, (True, True)), (False, (False, False)), (None, (False, True))])
def test_tf32_is_as_wanted_and_afterwards_as_it_was(wanted: bool | None, then: Any, monkeypatch: Any) -> None:
    """(False, True) is what torch begins with, and what a run without the key is left with."""
    assert rounds() == (False, True)
    with pytest.raises(KeyError), devices.tf32(wanted):
        assert rounds() == then
        raise KeyError
    assert rounds() == (False, True)
    monkeypatch.setattr(devices.torch.backends, "cuda", None)
    with devices.tf32(None):
        pass
