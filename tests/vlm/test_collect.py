"""Rejection sampling: which answers are kept, and that what is written is data that `sft` trains on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from genrl.vlm.collect import Rule, collect
from genrl.vlm.policies.policy import Policy
from genrl.vlm.rollout.data import Questions
from genrl.vlm.train import train
from genrl_rewards.scorers.texts.verifiable import exact
from tests.cli.commands import run, words
from tests.run_folders import rows
from tests.vlm import tiny_checkpoints, vlm_runs


def gathered(place: Path, **rule: Any) -> tuple[Any, list[dict[str, Any]]]:
    config = vlm_runs.config(place, task={"rows": 12})
    chosen = Rule(**{"samples": 6, "keep": 2, "threshold": 1.2, "choose": "shortest"} | rule)
    result = collect(Policy(str(vlm_runs.MODEL)), config, place / "own", chosen)
    return result, [json.loads(line) for line in (place / "own" / "train.jsonl").read_text("utf-8").splitlines()]


def test_right_answers_are_kept_with_their_questions(tmp_path: Path) -> None:
    counts, lines = gathered(tmp_path)
    assert counts.questions == 12 and counts.samples == 72
    assert counts.kept == len(lines) and counts.answered == len({line["image"] for line in lines})
    assert counts.kept <= counts.passed < counts.samples and counts.answered < 12, "some are wrong"
    assert exact([line["response"] for line in lines], [line["answer"] for line in lines]) == [1.0] * len(lines)
    assert all(line["reward"] == pytest.approx(1.2) for line in lines)
    for question in {line["image"] for line in lines}:
        texts = [line["response"] for line in lines if line["image"] == question]
        assert len(texts) == len(set(texts)) <= 2
    assert json.loads((tmp_path / "own" / "counts.json").read_text())["kept"] == counts.kept
    with pytest.raises(ValueError, match="is there already"):
        gathered(tmp_path)
    (tmp_path / "second").mkdir()
    with pytest.raises(ValueError, match="none of 72 answers reaches 5"):
        gathered(tmp_path / "second", threshold=5.0)


def test_a_low_threshold_keeps_the_shortest_or_any(tmp_path: Path) -> None:
    result = {}
    for choose in ("shortest", "random"):
        (tmp_path / choose).mkdir()
        _, lines = gathered(tmp_path / choose, threshold=-1.0, keep=1, choose=choose)
        result[choose] = [line["response"] for line in lines]
    assert len(result["shortest"]) == len(result["random"]) == 12
    assert result["shortest"] != result["random"]
    assert sum(map(len, result["shortest"])) <= sum(map(len, result["random"]))


def test_the_command_says_what_was_kept(tmp_path: Path) -> None:
    vlm_runs.config(tmp_path, task={"rows": 12})
    arguments = ["--config", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "own"), "--samples", "4"]
    text = words(run("collect", str(vlm_runs.MODEL), *arguments))
    assert "of 12 have an answer that was kept" in text and "of 48 reach 1" in text


def test_several_pictures_and_places_are_read_back_and_trained_on(tmp_path: Path) -> None:
    """Three questions: two pictures with places, two before the text, none: the same tokens."""
    source, own = tmp_path / "source", tmp_path / "own"
    source.mkdir()
    for k in range(2):
        Image.new("RGB", (64, 64), (100 * k, 50, 50)).save(source / f"{k}.png")
    lines = [
        {"prompt": "Is <image> as dark as <image> ?", "image": ["0.png", "1.png"], "answer": "no"},
        {"prompt": "Same ?", "image": ["1.png", "0.png"], "answer": "no"},
        {"prompt": "One and one ?", "image": None, "answer": "2"},
    ]
    (source / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model, generation = tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model"), {"max_new_tokens": 60}
    task = {"name": None, "train": str(source / "rows.jsonl")}
    asked = vlm_runs.config(tmp_path, task=task, generation=generation)
    policy = Policy(str(model))
    collect(policy, asked, own, Rule(samples=16, keep=1, threshold=-1.0, choose="shortest"))
    written = [json.loads(line) for line in (own / "train.jsonl").read_text("utf-8").splitlines()]
    assert [line["prompt"] for line in written] == [line["prompt"] for line in lines]
    assert [len(line["image"] or []) for line in written] == [2, 2, 0]
    (tmp_path / "second").mkdir()
    trainer = {"algorithm": "sft", "target": "response", "batch_size": 3}
    task = {"name": None, "train": str(own / "train.jsonl")}
    config = vlm_runs.config(tmp_path / "second", vlm={"path": str(model)}, task=task, trainer=trainer)
    before, after = Questions(asked, "train"), Questions(config, "train")
    for number in range(3):
        one, other = policy.encode(before[number].prompt).tokens, policy.encode(after[number].prompt).tokens
        assert torch.equal(one.ids, other.ids) and one.pixels.keys() == other.pixels.keys()
        assert all(torch.equal(value, other.pixels[name]) for name, value in one.pixels.items())
    assert rows(train(config))[0]["loss"] > 0
