"""Editing pipelines are trained from a configuration: each prompt's picture stands in a column of the prompt file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.diffusion.config.schema import Config
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")


def editing(folder: Path, kontext: Path, **changes: Any) -> Config:
    random = np.random.default_rng(0)
    rows = []
    for k in range(3):
        Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{k}.png")
        rows.append(json.dumps({"prompt": f"make it red {k}", "source_image": f"{k}.png"}))
    (folder / "edits.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "held_out.jsonl").write_text("\n".join(rows[:2]), encoding="utf-8")
    sampling = {
        "inputs": {"image": "source_image"},
        "guidance_scale": 2.5,
        "pipeline_args": {"max_sequence_length": 16, "max_area": 256, "_auto_resize": False},
        **changes.pop("sampling", {}),
    }
    prompts = {"train": str(folder / "edits.jsonl"), "eval": str(folder / "held_out.jsonl")}
    return runs.config(folder, kontext, prompts=prompts, sampling=sampling, **changes)


def test_an_editing_model_trains_on_its_pictures(folder: Path, kontext: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, bytes]] = []
    collect = DiffusionRun.collect

    def watched(self: DiffusionRun, draw: Any, **shape: Any) -> Any:
        found = collect(self, draw, **shape)
        for one in found.mine.values():
            pictures = [picture.tobytes() for picture in one.batch.inputs["image"]]
            given.extend(zip(one.batch.prompts, pictures, strict=True))
        return found

    monkeypatch.setattr(DiffusionRun, "collect", watched)
    run = train(editing(folder, kontext, iterations=2))
    rows = runs.rows(run)
    assert [row["ratio/max_abs_dev"] for row in rows[1:]] == [0.0, 0.0] and rows[1]["grad_norm"] > 0
    assert "eval/total_mean" in rows[0] and "eval/total_mean" in rows[-1]
    for text, picture in given:
        k = text.removeprefix("make it red ")
        assert picture == Image.open(folder / f"{k}.png").convert("RGB").tobytes()


def test_a_picture_changes_the_sample(folder: Path, kontext: Path) -> None:
    config = editing(folder, kontext, iterations=1, evaluation={"every": 0})
    with runs.opened(config) as run:
        one = run.probe
        other = type(one)(one.prompts, one.keys, one.sampling, inputs={"image": [Image.new("RGB", (16, 16), "white")]})
        first, second = (run.policy.generate(batch) for batch in (one, other))
    assert not torch.allclose(first, second)


def test_columns_and_files_that_are_not_there_are_named(folder: Path, kontext: Path) -> None:
    quiet: dict[str, Any] = {"evaluation": {"every": 0}}
    config = editing(folder, kontext, sampling={"inputs": {"image": "source_imag"}}, **quiet)
    with pytest.raises(ValueError, match=r"sampling\.inputs\.image: .*edits\.jsonl:1 has no column .*source_image'\?"):
        train(config)
    config = editing(folder, kontext, **quiet)
    (folder / "1.png").unlink()
    with pytest.raises(ValueError, match=r"edits\.jsonl:2"):
        train(config)
    config = editing(folder, kontext, sampling={"inputs": {"imgae": "source_image"}}, **quiet)
    with pytest.raises(ValueError, match=r"imgae: FluxKontextPipeline takes no such argument.*did you mean image"):
        train(config)
