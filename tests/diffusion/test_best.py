"""The best evaluation of a pipeline's run: kept on disk, written beside the last, and taken by `--best`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.diffusion.chosen import adapter_of
from genrl.diffusion.config.schema import Config
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from tests.diffusion import runs
from tests.diffusion.methods.watched import equal

pytestmark = pytest.mark.usefixtures("unproven")

SCORES = [0.5, 0.7, 0.4, 0.69, 0.3, 0.2]  # of the evaluations after 0, 1, ... iterations
WATCH = {"reward": "redness", "tolerance": 0.05}


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations score as `SCORES` has it."""
    evaluate = DiffusionRun.evaluate

    def scripted(self: DiffusionRun, iteration: int) -> dict[str, float]:
        return evaluate(self, iteration) | {"eval/redness_mean": SCORES[iteration]}

    monkeypatch.setattr(DiffusionRun, "evaluate", scripted)


def config(folder: Path, model: Path, **changes: Any) -> Config:
    """A run whose second scorer, which nobody trains on, is watched."""
    monitor = {**WATCH, **changes.pop("monitor", {})}
    common: dict[str, Any] = {"checkpoint": {"every": 1, "keep": 2}, "iterations": 7, "ema": {"decay": 0.5}}
    common["rewards"] = [runs.reward(folder, "brightness"), runs.reward(folder, "redness", weight=0)]
    common["evaluation"] = {"every": 1, "monitor": monitor, "on_collapse": "stop"}
    return runs.config(folder, model, **{**common, **changes})


def adapter(folder: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "pytorch_lora_weights.safetensors")


def test_the_best_is_kept_written_beside_the_last_and_taken_by_commands(folder: Path, model: Path) -> None:
    """One lower evaluation and one within the tolerance are no reason to end; two lower ones in a row are."""
    ended = train(config(folder, model))
    drops = [row["eval/below_best"] for row in runs.rows(ended)]
    assert drops == pytest.approx([0.0, 0.0, 0.3, 0.01, 0.4, 0.5])
    checkpoints = Run(ended).checkpoints
    assert [path.name for path in checkpoint.steps(checkpoints)] == ["step-000005", "step-000004", "step-000001"]
    best = adapter(ended / "lora-best")
    assert equal(best, adapter(checkpoints / "step-000001" / "lora")) and not equal(best, adapter(ended / "lora"))
    out = CliRunner().invoke(app, ["export", str(ended), "--best", "--out", str(folder / "out")])
    assert out.exit_code == 0 and "the best evaluation's checkpoint, after 1 iterations" in out.output
    assert equal(adapter(folder / "out"), best)
    assert adapter_of(ended, 1) == str(Run(ended).checkpoints / "step-000001" / "lora")
    two = CliRunner().invoke(app, ["sample", str(ended), "--best", "--lora", "another", "--prompt", "p"])
    assert two.exit_code == 2 and "--lora is not for --best" in two.output
    lost = CliRunner().invoke(app, ["sample", str(folder), "--best", "--prompt", "p"])
    assert lost.exit_code == 2 and "no config.yaml" in " ".join(lost.output.replace("│", "").split())
