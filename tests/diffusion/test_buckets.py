"""Runs with samples of several sizes: micro-batches of one size, ratio 1, the same when continued."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.config import dump
from genrl.diffusion.config.schema import Config
from genrl.diffusion.rollout.rollout import Sheet
from genrl.diffusion.train import train
from tests.cli import commands
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES

SIZES = [[16, 16], [16, 24]]
TEXTS = {"train": runs.PROMPTS, "eval": [*runs.HELD_OUT, "a dog"]}
CONTENT = '''\
def content(images):
    """The mean of a picture or video, and how many numbers it has."""
    return images.flatten(1).mean(1).tolist(), {"numbers": [images[0].numel()] * len(images)}
'''


def settings(folder: Path, model: Path, **changes: Any) -> Config:
    tree = runs.settings(folder, model, **changes)
    for name in ("height", "width"):
        del tree["sampling"][name]
    tree["sampling"] |= {"prompts_per_iteration": 4, "batch_size": 4} | changes.get("sampling", {"buckets": SIZES})
    return Config.model_validate(tree)


DGPO = {"algorithm": "dgpo", "first_steps": 3, "timesteps_per_sample": 2}


@pytest.mark.parametrize("trainer", [{"algorithm": "flow_grpo"}, runs.NFT, DGPO], ids=lambda t: t["algorithm"])
def test_a_run_draws_and_trains_every_size(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    """And goes on to the bit."""
    run = train(settings(folder, model, trainer=trainer, iterations=2, evaluation={"every": 1}))
    assert runs.differences(run, runs.resumed(run, folder, 1)) == []
    rows = runs.rows(run)
    if trainer["algorithm"] == "flow_grpo":
        assert [row["ratio/max_abs_dev"] for row in rows if row["step"]] == [0.0, 0.0]
    assert rows[-1]["eval/brightness_failed"] == 0
    assert {(16, 16), (24, 16)} <= {Image.open(file).size for file in (run / "samples").rglob("*.png")}


def test_micro_batches_are_whole_groups_of_one_size(folder: Path, model: Path) -> None:
    with runs.opened(settings(folder, model)) as run:
        assert len({tuple(row.size.items()) for row in run.prompts}) == 2
        for iteration in range(3):
            sheet = Sheet.of(run.config, run.prompts, iteration, leaves=1, roots_together=None)
            batches = [sheet.batch(run.config, slots) for slots in sheet.plan]
            found = sorted((batch.sampling["height"], batch.sampling["width"], len(batch)) for batch in batches)
            assert found == [(16, 16, 4), (16, 24, 4)]


def test_a_size_with_too_few_prompts_is_refused_before_the_model_is_loaded(folder: Path, model: Path) -> None:
    few = settings(folder, model, sampling={"buckets": [*SIZES, [24, 16]]})
    with pytest.raises(ValueError, match=r"sampling\.buckets: 16 x 24 has 1 of the 4 prompts, and a micro-batch is"):
        train(few)


def wan(folder: Path) -> dict[str, Any]:
    """A video pipeline in `folder/model`, and rows of 1 and 5 frames; its section `sampling`."""
    FAMILIES["wan_t2v"]().pipe.save_pretrained(folder / "model")
    for name, texts in TEXTS.items():
        lines = [{"prompt": text, "num_frames": (5, 1)[k % 2]} for k, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return {"buckets": "rows", "height": 16, "width": 16, "pipeline_args": {"max_sequence_length": 16}}


def kontext(folder: Path) -> dict[str, Any]:
    """The same of an editing pipeline; each row has the bucket of its picture's shape."""
    FAMILIES["flux_kontext"]().pipe.save_pretrained(folder / "model")
    for name, texts in TEXTS.items():
        lines = []
        for k, text in enumerate(texts):
            size = (16, 24)[k % 2], 16
            Image.new("RGB", size, (60 * k, 99, 0)).save(folder / f"{name}{k}.png")
            lines.append({"prompt": text, "before_image": f"{name}{k}.png"})
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    arguments = {"max_sequence_length": 16, "max_area": 256, "_auto_resize": False}
    return {"buckets": SIZES, "inputs": {"image": "before_image"}, "pipeline_args": arguments}


NUMBERS = {wan: (5 * 768 + 768 + 5 * 768) / 3, kontext: (768 + 720 + 768) / 3}
"""In the three pictures of an evaluation, on average. Kontext brings 16 x 24 to the area `max_area`: 12 x 20."""


def sized(folder: Path, kind: Callable[[Path], dict[str, Any]], **changes: Any) -> Config:
    """A run of these models, in `folder/tiny.yaml`."""
    (folder / "content.py").write_text(CONTENT)
    reward = [{"name": f"{folder / 'content.py'}:content"}]
    evaluation = {"every": 1, "num_prompts": 3, "batch_size": 2}
    common = {"rewards": reward, "evaluation": evaluation, "iterations": 1, "sampling": kind(folder)}
    common["prompts"] = {name: str(folder / f"{name}.jsonl") for name in TEXTS}
    config = settings(folder, folder / "model", **common, **changes)
    (folder / "tiny.yaml").write_text(dump(config), encoding="utf-8")
    return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", [wan, kontext])
def test_evaluations_draw_each_prompt_in_its_size(folder: Path, kind: Callable[[Path], dict[str, Any]]) -> None:
    """In training, and `genrl eval` of the run alike; one size for all where it is asked for."""
    run = train(sized(folder, kind))
    row = [row for row in runs.rows(run) if row["step"] == 1][0]
    assert row["ratio/max_abs_dev"] == 0.0 and row["eval/content/numbers_mean"] == pytest.approx(NUMBERS[kind])

    def scores(*options: str) -> dict[str, float]:
        commands.run("eval", str(run), "--num-prompts", "3", "--out", str(folder / "scores.json"), *options)
        found: dict[str, float] = json.loads((folder / "scores.json").read_text())["scores"]
        return found

    found = scores("--batch-size", "2")
    assert found == pytest.approx({key: row[key] for key in found}, abs=1e-6) and "eval/content_mean" in found
    one_size = ["--height", "16", "--width", "16", *(["num_frames=1"] if kind is wan else [])]
    assert scores(*one_size)["eval/content/numbers_mean"] == 3 * 16 * 16
