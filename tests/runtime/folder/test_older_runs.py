"""A run that was begun when genrl had fewer keys goes on as if it had been begun today."""

from __future__ import annotations

from pathlib import Path

import pytest

from genrl.config import load
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.frame import train
from tests.run_folders import differences
from tests.vla import vla_runs


def test_a_run_whose_configuration_lacks_todays_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved as it was written, without a default."""
    straight, older = tmp_path / "straight", tmp_path / "older"
    train(vla_runs.config(tmp_path, iterations=2, output=str(straight)))

    whole = vla_runs.config(tmp_path, iterations=2, output=str(older))
    written = (tmp_path / "tiny.yaml").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(
            "genrl.runtime.loop.process.dump", lambda config: written.replace("iterations: 2", "iterations: 1")
        )
        train(whole.model_copy(update={"iterations": 1}))
    assert "idle_iterations" not in Run(older).config.read_text()
    train(load(Run(older).config, ["iterations=2"]), older)
    assert [line for line in caplog.messages if "since the last" in line] == [
        "changed since the last save: iterations: 1 -> 2"
    ]
    assert differences(straight, older) == []
