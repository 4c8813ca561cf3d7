"""Every recipe for a published model, made small, trains an iteration on that model's architecture with tiny networks.

At the published size: `benchmarks.full_size`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.full_size import EMBEDDED, MODELS, configured
from genrl.config import load
from genrl.diffusion.train import train

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {recipe: name for name, model in MODELS.items() for recipe in model.recipes if recipe not in EMBEDDED}


def test_every_recipe_for_a_published_model_is_rehearsed() -> None:
    files = (ROOT / "configs/diffusion").glob("*.yaml")
    assert {path.stem for path in files if not load(path).model.path.startswith("assets/")} == set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_an_iteration(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    model = MODELS[RECIPES[recipe]]
    model.tiny().pipe.save_pretrained(tmp_path / "pipeline")
    train(configured(model, recipe, tmp_path / "pipeline", tmp_path / "run", 64, ["model.quantize=null"]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["updates"] >= 1 and rows[-1]["grad_norm"] > 0
