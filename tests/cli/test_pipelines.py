"""What `genrl sample` and `genrl eval` load and call for the model that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genrl.diffusion.chosen import choose
from tests.cli.commands import SMALL, run


@pytest.fixture
def trained(folder: Path) -> Path:
    """The run folder of a pipeline in bfloat16, with its adapter."""
    changed = SMALL.replace("model: {", "model: {dtype: bfloat16, ").replace("guidance_scale: 1.0", "guidance_scale: 3")
    (folder / "runs" / "one" / "lora").mkdir(parents=True)
    (folder / "runs" / "one" / "config.yaml").write_text(changed)
    return folder


def test_a_run_is_drawn_as_in_its_evaluations(trained: Path) -> None:
    """With their arguments, size and precision; what is given wins."""
    chosen = choose("runs/one", None, None, {"num_frames": 3})
    assert chosen.adapter == "runs/one/lora" and chosen.model.dtype == "bfloat16"
    expected = {"num_inference_steps": 2, "guidance_scale": 3, "max_sequence_length": 2, "num_frames": 3}
    assert chosen.arguments == expected
    assert choose("runs/one", None, "float32", {}).model.dtype == "float32"
    file = trained / "runs" / "one" / "config.yaml"
    file.write_text(file.read_text().replace("evaluation: {", "evaluation: {height: 32, "))
    assert choose("runs/one", None, None, {}).arguments["height"] == 32
    assert choose("runs/one", None, None, {"height": 16}).arguments["height"] == 16


class Stop(Exception):
    """What a stand-in raises with what it was given."""


@pytest.mark.parametrize(
    ("model", "options", "sizes"),
    [
        ("org/model", [], [{"height": 16}, {}]),
        ("org/model", ["--width", "32"], [{}, {}]),
        ("runs/one", [], [{}, {}]),  # whose configuration reads no such column
    ],
)
def test_the_sizes_of_rows(
    trained: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: list[str], sizes: list[dict[str, int]]
) -> None:
    def evaluate(pipe: Any, rows: Any, *_: Any, **__: Any) -> None:
        raise Stop([dict(row.size) for row in rows])

    (trained / "eval.jsonl").write_text('{"prompt": "a", "height": 16}\n{"prompt": "b"}\n')
    monkeypatch.setattr("genrl.diffusion.sample.load", lambda model, lora: None)
    monkeypatch.setattr("genrl.diffusion.sample.evaluate_pipeline", evaluate)
    with pytest.raises(Stop) as stopped:
        run("eval", model, "--prompts", "eval.jsonl", "--reward", "shapes", *options)
    assert stopped.value.args == (sizes,)


def test_a_run_is_evaluated_as_it_was(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its seed and with as many pictures of a prompt; a seed that is given wins."""
    file = trained / "runs" / "one" / "config.yaml"
    file.write_text(file.read_text().replace("evaluation: {", "evaluation: {group_size: 2, seed: 7, "))
    (trained / "eval.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def evaluate(pipe: Any, rows: Any, *_: Any, seed: int, **__: Any) -> None:
        raise Stop(seed, [row.text for row in rows])

    monkeypatch.setattr("genrl.diffusion.sample.load", lambda model, lora: None)
    monkeypatch.setattr("genrl.diffusion.sample.evaluate_pipeline", evaluate)
    for options, seed in (([], 7), (["--seed", "3"], 3)):
        with pytest.raises(Stop) as stopped:
            run("eval", "runs/one", "--prompts", "eval.jsonl", "--reward", "shapes", *options)
        assert stopped.value.args == (seed, ["a", "a", "b", "b"])


@pytest.mark.parametrize(
    "command", [["sample", "--prompt", "a"], ["eval", "--prompts", "eval.txt", "--reward", "shapes"]]
)
@pytest.mark.parametrize(("model", "loaded"), [("runs/one", "bfloat16"), ("org/model", "float32")])
def test_the_default_precision(
    trained: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], model: str, loaded: str
) -> None:
    def load(model: Any, lora: str | None) -> Any:
        raise Stop(model.dtype)

    monkeypatch.setattr("genrl.diffusion.sample.load", load)
    with pytest.raises(Stop, match=loaded):
        run(command[0], model, *command[1:])
