"""A run that was begun when genrl had fewer keys goes on as if it had been begun today."""

from __future__ import annotations

from pathlib import Path

import pytest

from genrl.config import AnyConfig, load
from genrl.runtime.frame import train
from genrl.runtime.run import Run
from tests.diffusion import runs
from tests.diffusion.conftest import model as model
from tests.run_folders import differences
from tests.vla import vla_runs
from tests.vlm import vlm_runs


def config(kind: str, folder: Path, model: Path, output: Path) -> AnyConfig:
    common = {"iterations": 2, "output": str(output)}
    if kind == "diffusion":
        runs.write_folder(folder)
        return runs.config(folder, model, evaluation={"every": 1}, **common)
    return {"vla": vla_runs, "vlm": vlm_runs}[kind].config(folder, **common)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # deprecations within diffusers
@pytest.mark.parametrize("kind", ["diffusion", "vla", "vlm"])
def test_a_run_whose_configuration_lacks_todays_keys(
    kind: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved as it was written, without a default."""
    straight, older = tmp_path / "straight", tmp_path / "older"
    train(config(kind, tmp_path, model, straight))

    whole = config(kind, tmp_path, model, older)
    written = (tmp_path / "tiny.yaml").read_text()
    with monkeypatch.context() as patch:
        patch.setattr("genrl.runtime.process.dump", lambda config: written.replace("iterations: 2", "iterations: 1"))
        train(whole.model_copy(update={"iterations": 1}))
    assert "idle_iterations" not in Run(older).config.read_text()
    train(load(Run(older).config, ["iterations=2"]), older)
    assert [line for line in caplog.messages if "edited" in line] == ["edited since the last save: iterations: 1 -> 2"]
    assert differences(straight, older) == []
