"""Supervised fine-tuning of a pipeline: the loss by hand, its source picture, calls, and sets that are none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from genrl.config import ConfigError, check_files
from genrl.data.preferences import TARGET_COLUMNS, as_tensor, open_set
from genrl.data.prompts import PromptError
from genrl.diffusion.config.estimate import plan
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.sft import train as sft
from genrl.diffusion.policy import decoding
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.methods.watched import gradients, relative, resumed, watch
from tests.diffusion.policy.test_starting import editing

COLOURS = [(40 * k, 80, 120) for k in range(4)]


def config(folder: Path, kontext: Path, **changes: Any) -> Config:
    """Four edits of pictures of one colour each, by the tiny FLUX.1-Kontext."""
    rows = []
    for k, colour in enumerate(COLOURS):
        Image.new("RGB", (16, 16), colour).save(folder / f"{k}-source.png")
        Image.new("RGB", (16, 16), (255, 255, 255 - colour[0])).save(folder / f"{k}-target.png")
        rows.append(
            json.dumps({"prompt": f"edit {k}", "source_image": f"{k}-source.png", "target_image": f"{k}-target.png"})
        )
    (folder / "pairs.jsonl").write_text("\n".join(rows), encoding="utf-8")
    sampling = {"group_size": 1, "prompts_per_iteration": 4, **changes.pop("sampling", {})}
    prompts = {"train": str(folder / "pairs.jsonl"), "eval": None}
    trainer = {"algorithm": "sft"} | changes.pop("trainer", {})
    changes = {"trainer": trainer, "sampling": sampling, "evaluation": {"every": 0}, **changes}
    return editing(folder, kontext, prompts=prompts, **changes)


@pytest.fixture(autouse=True)
def _random_autoencoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST", 10.0)  # it need not give pictures back


def test_the_loss_is_the_matching_error_beside_the_source_picture(folder: Path, kontext: Path) -> None:
    """Of each target its own noise and level; the gradient is that of the mean over pictures."""
    result = config(folder, kontext, iterations=1)
    with runs.opened(result) as run:
        seen = watch(run)
        sft.train(run, result.trainer)  # type: ignore[arg-type]
        (update,) = seen.updates
        for name, parameter in run.weights.named.items():
            parameter.data.copy_(update.weights[name])
            parameter.grad = None
        reader = open_set(result.prompts.train, run.prompts, TARGET_COLUMNS)
        levels, losses = [], []
        for piece in update.pieces:
            rows = [next(row for row in run.prompts if row.text == text) for text in piece.batch.prompts]
            pictures = torch.stack([as_tensor(reader(row)[0], 16, 16) for row in rows])
            assert [p.getpixel((0, 0)) for p in piece.batch.inputs["image"]] == [
                COLOURS[int(row.text.split()[1])] for row in rows
            ]
            with torch.no_grad():
                clean = decoding.Encoder(run.policy)(piece.batch, pictures)
            noisy, sigma, target = (piece.given[name] for name in ("noisy", "sigma", "target"))
            noise = target + clean
            assert torch.allclose(noisy, torch.lerp(clean, noise, sigma.view(-1, *[1] * (clean.dim() - 1))), atol=1e-5)
            error = (run.policy.velocity(piece.batch, noisy, sigma) - (noise - clean)).square().flatten(1).mean(1)
            (error.sum() / 4).backward()
            losses += error.tolist()
            levels += [*sigma.tolist(), float(noise.mean())]
        assert len(update.pieces) == 2 and seen.rows[0]["loss"] == pytest.approx(sum(losses) / 4, abs=1e-5)
        assert len(set(levels)) == len(levels)  # no noise and no level twice
        assert relative(update.gradient, gradients(run)) < 1e-4
        assert any(bool(gradient.any()) for gradient in update.gradient.values())


def test_calls_are_the_predicted_ones_and_nothing_is_sampled(folder: Path, kontext: Path) -> None:
    """Over a stop, after which the run goes on to the bit."""
    result = config(folder, kontext, trainer={"inner_epochs": 2}, iterations=2)
    for row in runs.rows(resumed(result, folder)):
        assert row["model_calls/sample"] == plan(result).sample_calls == 0
        assert row["model_calls/train"] == plan(result).train_calls == 4 * 2
        assert "reward/total_mean" not in row


def test_impossible_settings_and_sets_are_refused(folder: Path, kontext: Path) -> None:
    actual, pairs = config(folder, kontext), folder / "pairs.jsonl"
    pairs.write_text(pairs.read_text().replace("target_image", "targt_image"))
    wanted = r"pairs.jsonl:1: no column 'target_image', found .*; did you mean 'targt_image'\? \(needed: target_image\)"
    with pytest.raises(ConfigError, match=wanted):
        check_files(actual, {})
    actual = config(folder, kontext)  # writes the set anew
    Image.new("RGB", (24, 16)).save(folder / "1-target.png")
    message = r"pairs.jsonl:2: unlike shapes \(target_image 24 x 16, source_image 16 x 16, the size .* 16 x 16\)"
    with pytest.raises(PromptError, match=message):
        train(actual)
    Image.new("RGB", (16, 16)).save(folder / "1-target.png")
    (folder / "2-target.png").write_bytes(b"no picture")
    with pytest.raises(PromptError, match=r"pairs.jsonl:3: target_image cannot be read as an image"):
        train(actual)
    assert not (folder / "run" / "checkpoints").exists()
