"""Runs with samples of several sizes: micro-batches of one size, ratio 1, the same when continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.config import Config
from genrl.diffusion.rollout.rollout import Sheet
from genrl.diffusion.train import train
from tests.diffusion import runs

SIZES = [[16, 16], [16, 24]]


def settings(folder: Path, model: Path, **changes: Any) -> Config:
    tree = runs.settings(folder, model, **changes)
    for name in ("height", "width"):
        del tree["sampling"][name]
    tree["sampling"] |= {"prompts_per_iteration": 4, "batch_size": 4} | changes.get("sampling", {"buckets": SIZES})
    return Config.model_validate(tree)


DGPO = {"algorithm": "dgpo", "first_steps": 3, "timesteps_per_sample": 2}


@pytest.mark.parametrize("trainer", [{"algorithm": "flow_grpo"}, runs.NFT, DGPO], ids=lambda t: t["algorithm"])
def test_a_run_draws_and_trains_every_size(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    run = train(settings(folder, model, trainer=trainer, iterations=2, evaluation={"every": 1}))
    rows = runs.rows(run)
    if trainer["algorithm"] == "flow_grpo":
        assert [row["ratio/max_abs_dev"] for row in rows if row["step"]] == [0.0, 0.0]
    assert rows[-1]["eval/brightness_failed"] == 0
    pictures = sorted((run / "samples").rglob("*.png"))
    shapes = {Image.open(file).size for file in pictures}
    assert {(16, 16), (24, 16)} <= shapes


def test_micro_batches_are_whole_groups_of_one_size(folder: Path, model: Path) -> None:
    with runs.opened(settings(folder, model)) as run:
        assert len({tuple(row.size.items()) for row in run.prompts}) == 2
        for iteration in range(3):
            sheet = Sheet.of(run.config, run.prompts, iteration, leaves=1, roots_together=None)
            batches = [sheet.batch(run.config, slots) for slots in sheet.plan]
            found = sorted((batch.sampling["height"], batch.sampling["width"], len(batch)) for batch in batches)
            assert found == [(16, 16, 4), (16, 24, 4)]


def test_rows_name_their_own_size(folder: Path, model: Path) -> None:
    for name, texts in (("train", runs.PROMPTS), ("eval", runs.HELD_OUT)):
        lines = [{"prompt": text, "height": 16, "width": (16, 24)[k % 2]} for k, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    prompts = {name: str(folder / f"{name}.jsonl") for name in ("train", "eval")}
    rows = runs.rows(train(settings(folder, model, prompts=prompts, sampling={"buckets": "rows"})))
    assert [row["ratio/max_abs_dev"] for row in rows if row["step"]] == [0.0, 0.0]


def test_a_continued_run_is_the_same_to_the_bit(folder: Path, model: Path) -> None:
    whole = train(settings(folder, model, iterations=3))
    first = settings(folder, model, iterations=2, output=str(folder / "parts"))
    parts = train(first)
    train(first.model_copy(update={"iterations": 3}), parts)
    assert runs.differences(whole, parts) == []


def test_a_size_with_too_few_prompts_is_refused_before_the_model_is_loaded(folder: Path, model: Path) -> None:
    few = settings(folder, model, sampling={"buckets": [*SIZES, [24, 16]]})
    with pytest.raises(
        ValueError, match=r"sampling\.buckets: 16 x 24 has 1 of the 4 prompts, and a micro-batch is of 2"
    ):
        train(few)
