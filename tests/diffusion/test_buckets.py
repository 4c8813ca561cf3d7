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


@pytest.mark.slow
def test_evaluations_draw_each_prompt_in_its_size(folder: Path) -> None:
    """In training, and `genrl eval` of the run alike; one size for all where it is asked for. Rows say their frames."""
    (folder / "content.py").write_text(CONTENT)
    for name, texts in TEXTS.items():
        lines = [{"prompt": text, "num_frames": (5, 1)[k % 2]} for k, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    common: dict[str, Any] = {"rewards": [{"name": f"{folder / 'content.py'}:content"}], "iterations": 1}
    arguments = {"max_sequence_length": 16}
    common["sampling"] = {"buckets": "rows", "height": 16, "width": 16, "pipeline_args": arguments}
    common["evaluation"] = {"every": 1, "num_prompts": 3, "batch_size": 2}
    common["prompts"] = {name: str(folder / f"{name}.jsonl") for name in TEXTS}
    run = train(settings(folder, saved("wan_t2v", folder), **common))
    row = [row for row in runs.rows(run) if row["step"] == 1][0]
    mean = (5 * 768 + 768 + 5 * 768) / 3  # numbers in the three videos
    assert row["ratio/max_abs_dev"] == 0.0 and row["eval/content/numbers_mean"] == pytest.approx(mean)

    def scores(*options: str) -> dict[str, float]:
        commands.run("eval", str(run), "--num-prompts", "3", "--out", str(folder / "scores.json"), *options)
        result: dict[str, float] = json.loads((folder / "scores.json").read_text())["scores"]
        return result

    result = scores("--batch-size", "2")
    assert result == pytest.approx({key: row[key] for key in result}, abs=1e-6) and "eval/content_mean" in result
    one_size = ["--height", "16", "--width", "16", "num_frames=1"]
    assert scores(*one_size)["eval/content/numbers_mean"] == 3 * 16 * 16
