"""RL-VLM-F with a vision-language model as judge: a served one, answers that cannot be read, runs that go on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rewards
from genrl.config import ConfigError
from genrl.vla.simulators.minitable import MiniTable, expert_chunk
from genrl.vla.train import train
from tests.rewards import tiny_vlm
from tests.servers import live
from tests.vla.methods.test_vla_offline_trainers import rows, small

FRAIL = """
from pathlib import Path

COUNT, MENDED = (Path(__file__).with_suffix(end) for end in (".calls", ".mended"))


def mean(images, prompts):
    with COUNT.open("a") as file:
        print(len(prompts), file=file)
    if len(COUNT.read_text().splitlines()) > 3 and not MENDED.exists():
        raise RuntimeError("out of order")
    return images.flatten(1).mean(1)
"""


@pytest.mark.slow
def test_a_served_model_labels_pairs(root: Path, tmp_path: Path) -> None:
    """Some answers are no number: they are counted and teach nothing. A second run asks nothing and is the same."""
    env = MiniTable(6, image_size=32, chunk=1)
    shown = [env.reset(seed=0)[0]["pixels"]]
    for _ in range(11):
        shown.append(env.step(expert_chunk(env.state, 1))[0]["pixels"])
    folder = tiny_vlm.save_comparing(tmp_path / "vlm", [Image.fromarray(row) for row in np.concatenate(shown)[::4]])
    short = {"compare": "{prompt}", "answer": "{analysis}"}
    judge = rewards.load("preference_judge", {"model": str(folder), "dtype": "float32", "max_tokens": 4, **short})
    asked = "trainer.labels.judge=preference_judge", f"trainer.labels.cache={tmp_path / 'labels.jsonl'}"
    with live(judge, "preference_judge") as url:
        given = "trainer.labels.pairs=40", "iterations=1", f"trainer.labels.remote={url}"
        first = rows(train(small(root, "rl_vlm_f", tmp_path / "a", *asked, *given)))[-1]
        again = rows(train(small(root, "rl_vlm_f", tmp_path / "b", *asked, *given)))[-1]
    labels = [json.loads(line)["label"] for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert first["labels/asked"] == len(labels) and again["labels/asked"] == 0
    assert {-2, -1, 0, 1} == {*labels} and 0 < first["labels/unusable"] <= first["labels/dropped"] < 1
    assert first["loss/policy"] == again["loss/policy"]


@pytest.mark.slow
def test_a_run_that_was_stopped_asks_for_the_rest(root: Path, tmp_path: Path) -> None:
    (tmp_path / "frail.py").write_text(FRAIL)
    given = f"trainer.labels.judge={tmp_path / 'frail.py'}:mean", "trainer.labels.batch_size=2", "iterations=1"
    config = small(root, "rl_vlm_f", tmp_path / "run", *given, "trainer.labels.margin=0")
    with pytest.raises(rewards.RewardFailed, match="out of order"):
        train(config)
    labels, calls = tmp_path / "run" / "labels.jsonl", tmp_path / "frail.calls"
    known, failed = (len(file.read_text().splitlines()) for file in (labels, calls))
    (tmp_path / "frail.mended").touch()
    last = rows(train(config, resume=tmp_path / "run"))[-1]
    answered = [int(line) for line in calls.read_text().splitlines()[failed:]]
    assert known == 6 and last["labels/asked"] == len(labels.read_text().splitlines()) - known
    assert sum(answered) == 2 * last["labels/asked"] and last["labels/unusable"] == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("judge=preference_juge", "Did you mean 'preference_judge'"),
        ("judge=geneval", "asks for include"),
        ("remote=http://127.0.0.1:1 trainer.labels.args={max_tokens: 8}", "give them to its server"),
        ("outage.policy=drop", "write stop or pause"),
    ],
)
def test_a_judge_that_cannot_judge_is_refused(root: Path, tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(root, "rl_vlm_f", tmp_path, *f"trainer.labels.{override}".split(" ", 1))
