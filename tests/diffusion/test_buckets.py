"""Runs with samples of several sizes: micro-batches of one size, ratio 1, the same when continued."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.diffusion.config.schema import Config
from genrl.diffusion.train import train
from tests.cli import commands
from tests.diffusion import runs
from tests.diffusion.families import saved

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


def test_a_size_with_too_few_prompts_is_refused(folder: Path, model: Path) -> None:
    with pytest.raises(ValueError, match=r"sampling\.buckets: 16 x 24 has 1 of the 4 prompts, and a micro-batch is"):
        train(settings(folder, model, sampling={"buckets": [*SIZES, [24, 16]]}))


def written(folder: Path, **rows: Any) -> None:
    """Prompt files of `TEXTS`; `rows` makes a row's further columns from its number and file."""
    for name, texts in TEXTS.items():
        lines = [{"prompt": text} | {key: made(name, k) for key, made in rows.items()} for k, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def wan(folder: Path) -> dict[str, Any]:
    """A video pipeline in `folder/wan_t2v`, and rows of 1 and 5 frames; its section `sampling`."""
    written(folder, num_frames=lambda _, k: (5, 1)[k % 2])
    return {"buckets": "rows", "height": 16, "width": 16, "pipeline_args": {"max_sequence_length": 16}}


def flux_kontext(folder: Path) -> dict[str, Any]:
    """The same of an editing pipeline; each row has the bucket of its picture's shape."""

    def drawn(name: str, k: int) -> str:
        Image.new("RGB", ((16, 24)[k % 2], 16), (60 * k, 99, 0)).save(folder / f"{name}{k}.png")
        return f"{name}{k}.png"

    written(folder, before_image=drawn)
    arguments = {"max_sequence_length": 16, "max_area": 256, "_auto_resize": False}
    return {"buckets": SIZES, "inputs": {"image": "before_image"}, "pipeline_args": arguments}


NUMBERS = {"wan_t2v": (5 * 768 + 768 + 5 * 768) / 3, "flux_kontext": (768 + 720 + 768) / 3}
"""In the three pictures of an evaluation, on average. Kontext brings 16 x 24 to the area `max_area`: 12 x 20."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", NUMBERS)
def test_evaluations_draw_each_prompt_in_its_size(folder: Path, kind: str) -> None:
    """In training, and `genrl eval` of the run alike; one size for all where it is asked for."""
    (folder / "content.py").write_text(CONTENT)
    common = {"rewards": [{"name": f"{folder / 'content.py'}:content"}], "iterations": 1}
    common["sampling"] = wan(folder) if kind == "wan_t2v" else flux_kontext(folder)
    common["evaluation"] = {"every": 1, "num_prompts": 3, "batch_size": 2}
    common["prompts"] = {name: str(folder / f"{name}.jsonl") for name in TEXTS}
    run = train(settings(folder, saved(kind, folder), **common))
    row = [row for row in runs.rows(run) if row["step"] == 1][0]
    assert row["ratio/max_abs_dev"] == 0.0 and row["eval/content/numbers_mean"] == pytest.approx(NUMBERS[kind])

    def scores(*options: str) -> dict[str, float]:
        commands.run("eval", str(run), "--num-prompts", "3", "--out", str(folder / "scores.json"), *options)
        found: dict[str, float] = json.loads((folder / "scores.json").read_text())["scores"]
        return found

    found = scores("--batch-size", "2")
    assert found == pytest.approx({key: row[key] for key in found}, abs=1e-6) and "eval/content_mean" in found
    one_size = ["--height", "16", "--width", "16", *(["num_frames=1"] if kind == "wan_t2v" else [])]
    assert scores(*one_size)["eval/content/numbers_mean"] == 3 * 16 * 16
