"""Two models on one page: the same noise, which side is which, what rewards say, and what cannot be compared."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

import genrl_rewards
from genrl.data.prompts import Prompt
from genrl.diffusion.compare import compare, is_lora, sides
from genrl.diffusion.rollout.scoring import plain
from genrl.runtime.show.compare.page import Page, key_path
from tests.diffusion import families, runs
from tests.runtime.show.compare import pages

ARGUMENTS: dict[str, Any] = {**runs.CALL, "num_inference_steps": 2}
ROWS = [Prompt("a red star", size={"height": 32}), Prompt("two blue circles"), Prompt("a cat")]


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    pipe = DiffusionPipeline.from_pretrained(model)
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.mul_(1.5)
    pipe.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def shown(out: Path) -> dict[tuple[str, str], list[np.ndarray]]:
    """(prompt, model) -> the pictures of the page, as the key resolves them, darkest first."""
    key, result = json.loads(key_path(out).read_text()), dict[tuple[str, str], list[np.ndarray]]()
    for pair in pages.data(out)["pairs"]:
        left = key["pairs"][pair["token"]]["left"]
        for side, name in (("left", left), ("right", "ab"[left == "a"])):
            result.setdefault((pair["prompt"], name), []).append(pages.picture(pair[side]["url"], out.parent))
    return {name: sorted(pictures, key=lambda p: p.sum()) for name, pictures in result.items()}


def test_both_start_from_the_noise_of_plain_diffusers_and_rewards_score_what_people_see(
    model: Path, other: Path, folder: Path
) -> None:
    """Sample j of prompt k from seed + k * per_prompt + j, alone. One reward looks at a group, which is the pair."""

    def brightest(images: torch.Tensor, group: list[int]) -> list[float]:
        means = images.mean(dim=(1, 2, 3)).tolist()
        assert len(set(group)) == 1 and len(means) == 2
        return [float(value == max(means)) for value in means]

    bright = genrl_rewards.load(f"{folder}/rewards.py:brightness")
    out = folder / "compare.html"
    page = Page(out, question="")
    first, second = sides(str(model), str(other), None, None, ARGUMENTS)
    scorers = [plain({"bright": bright, "brightest": brightest})]
    compare(first, second, ROWS, page, scorers, seed=7, per_prompt=2)
    page.write({"a": first.described(), "b": second.described()})
    actual, key = shown(out), json.loads(key_path(out).read_text())["pairs"].values()
    assert len(actual) == 6
    for name, path in (("a", model), ("b", other)):
        pipe = DiffusionPipeline.from_pretrained(path)
        for k, row in enumerate(ROWS):
            generators = [torch.Generator().manual_seed(seed) for seed in (7 + 2 * k, 8 + 2 * k)]
            shots = [pipe(prompt=row.text, generator=one, **{**ARGUMENTS, **row.size}).images[0] for one in generators]
            wanted = sorted((np.asarray(picture) for picture in shots), key=lambda p: p.sum())
            assert all(np.array_equal(*two) for two in zip(actual[row.text, name], wanted, strict=True))
    categories = {pair["prompt"]: pair["category"] for pair in key}
    assert categories == {"a red star": "single", "two blue circles": "count", "a cat": None}
    for pair in key:
        a, b = pair["rewards"]["bright"]
        assert pair["rewards"]["brightest"] == [float(a >= b), float(b >= a)]
    for side, name in enumerate("ab"):
        for row in ROWS:
            scores = sorted(pair["rewards"]["bright"][side] for pair in key if pair["prompt"] == row.text)
            means = [float(picture.mean()) / 255 for picture in actual[row.text, name]]
            assert scores == pytest.approx(means, abs=1e-6)


def test_a_run_a_lora_and_their_base(finished: Path, model: Path, tmp_path: Path) -> None:
    """The base is called as the run's evaluations are; so is the run's LoRA, which needs no --model then."""
    base, trained = sides(str(model), str(finished), None, None, {})
    assert base.chosen.arguments == trained.chosen.arguments and base.chosen.arguments["num_inference_steps"] > 0
    assert base.chosen.adapter is None and base.run is None and trained.run is not None
    lora = str(finished / "lora")
    assert is_lora(lora) and not is_lora(str(finished)) and not is_lora(str(model))
    a, b = sides(lora, str(model), None, None, ARGUMENTS)
    assert (a.chosen.adapter, a.chosen.model.path, b.chosen.adapter) == (lora, str(model), None)
    a, _ = sides(lora, str(finished), None, None, {})
    assert a.chosen == trained.chosen._replace(adapter=lora)
    file = str(next((finished / "lora").glob("*.safetensors")))
    a, b = sides(file, lora, str(model), None, ARGUMENTS)
    assert is_lora(file) and (a.chosen.adapter, b.chosen.adapter) == (file, lora)
    with pytest.raises(ValueError, match="is a LoRA, and so is .*: say on which model, --model"):
        sides(file, lora, None, None, {})
    page = Page(tmp_path / "compare.html", question="")
    compare(a, b, ROWS[:2], page)  # a file and its folder are the same LoRA
    assert (len(page), page.identical) == (0, 2)
    with pytest.raises(ValueError, match="made the same samples"):
        page.write({})
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert not is_lora(str(tmp_path / "model.safetensors")) and not is_lora(str(tmp_path / "none.safetensors"))


def test_what_cannot_be_compared(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and the same model, another kind of pipeline, another size (unless one is given), a broken file."""
    large = tmp_path / "large"
    shutil.copytree(model, large)
    file = large / "transformer" / "config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps(own | {"sample_size": 2 * own["sample_size"]}))
    (tmp_path / "lora.safetensors").write_text("no weights")
    monkeypatch.chdir(model.parent)
    for other, says in (
        (f"./{model.name}", "A and B are the same model, .*: give a run"),
        (families.saved("sd15", tmp_path), "A is a StableDiffusion3Pipeline, B a StableDiffusionPipeline: the same"),
        (large, "A makes latents of size .*, B of .*Give --height and --width"),
        (tmp_path / "lora.safetensors", r"lora\.safetensors is no \.safetensors file, or is cut off"),
    ):
        with pytest.raises(ValueError, match=says):
            sides(str(model), str(other), None, None, {})
    sides(str(model), str(large), None, None, ARGUMENTS)
