"""`genrl compare` from two models to a table, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genrl.runtime.show.compare.page import key_path
from tests.cli.commands import MODEL, run, words
from tests.runtime.show.compare import pages

BASE = str(MODEL)


@pytest.fixture
def trained(folder: Path) -> str:
    """A run of one iteration."""
    changed = (folder / "small.yaml").read_text() + "output: runs/small\noptimizer: {lr: 1e-2}\n"
    (folder / "small.yaml").write_text(changed)
    run("train", "small.yaml")
    return "runs/small"


@pytest.mark.slow
def test_from_two_models_to_a_table(folder: Path, trained: str) -> None:
    rows = [{"prompt": "a red circle", "topic": "one"}, {"prompt": "two stars", "topic": "more"}]
    (folder / "topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run("compare", BASE, trained, "--prompts", "topics.jsonl", "--per-prompt", "2", "--category", "topic")
    assert "compare.html: 4 pairs" in said and "compare.key.json: keep it" in said
    out = folder / "compare.html"
    key = json.loads(key_path(out).read_text())
    assert key["a"]["lora"] is None and key["b"]["lora"].endswith("lora") and key["prompts"] == "topics.jsonl"
    assert key["a"]["arguments"] == key["b"]["arguments"]
    assert {pair["category"] for pair in key["pairs"].values()} == {"one", "more"}
    assert all(pair["rewards"].keys() == {"brightness"} for pair in key["pairs"].values())
    assert trained not in out.read_text()

    answers = {token: pages.for_model(key, token, "b") for token in key["pairs"]}
    tied = next(token for token, pair in key["pairs"].items() if pair["category"] == "more")
    votes = pages.votes(out, folder / "votes.json", answers | {tied: "tie"})
    table = words(run("compare", "--read", str(votes)))
    assert f"B = {trained} over A = {BASE}; 1 judge, 4 of 4 pairs" in table.replace("\n", " ")
    assert "all 4 3 1 0 0.875" in table and "more 2 1 1 0 0.750" in table and "one 2 2 0 0 1.000" in table
    found = json.loads(run("compare", "--read", str(votes), "--json"))
    assert found["total"]["rate"]["value"] == 0.875 and found["total"]["decided"]["count"] == 3
    brighter = [pair["rewards"]["brightness"] for token, pair in key["pairs"].items() if token != tied]
    right = sum(b > a for a, b in brighter) / 3
    assert found["rewards"]["brightness"]["accuracy"]["value"] == pytest.approx(right)

    said = words(run("compare", BASE, trained, "--out", "compare.html", code=2))
    assert "compare.html exists; votes on that page need its key" in said
    said = words(run("compare", trained, trained, "--out", "other.html", code=2))
    assert f"A and B are the same model, {trained}" in said


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
