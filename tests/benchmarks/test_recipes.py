"""Every recipe for a published model, made small, trains an iteration on that model's architecture with tiny networks.

At the published size: `benchmarks.full_size`.
"""

import json
from pathlib import Path

import pytest
from diffusers import AutoencoderKL

from benchmarks.full_size import EMBEDDED, MODELS, configured
from genrl.config import load
from genrl.diffusion.train import train

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {recipe: name for name, model in MODELS.items() for recipe in model.recipes if recipe not in EMBEDDED}
RECIPES["sdxl_dpo_offline"] = "sdxl"  # at full size it would be refused: random autoencoders do not return pictures

ELSEWHERE = {
    "sdxl_diff_instruct": "tests/diffusion/methods/test_diff_instruct_models.py",
    "flux1_dev_prompt_rl": "tests/diffusion/policy/test_seeing_rewriter.py",
    "flux1_kontext_prompt_rl": "tests/diffusion/policy/test_seeing_rewriter.py",
    "qwen_image_edit_talk2move_rotate": "tests/diffusion/methods/test_talk2move.py",
    "qwen_image_edit_talk2move_sft": "tests/diffusion/methods/test_talk2move.py",
}
"""Rehearsed with more of what is theirs: recipe -> by which tests."""
TINY = {"flux2_klein_4b": ("sampling.pipeline_args.text_encoder_out_layers=[1, 2]",)}
"""What the tiny networks need: theirs has two layers, of which the published one reads three."""


def test_every_recipe_for_a_published_model_is_rehearsed() -> None:
    files = (ROOT / "configs/diffusion").glob("*.yaml")
    result = {path.stem for path in files if not load(path).model.path.startswith("assets/")}
    assert result == set(RECIPES) | set(ELSEWHERE)
    assert all(recipe in (ROOT / file).read_text() for recipe, file in ELSEWHERE.items())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_an_iteration(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name = RECIPES[recipe]
    model, pixels = MODELS[name], 32 if name.startswith("sd") else 64  # the most that tiny SD3 has places for
    pipe = model.tiny().pipe
    if recipe == "sdxl_dpo_offline":
        pipe.register_modules(vae=AutoencoderKL.from_pretrained(ROOT / "assets/tiny-sd", subfolder="vae"))
    pipe.save_pretrained(tmp_path / "pipeline")
    further = ["model.quantize=null", *TINY.get(name, ())]
    train(configured(model, recipe, tmp_path / "pipeline", tmp_path / "run", pixels, further))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["updates"] >= 1 and rows[-1]["grad_norm"] > 0
