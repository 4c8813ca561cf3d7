"""Devices by torch's own interface: which one is taken, and what is asked of one that is not at hand here."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genrl.runtime.loop.process import make_accelerator
from genrl.runtime.weights import devices


def found(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.delenv(devices.VARIABLE, raising=False)


def test_the_accelerator_at_hand_is_taken_but_one_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, taken in ((None, "cpu"), ("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu")):
        found(kind, monkeypatch)
        assert devices.default_device() == taken
    monkeypatch.setenv(devices.VARIABLE, "mps")
    assert devices.default_device() == "mps"
    found("cuda", monkeypatch)
    monkeypatch.setenv(devices.VARIABLE, "cpu")
    assert devices.default_device() == "cpu"
    monkeypatch.setenv(devices.VARIABLE, "xpu")
    with pytest.raises(ValueError, match="GENRL_DEVICE=xpu: there is no such device here; .* one of cpu, cuda"):
        devices.default_device()


def test_memory_is_asked_of_the_devices_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    module = SimpleNamespace(
        empty_cache=lambda: called.append("empty"),
        reset_peak_memory_stats=lambda device: called.append(f"reset {device}"),
        max_memory_allocated=lambda device: 5 * 2**20,
        mem_get_info=lambda device: (1, 7),
    )
    for told, peak, total in ((module, 5 * 2**20, 7), (SimpleNamespace(empty_cache=module.empty_cache), 0, None)):
        monkeypatch.setattr(torch, "get_device_module", lambda kind, told=told: told)
        device = torch.device("xpu")
        devices.empty_cache(device)
        devices.reset_peak(device)
        assert devices.peak_bytes(device) == peak and devices.total_bytes(device) == total
    assert called == ["empty", "reset xpu", "empty"]
    assert devices.total_bytes(torch.device("cpu")) is None and devices.resident_peak_bytes() > 2**20


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU does not round to TF32")
def test_tf32_rounds_on_a_gpu() -> None:
    one, two = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).cuda()
    exact = one.double() @ two.double()
    errors = {}
    for wanted in (False, True):
        with devices.tf32(wanted):
            errors[wanted] = float(((one @ two) - exact).abs().max())
    assert errors[True] > 20 * errors[False]
