"""What `genrl sample` and `genrl eval` load and call for the model that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genrl.cli.arguments import Dtype
from genrl.cli.pipelines import choose
from tests.cli.commands import SMALL, run


@pytest.fixture
def trained(folder: Path) -> Path:
    """The run folder of a pipeline in bfloat16, with its adapter."""
    changed = SMALL.replace("model: {", "model: {dtype: bfloat16, ").replace("guidance_scale: 1.0", "guidance_scale: 3")
    (folder / "runs" / "one" / "lora").mkdir(parents=True)
    (folder / "runs" / "one" / "config.yaml").write_text(changed)
    return folder


def test_a_run_is_called_as_its_evaluations_are(trained: Path) -> None:
    chosen = choose("runs/one", None, None, {"num_frames": 3})
    assert chosen.adapter == "runs/one/lora"
    expected = {"num_inference_steps": 2, "guidance_scale": 3, "max_sequence_length": 2, "num_frames": 3}
    assert chosen.arguments == expected


@pytest.mark.parametrize(("given", "loaded"), [(None, "bfloat16"), ("float32", "float32")])
def test_the_precision_of_a_run_is_its_own(trained: Path, given: Dtype | None, loaded: str) -> None:
    assert choose("runs/one", None, given, {}).model.dtype == loaded


@pytest.mark.parametrize(
    "command", [["sample", "--prompt", "a"], ["eval", "--prompts", "eval.txt", "--reward", "shapes"]]
)
@pytest.mark.parametrize(("model", "loaded"), [("runs/one", "bfloat16"), ("org/model", "float32")])
def test_the_default_precision(
    trained: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], model: str, loaded: str
) -> None:
    class Stop(Exception):
        pass

    def load(model: Any, lora: str | None) -> Any:
        raise Stop(model.dtype)

    monkeypatch.setattr("genrl.diffusion.sample.load", load)
    with pytest.raises(Stop, match=loaded):
        run(command[0], model, *command[1:])
