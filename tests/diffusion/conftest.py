"""One tiny pipeline on disk for all runs of a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genrl.diffusion.policy import export
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random SD3 pipeline as `from_pretrained` loads it, all encoders included. Not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "tiny-sd3"
    FAMILIES["sd3"]().pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random FLUX.1-Kontext, which edits pictures. Not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "tiny-kontext"
    FAMILIES["flux_kontext"]().pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are saved without being loaded again, a sixth of a tiny run: for runs that are about something else."""
    monkeypatch.setattr(export, "verify_lora", lambda policy, folder, probe: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh folder with prompt files and rewards."""
    runs.write_folder(tmp_path)
    return tmp_path
