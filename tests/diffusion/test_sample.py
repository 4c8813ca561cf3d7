"""`genrl sample` and `genrl eval`: pictures and scores of any pipeline."""

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

import genrl_rewards
from genrl.data.prompts import Prompt
from genrl.diffusion.config.sections import Model
from genrl.diffusion.evaluate import Evaluated, spread
from genrl.diffusion.rollout.scoring import plain
from genrl.diffusion.sample import evaluate_pipeline, load, sample
from tests.diffusion import runs

ARGUMENTS: dict[str, Any] = {**runs.CALL, "num_inference_steps": 3}
PROMPTS = ["a red star", "two blue dogs", "a cat"]


@pytest.fixture(scope="module")
def pipe(model: Path) -> Any:
    return load(Model(path=str(model)), None)


def test_each_picture_is_that_of_a_plain_call(pipe: Any, model: Path, tmp_path: Path) -> None:
    """Prompt k of seed s is drawn alone from seed s + k: it does not depend on other prompts. Pictures of an earlier
    call are removed: those that its prompts.json lists, nothing else."""
    paths = sample(pipe, PROMPTS, tmp_path, seed=40, arguments=ARGUMENTS)
    assert [path.name for path in paths] == ["00000.png", "00001.png", "00002.png"]
    plainly = DiffusionPipeline.from_pretrained(model)
    for k, path in enumerate(paths):
        generator = torch.Generator().manual_seed(40 + k)
        wanted = plainly(prompt=PROMPTS[k], generator=generator, **ARGUMENTS).images[0]
        assert np.array_equal(np.asarray(Image.open(path)), np.asarray(wanted))
    record = json.loads((tmp_path / "prompts.json").read_text())
    assert record == [{"file": f"0000{k}.png", "prompt": PROMPTS[k], "seed": 40 + k} for k in range(3)]
    assert Image.open(tmp_path / "grid.png").width > 3 * 16
    others = {"mine.png", "00007.png"}
    for name in others:
        (tmp_path / name).write_bytes(b"kept")
    sample(pipe, PROMPTS[:1], tmp_path, arguments=ARGUMENTS)
    assert {path.name for path in tmp_path.iterdir()} == {"00000.png", "grid.png", "prompts.json"} | others
    (tmp_path / "prompts.json").write_text('[{"file": "../mine.png"}, {"file": "mine.png"}, 3]')
    sample(pipe, PROMPTS[:1], tmp_path, arguments=ARGUMENTS)
    assert (tmp_path / "mine.png").read_bytes() == b"kept"


def test_loading(model: Path, tmp_path: Path) -> None:
    """What is no adapter of this model is named: diffusers only warns, and draws the untrained model's pictures."""
    vae = load(Model(path=str(model), slice_vae=True, tile_vae=True), None).vae
    assert vae.use_slicing and vae.use_tiling
    with pytest.raises(ValueError, match=r"model\.path: '.*nowhere' could not be loaded as a diffusers pipeline"):
        load(Model(path=str(tmp_path / "nowhere")), None)
    layer = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.zeros(2, 8), f"{layer}.lora_B.weight": torch.zeros(8, 2)}
    for name in ("empty", "text", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / "text.safetensors").write_text("no weights")
    save_file(tensors, tmp_path / "other" / "pytorch_lora_weights.safetensors")
    for lora, says in (
        ("no-lora", r"the LoRA '.*no-lora' is not there: no such folder \(a hub id is written"),
        ("empty", "holds no LoRA: there is no .safetensors file in it"),
        ("text", "could not be loaded into StableDiffusion3Pipeline: "),
        ("text/text.safetensors", "could not be loaded into StableDiffusion3Pipeline: "),
        ("other", "could not be loaded into StableDiffusion3Pipeline: it is of another model"),
    ):
        with pytest.raises(ValueError, match=says):
            load(Model(path=str(model)), str(tmp_path / lora))


def test_what_does_not_fit_is_refused_before_drawing(folder: Path, pipe: Any) -> None:
    message = "^num_inferense_steps: StableDiffusion3Pipeline takes no such argument; remove it; did you mean num_inf"
    with pytest.raises(ValueError, match=message):
        sample(pipe, PROMPTS, folder / "out", arguments={"num_inferense_steps": 3})
    assert not (folder / "out").exists()
    with pytest.raises(ValueError, match=message):
        evaluate_pipeline(pipe, [Prompt("a")], plain({}), arguments={"num_inferense_steps": 3})
    (folder / "wants.py").write_text("def wants(images, colour):\n    return [0.0] * len(images)\n")
    scorers = plain({"wants": genrl_rewards.load(f"{folder}/wants.py:wants")})
    for rows in ([Prompt("a", {"shape": 1})], [Prompt("a", {"colour": 1}), Prompt("b", {"shape": 1})]):
        with pytest.raises(ValueError, match="reward 'wants' asks for the column 'colour'"):
            evaluate_pipeline(pipe, rows, scorers, arguments=ARGUMENTS)


def test_evaluation_is_that_of_training(finished: Path, model: Path) -> None:
    """`genrl eval` of the untrained model gives row 0 of a run; with its adapter, the last row: averaged weights."""
    scorers = plain({"brightness": genrl_rewards.load(f"{finished.parent}/rewards.py:brightness")})
    rows = [Prompt(text) for text in runs.HELD_OUT]
    logged = [row for row in runs.rows(finished) if "eval/total_mean" in row]
    for lora, row in ((None, logged[0]), (str(finished / "lora"), logged[-1])):
        pipe = load(Model(path=str(model)), lora)
        result = evaluate_pipeline(pipe, rows, scorers, batch_size=2, seed=1234, arguments=ARGUMENTS)
        for name, value in result.metrics.items():
            assert row[name] == pytest.approx(value, abs=1e-7), name
    assert logged[0]["eval/total_mean"] != logged[-1]["eval/total_mean"]


def test_evaluation_keeps_some_pictures_and_parts_whatever_the_batch(folder: Path, pipe: Any) -> None:
    """Where no number of steps is given: the default of the pipeline's call."""
    scorers = plain({"redness": genrl_rewards.load(f"{folder}/rewards.py:redness")})
    rows = [Prompt(f"{k} dogs") for k in range(6)]

    def evaluated(size: int, pictures: int) -> Evaluated:
        return evaluate_pipeline(pipe, rows, scorers, batch_size=size, num_pictures=pictures, arguments=ARGUMENTS)

    every, some, other = evaluated(2, 6), evaluated(2, 3), evaluated(5, 6)
    assert every.prompts == [row.text for row in rows] and every.shown == list(range(6)) and some.shown == [0, 2, 4]
    assert torch.equal(some.total, every.total) and torch.equal(every.total, every.scored.values["redness"])
    torch.testing.assert_close(other.total, every.total, rtol=0, atol=1e-5)
    assert all(torch.equal(image, every.images[row]) for row, image in zip(some.shown, some.images, strict=True))
    assert some.images[0].shape == (3, 16, 16)
    assert float(some.images[1][0].mean()) == pytest.approx(float(every.scored.parts["redness/red"][2]), abs=1e-2)
    parts = every.scored.parts
    torch.testing.assert_close(parts["redness/red"] - parts["redness/blue"], every.total, rtol=0, atol=1e-6)
    assert every.metrics["eval/redness/red_mean"] == pytest.approx(float(parts["redness/red"].mean()))
    default = inspect.signature(StableDiffusion3Pipeline.__call__).parameters["num_inference_steps"].default
    result, given, three = (
        float(evaluate_pipeline(pipe, rows[:1], scorers, arguments=runs.CALL | steps).total)
        for steps in ({}, {"num_inference_steps": default}, {"num_inference_steps": 3})
    )
    assert result == given != three


def test_pictures_are_spread_over_the_prompts() -> None:
    for count, length in ((0, 3), (1, 1), (2, 3), (16, 96), (16, 5), (7, 30)):
        rows = spread(count, length)
        assert len(rows) == min(count, length) and rows == sorted(set(rows))
        gaps = {b - a for a, b in zip(rows, [*rows[1:], length], strict=True)} if rows else {0}
        assert max(gaps) - min(gaps) <= 1 and rows[:1] == ([0] if count else [])


def test_pictures_that_are_not_finite_are_counted_and_end_the_command(folder: Path, pipe: Any) -> None:
    """A VAE that overflows in half precision: black files are no result, and no reward is blamed for them."""
    decode, calls = pipe.vae.decode, []

    def overflowing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        (made,) = decode(*args, **{**kwargs, "return_dict": False})
        return (made * (float("nan") if len(calls) % 2 else 1.0),)

    pipe.vae.decode = overflowing
    with pytest.raises(RuntimeError, match=r"^1 of 2 pictures hold .* finite.*AutoencoderKL, float32"):
        sample(pipe, PROMPTS[:1] * 2, folder / "nan", arguments=ARGUMENTS)
    assert (folder / "nan" / "00001.png").is_file() and (folder / "nan" / "grid.png").is_file()
    (folder / "bright.py").write_text("def bright(images):\n    return images.flatten(1).mean(1)\n")
    scorers = plain({"bright": genrl_rewards.load(f"{folder}/bright.py:bright")})
    result = evaluate_pipeline(pipe, [Prompt("a"), Prompt("b")], scorers, arguments=ARGUMENTS, batch_size=1)
    assert result.scored.broken == 1
    pipe.vae.decode = lambda *args, **kwargs: (decode(*args, **{**kwargs, "return_dict": False})[0] * float("nan"),)
    with pytest.raises(RuntimeError, match="^2 of 2 pictures hold numbers that are not finite.*or the weights have"):
        evaluate_pipeline(pipe, [Prompt("a"), Prompt("b")], scorers, arguments=ARGUMENTS)
