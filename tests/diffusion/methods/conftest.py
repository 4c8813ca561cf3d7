"""Runs of methods are not about saving: `tests/runtime/loop/test_replay.py` has each method's adapter loaded again."""

from pathlib import Path

import pytest

from tests.diffusion.families import FAMILIES


@pytest.fixture(autouse=True)
def _unproven(unproven: None) -> None: ...


@pytest.fixture(scope="session")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Stable Diffusion 1.5 (epsilon prediction). Not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "tiny-sd15"
    FAMILIES["sd15"]().pipe.save_pretrained(folder)
    return folder
