"""Networks of published pipelines that travel with the package, against their classes and what was published."""

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel

from genrl import recipes
from genrl.config import load
from genrl.diffusion.config.estimate import plan, published
from genrl.diffusion.config.memory_estimate import memory
from genrl.diffusion.config.schema import Config

BILLIONS = {  # of the model cards, and of the sizes of the published files
    "stable-diffusion-v1-5/stable-diffusion-v1-5": {"unet": 0.86, "safety_checker": 0.304},
    "stabilityai/stable-diffusion-xl-base-1.0": {"unet": 2.57, "text_encoder_2": 0.695},
    "stabilityai/stable-diffusion-3.5-medium": {"transformer": 2.47, "text_encoder_3": 4.76},
    "stabilityai/stable-diffusion-3.5-large-turbo": {"transformer": 8.1},
    "black-forest-labs/FLUX.1-dev": {"transformer": 11.9, "text_encoder_2": 4.76},
    "black-forest-labs/FLUX.2-klein-4B": {"transformer": 3.88, "text_encoder": 4.02},
    "Qwen/Qwen-Image": {"transformer": 20.4, "text_encoder": 8.29},
    "Tongyi-MAI/Z-Image-Turbo": {"transformer": 6.15},
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"transformer": 1.42, "text_encoder": 5.68, "vae": 0.127},
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {"transformer": 14.3, "transformer_2": 14.3},
}


def test_every_pipeline_that_a_recipe_names_is_known() -> None:
    named = {str(recipe.values["model"]["path"]) for recipe in recipes.recipes() if "model" in recipe.values}
    hub = {path for path in named if not path.startswith("assets/")}
    assert len(hub) > 10 and not [path for path in hub if not published(path)]
    assert published("org/unknown") == ()


@pytest.mark.parametrize("source", BILLIONS)
def test_sizes_are_those_that_were_published(source: str) -> None:
    counts = {part.name: part.num_parameters / 1e9 for part in published(source)}
    for name, billions in BILLIONS[source].items():
        assert counts[name] == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("name", "kind"), [("vae", AutoencoderKL), ("transformer", FluxTransformer2DModel)])
def test_shapes_are_those_of_the_class(name: str, kind: type) -> None:
    part = next(part for part in published("black-forest-labs/FLUX.1-dev") if part.name == name)
    with torch.device("meta"):
        made = kind(**{key: value for key, value in part.settings.items() if key != "force_upcast"})
    assert part.shapes == {key: tuple(tensor.shape) for key, tensor in made.state_dict().items()}
    assert part.num_parameters == sum(math.prod(shape) for shape in part.shapes.values())


def test_the_estimate_is_the_one_of_the_whole_model(root: Path) -> None:
    """Part by part that of folders with headers of all weights, which benchmarks/flux_memory.py had made."""
    measured = json.loads((root / "benchmarks/results/flux_memory.json").read_text())["found"]
    for recipe in ("flux1_dev_flow_grpo", "flux1_dev_24gb"):
        config = load(recipes.find(recipe).file)
        assert isinstance(config, Config)
        found = sum(size for _, size in memory(config, published(config.base)))
        assert found == pytest.approx(sum(measured[recipe].values()), rel=0.01), recipe


def test_guidance_is_an_input_before_the_download_and_evaluations_count_the_prompts_there_are() -> None:
    config = load(recipes.find("flux1_dev_flow_grpo").file)
    assert isinstance(config, Config)
    known, unknown = plan(config, published(config.base)), plan(config)
    assert (known.guidance, unknown.guidance) == (1, 2)
    few = plan(config, published(config.base), 8)
    assert few.evaluation_calls * config.evaluation.num_prompts == 8 * known.evaluation_calls
    assert plan(config, (), 10**6).evaluation_calls == unknown.evaluation_calls


def test_measured_peaks_are_within_15_percent(root: Path) -> None:
    text = (root / "docs/pipelines.md").read_text(encoding="utf-8").partition("## Rehearsed at full size")[2]
    rows = [line.split("|")[1:-1] for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) > 12
    for *_, recipe, peaks, estimates in rows:
        measured, said = ([float(number) for number in cell.split(";")] for cell in (peaks, estimates))
        for number, peak in enumerate(measured):
            assert said[min(number, len(said) - 1)] == pytest.approx(peak, rel=0.15), recipe
