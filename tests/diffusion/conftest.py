"""Tiny pipelines on disk, and one finished run, for all tests of a session."""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.diffusion.files import export
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.train import train
from genrl.kernels import blocks
from genrl.runtime.folder.run import Run
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES

Made = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile by torch's back-end `eager`, which traces and guards as inductor does, without its minute per graph."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    blocks._compiled.cache_clear()
    yield
    blocks._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def policy() -> Policy:
    """SD3 in float32. Its weights are not changed by any test."""
    return Policy(FAMILIES["sd3"]().pipe)


@pytest.fixture(scope="session")
def model(made_once: Made) -> Path:
    """A tiny random SD3 pipeline as `from_pretrained` loads it, all encoders included. Not to be changed."""
    return made_once("tiny-sd3", lambda folder: FAMILIES["sd3"]().pipe.save_pretrained(folder))


@pytest.fixture(scope="session")
def sd(made_once: Made) -> Path:
    """A tiny random Stable Diffusion 1.5 (epsilon prediction). Not to be changed."""
    return made_once("tiny-sd15", lambda folder: FAMILIES["sd15"]().pipe.save_pretrained(folder))


@pytest.fixture(scope="session")
def kontext(made_once: Made) -> Path:
    """A tiny random FLUX.1-Kontext, which edits pictures. Not to be changed."""
    return made_once("tiny-kontext", lambda folder: FAMILIES["flux_kontext"]().pipe.save_pretrained(folder))


@pytest.fixture(scope="session")
def finished(made_once: Made, model: Path) -> Path:
    """The folder of a Flow-GRPO run of two iterations, each with its checkpoint. Not to be changed."""

    def fill(folder: Path) -> None:
        runs.write_folder(folder)
        both = [runs.reward(folder, "brightness"), runs.reward(folder, "redness", weight=0.0)]
        changes = {"trackers": ["tensorboard"], "ema": {"decay": 0.5}, "checkpoint": {"every": 1, "keep": 2}}
        train(runs.config(folder, model, rewards=both, **changes))

    return made_once("finished-flow-grpo", fill) / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Config:
    """The settings of a copy of `finished`, which may be changed."""
    shutil.copytree(finished, tmp_path / "copied")
    return load(Run(finished).config).model_copy(update={"output": str(tmp_path / "copied")})


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are saved without being loaded again, a sixth of a tiny run: for runs that are about something else."""
    monkeypatch.setattr(export, "verify_lora", lambda policy, folder, probe: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs.write_folder(tmp_path)
    return tmp_path
