"""`genrl sample` and `genrl eval`: pictures and scores of any pipeline."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import save_file

import rewards
from genrl.config import Model
from genrl.data.prompts import Prompt
from genrl.diffusion.evaluate import spread
from genrl.diffusion.rollout.scoring import plain
from genrl.diffusion.sample import evaluate_pipeline, load, sample
from genrl.diffusion.train import train
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

ARGUMENTS: dict[str, Any] = {
    "num_inference_steps": 3,
    "guidance_scale": 1.0,
    "height": 16,
    "width": 16,
    "max_sequence_length": 4,
}
PROMPTS = ["a red star", "two blue dogs", "a cat"]


def test_each_picture_is_that_of_a_plain_call(model: Path, tmp_path: Path) -> None:
    """Prompt k of seed s is drawn alone from seed s + k: it does not depend on the other prompts."""
    paths = sample(load(Model(path=str(model)), None), PROMPTS, tmp_path, seed=40, arguments=ARGUMENTS)
    assert [path.name for path in paths] == ["00000.png", "00001.png", "00002.png"]
    pipe = DiffusionPipeline.from_pretrained(model)
    for k, path in enumerate(paths):
        generator = torch.Generator().manual_seed(40 + k)
        wanted = pipe(prompt=PROMPTS[k], generator=generator, **ARGUMENTS).images[0]
        assert np.array_equal(np.asarray(Image.open(path)), np.asarray(wanted))
    record = json.loads((tmp_path / "prompts.json").read_text())
    assert record == [{"file": f"0000{k}.png", "prompt": PROMPTS[k], "seed": 40 + k} for k in range(3)]
    assert Image.open(tmp_path / "grid.png").width > 3 * 16


def test_seed_decides(model: Path, tmp_path: Path) -> None:
    def first(name: str, seed: int) -> np.ndarray:
        (path,) = sample(
            load(Model(path=str(model)), None), PROMPTS[:1], tmp_path / name, seed=seed, arguments=ARGUMENTS
        )
        return np.asarray(Image.open(path))

    assert np.array_equal(first("a", 1), first("b", 1))
    assert not np.array_equal(first("a", 1), first("c", 2))


def test_the_vae_decodes_as_it_does_in_training(model: Path) -> None:
    vae = load(Model(path=str(model), slice_vae=True, tile_vae=True), None).vae
    assert vae.use_slicing and vae.use_tiling


def test_loading_what_is_not_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: '.*nowhere' could not be loaded as a diffusers pipeline"):
        load(Model(path=str(tmp_path / "nowhere")), None)
    with pytest.raises(ValueError, match=r"the LoRA '.*no-lora' is not there: no such folder \(a hub id is written"):
        load(Model(path=str(model)), str(tmp_path / "no-lora"))
    with pytest.raises(ValueError, match="holds no LoRA: there is no .safetensors file in it"):
        load(Model(path=str(model)), str(tmp_path))
    (tmp_path / "text.safetensors").write_text("no weights")
    for name in ("", "text.safetensors"):
        with pytest.raises(ValueError, match="could not be loaded into StableDiffusion3Pipeline: "):
            load(Model(path=str(model)), str(tmp_path / name))


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    """diffusers only warns, and would draw the untrained model's pictures."""
    layer = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.zeros(2, 8), f"{layer}.lora_B.weight": torch.zeros(8, 2)}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ValueError, match="holds nothing for StableDiffusion3Pipeline: it is of another model"):
        load(Model(path=str(model)), str(tmp_path))


def test_an_argument_that_the_pipeline_does_not_take(model: Path, tmp_path: Path) -> None:
    pipe = load(Model(path=str(model)), None)
    message = "^num_inferense_steps: StableDiffusion3Pipeline takes no such argument; remove it; did you mean num_inf"
    with pytest.raises(ValueError, match=message):
        sample(pipe, PROMPTS, tmp_path / "out", arguments={"num_inferense_steps": 3})
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=message):
        evaluate_pipeline(pipe, [Prompt("a")], plain({}), arguments={"num_inferense_steps": 3})


def test_evaluation_is_that_of_training(folder: Path, model: Path) -> None:
    """`genrl eval` of the untrained model gives row 0 of a run; with its adapter, the last row: averaged weights."""
    run = train(runs.config(folder, model, optimizer={"lr": 0.1}, ema={"decay": 0.5}, iterations=2))
    scorers = plain({"brightness": rewards.load(f"{folder}/rewards.py:brightness")})
    rows = [Prompt(text) for text in runs.HELD_OUT]

    def evaluated(lora: Path | None) -> dict[str, float]:
        pipe = load(Model(path=str(model)), str(lora) if lora else None)
        return evaluate_pipeline(pipe, rows, scorers, batch_size=2, seed=1234, arguments=ARGUMENTS).metrics

    logged = [row for row in runs.rows(run) if "eval/total_mean" in row]
    for lora, row in ((None, logged[0]), (run / "lora", logged[-1])):
        for name, value in evaluated(lora).items():
            assert row[name] == pytest.approx(value, abs=1e-7), name
    assert logged[0]["eval/total_mean"] != logged[-1]["eval/total_mean"]


def test_evaluation_has_pictures_and_parts(folder: Path, model: Path) -> None:
    scorers = plain({"redness": rewards.load(f"{folder}/rewards.py:redness")})
    rows = [Prompt(text) for text in PROMPTS]
    found = evaluate_pipeline(
        load(Model(path=str(model)), None), rows, scorers, batch_size=2, num_pictures=2, arguments=ARGUMENTS
    )
    assert found.prompts == PROMPTS and found.shown == [0, 1]
    assert len(found.images) == 2 and found.images[0].shape == (3, 16, 16)
    assert len(found.total) == 3 and torch.equal(found.total, found.scored.values["redness"])
    parts = found.scored.parts
    torch.testing.assert_close(parts["redness/red"] - parts["redness/blue"], found.total, rtol=0, atol=1e-6)
    assert found.metrics["eval/redness/red_mean"] == pytest.approx(float(parts["redness/red"].mean()))


def test_evaluation_does_not_depend_on_the_batch(folder: Path, model: Path) -> None:
    scorers = plain({"brightness": rewards.load(f"{folder}/rewards.py:brightness")})
    rows = [Prompt(text) for text in PROMPTS]
    totals = [
        evaluate_pipeline(load(Model(path=str(model)), None), rows, scorers, batch_size=size, arguments=ARGUMENTS).total
        for size in (1, 2, 3)
    ]
    for total in totals[1:]:
        torch.testing.assert_close(total, totals[0], rtol=0, atol=1e-5)


def test_a_missing_column_is_refused_before_drawing(folder: Path, model: Path) -> None:
    (folder / "wants.py").write_text("def wants(images, colour):\n    return [0.0] * len(images)\n")
    scorers = plain({"wants": rewards.load(f"{folder}/wants.py:wants")})
    for rows in ([Prompt("a", {"shape": 1})], [Prompt("a", {"colour": 1}), Prompt("b", {"shape": 1})]):
        with pytest.raises(ValueError, match="reward 'wants' asks for the column 'colour'"):
            evaluate_pipeline(load(Model(path=str(model)), None), rows, scorers, arguments=ARGUMENTS)


def test_the_pipeline_has_its_own_number_of_steps(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is given: the default of the pipeline's call."""
    scorers = plain({"brightness": rewards.load(f"{folder}/rewards.py:brightness")})
    without = {name: value for name, value in ARGUMENTS.items() if name != "num_inference_steps"}
    default = inspect.signature(StableDiffusion3Pipeline.__call__).parameters["num_inference_steps"].default
    found, given, other = (
        float(
            evaluate_pipeline(load(Model(path=str(model)), None), [Prompt("a cat")], scorers, arguments=arguments).total
        )
        for arguments in (without, without | {"num_inference_steps": default}, ARGUMENTS)
    )
    assert found == given != other


@pytest.mark.parametrize(("count", "length"), [(0, 3), (1, 1), (2, 3), (16, 96), (16, 5), (7, 30)])
def test_pictures_are_spread_over_the_prompts(count: int, length: int) -> None:
    rows = spread(count, length)
    assert len(rows) == min(count, length) and rows == sorted(set(rows))
    gaps = {b - a for a, b in zip(rows, [*rows[1:], length], strict=True)} if rows else {0}
    assert max(gaps) - min(gaps) <= 1 and rows[:1] == ([0] if count else [])


def test_the_pictures_kept_are_those_of_their_rows(folder: Path, model: Path) -> None:
    """The same pictures, and scores, whether all are kept or some; whatever the batches."""
    scorers = plain({"brightness": rewards.load(f"{folder}/rewards.py:brightness")})
    rows = [Prompt(f"{k} dogs") for k in range(6)]
    every, some = (
        evaluate_pipeline(
            load(Model(path=str(model)), None), rows, scorers, batch_size=2, num_pictures=count, arguments=ARGUMENTS
        )
        for count in (6, 3)
    )
    assert some.shown == [0, 2, 4] and torch.equal(some.total, every.total)
    assert all(torch.equal(image, every.images[row]) for row, image in zip(some.shown, some.images, strict=True))
    assert float(some.images[1].mean()) == pytest.approx(float(some.total[2]), abs=1e-2)  # rounded to 8 bit


def test_pictures_of_an_earlier_call_are_removed(model: Path, tmp_path: Path) -> None:
    """Those that its prompts.json lists; nothing else."""
    pipe = load(Model(path=str(model)), None)
    sample(pipe, PROMPTS, tmp_path, arguments=ARGUMENTS)
    (tmp_path / "mine.png").write_bytes(b"kept")
    (tmp_path / "00007.png").write_bytes(b"kept")
    sample(pipe, PROMPTS[:1], tmp_path, arguments=ARGUMENTS)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"00000.png", "grid.png", "prompts.json", "mine.png", "00007.png"}
    (tmp_path / "prompts.json").write_text('[{"file": "../mine.png"}, {"file": "mine.png"}, 3]')
    sample(pipe, PROMPTS[:1], tmp_path, arguments=ARGUMENTS)
    assert (tmp_path / "mine.png").read_bytes() == b"kept"
