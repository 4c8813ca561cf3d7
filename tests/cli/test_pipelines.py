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


# -- `genrl compare` from two models to a table, as a user types it


BASE = str(MODEL)


@pytest.fixture
def trained_of_compare(folder: Path) -> str:
    """A run of one iteration."""
    changed = (folder / "small.yaml").read_text() + "output: runs/small\noptimizer: {lr: 1e-2}\n"
    (folder / "small.yaml").write_text(changed)
    run("train", "small.yaml")
    return "runs/small"


@pytest.mark.slow
def test_from_two_models_to_a_table(folder: Path, trained_of_compare: str) -> None:
    rows = [{"prompt": "a red circle", "topic": "one"}, {"prompt": "two stars", "topic": "more"}]
    (folder / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run(
        "compare", BASE, trained_of_compare, "--prompts", "topics.jsonl", "--per-prompt", "2", "--category", "topic"
    )
    assert "compare.html: 4 pairs" in said and "compare.key.json: keep it" in said
    out = folder / "compare.html"
    key = json.loads(key_path(out).read_text())
    assert key["a"]["lora"] is None and key["b"]["lora"].endswith("lora") and key["prompts"] == "topics.jsonl"
    assert key["a"]["arguments"] == key["b"]["arguments"]
    assert {pair["category"] for pair in key["pairs"].values()} == {"one", "more"}
    assert all(pair["rewards"].keys() == {"brightness"} for pair in key["pairs"].values())
    assert trained_of_compare not in out.read_text()

    answers = {token: pages.for_model(key, token, "b") for token in key["pairs"]}
    tied = next(token for token, pair in key["pairs"].items() if pair["category"] == "more")
    votes = pages.votes(out, folder / "votes.json", answers | {tied: "tie"})
    table = words(run("compare", "--read", str(votes)))
    assert f"B = {trained_of_compare} over A = {BASE}; 1 judge, 4 of 4 pairs" in table.replace("\n", " ")
    assert "all 4 3 1 0 0.875" in table and "more 2 1 1 0 0.750" in table and "one 2 2 0 0 1.000" in table
    found = json.loads(run("compare", "--read", str(votes), "--json"))
    assert found["total"]["rate"]["value"] == 0.875 and found["total"]["decided"]["count"] == 3
    brighter = [pair["rewards"]["brightness"] for token, pair in key["pairs"].items() if token != tied]
    right = sum(b > a for a, b in brighter) / 3
    assert found["rewards"]["brightness"]["accuracy"]["value"] == pytest.approx(right)

    said = words(run("compare", BASE, trained_of_compare, "--out", "compare.html", code=2))
    assert "compare.html exists; votes on that page need its key" in said
    said = words(run("compare", trained_of_compare, trained_of_compare, "--out", "other.html", code=2))
    assert f"A and B are the same model, {trained_of_compare}" in said


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
        found = words(run("compare", BASE, "org/model", *arguments.split(), code=2))
        assert all(one in found for one in said), found
