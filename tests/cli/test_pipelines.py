"""What `genrl sample` and `genrl eval` load and call for the model that they are given."""

import json
from pathlib import Path
from typing import Any

import pytest

from genrl.diffusion.chosen import choose
from genrl.runtime.show.compare.page import key_path
from tests.cli.commands import MODEL, SMALL, run, words
from tests.runtime.show.compare import pages


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


def evaluated(monkeypatch: pytest.MonkeyPatch, model: str, *options: str) -> tuple[int, list[tuple[str, dict]]]:
    """Seed, texts and sizes that `genrl eval` hands on for the rows of eval.jsonl."""

    def evaluate(pipe: Any, rows: Any, *_: Any, seed: int, **__: Any) -> None:
        raise Stop(seed, [(row.text, dict(row.size)) for row in rows])

    monkeypatch.setattr("genrl.diffusion.sample.load", lambda model, lora: None)
    monkeypatch.setattr("genrl.diffusion.sample.evaluate_pipeline", evaluate)
    with pytest.raises(Stop) as stopped:
        run("eval", model, "--prompts", "eval.jsonl", "--reward", "shapes", *options)
    return stopped.value.args


def test_a_run_is_evaluated_as_it_was_and_sizes_are_those_of_rows(trained: Path, monkeypatch: Any) -> None:
    """By its seed and with as many pictures of a prompt; a seed or a size that is given wins."""
    (trained / "eval.jsonl").write_text('{"prompt": "a", "height": 16}\n{"prompt": "b"}\n')
    plain = [("a", {}), ("b", {})]
    assert evaluated(monkeypatch, "org/model")[1] == [("a", {"height": 16}), ("b", {})]
    assert evaluated(monkeypatch, "org/model", "--width", "32")[1] == plain
    assert evaluated(monkeypatch, "runs/one")[1] == plain  # its configuration reads no such column
    file = trained / "runs" / "one" / "config.yaml"
    file.write_text(file.read_text().replace("evaluation: {", "evaluation: {group_size: 2, seed: 7, "))
    for options, seed in (((), 7), (("--seed", "3"), 3)):
        assert evaluated(monkeypatch, "runs/one", *options) == (seed, [plain[0]] * 2 + [plain[1]] * 2)


def test_the_default_precision(trained: Path, monkeypatch: Any) -> None:
    def load(model: Any, lora: str | None) -> Any:
        raise Stop(model.dtype)

    monkeypatch.setattr("genrl.diffusion.sample.load", load)
    for model, loaded in (("runs/one", "bfloat16"), ("org/model", "float32")):
        for command, *options in (("sample", "--prompt", "a"), ("eval", "--prompts", "eval.txt", "--reward", "shapes")):
            with pytest.raises(Stop, match=loaded):
                run(command, model, *options)


# -- `genrl compare`: what it asks for before a model is loaded, and votes read as a table
def test_what_is_asked_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genrl.diffusion.sample.load", lambda *_: pytest.fail("a model was loaded"))
    (folder / "many.txt").write_text("\n".join(f"{k} circles" for k in range(10_000)))
    for arguments, *said in (
        ("--prompts many.txt", "10,000 pairs are about 17 hours of judging", "Give --num-prompts 200"),
        ("", "give --prompts FILE (a run with prompts.eval has its own)"),
        ("--prompts eval.txt --category topic", "eval.txt:1 has no column 'topic'; its columns: none beside the prom"),
        ("--prompts eval.txt --reward shapse", "Did you mean 'shapes'?"),
        ("--prompts eval.txt --reward ocr --no-rewards", "--reward is not for --no-rewards"),
    ):
        result = words(run("compare", str(MODEL), "org/model", *arguments.split(), code=2))
        assert all(one in result for one in said), result


def test_votes_become_a_table(folder: Path) -> None:
    """Pages of two models: tests/diffusion/test_compare.py, and by the command tests/vlm/test_compare.py."""
    pages.write(folder / "compare.html", 4)
    key = json.loads(key_path(folder / "compare.html").read_text())
    answers = {token: pages.for_model(key, token, "b") for token in key["pairs"]}
    tied = next(token for token, pair in key["pairs"].items() if pair["prompt"] == "prompt 1")
    votes = str(pages.votes(folder / "compare.html", folder / "votes.json", answers | {tied: "tie"}))
    table = words(run("compare", "--read", votes))
    assert "B = model-after over A = model-before; 1 judge, 4 of 4 pairs" in table
    assert "all 4 3 1 0 0.875" in table and "odd 2 1 1 0 0.750" in table and "even 2 2 0 0 1.000" in table
    result = json.loads(run("compare", "--read", votes, "--json"))
    assert result["total"]["rate"]["value"] == 0.875 and result["total"]["decided"]["count"] == 3
    assert result["rewards"]["good"]["accuracy"]["value"] == 1.0
