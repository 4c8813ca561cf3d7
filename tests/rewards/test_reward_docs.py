"""The documentation's example is the file beside it, and it runs as shown."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

import rewards
from rewards.built_in import BUILT_IN


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_example_in_the_page_is_the_file(root: Path) -> None:
    example = (root / "docs" / "example_reward.py").read_text(encoding="utf-8")
    assert example in blocks(root / "docs" / "rewards.md", "python")
    assert len(example.splitlines()) <= 15


def test_the_example_runs_as_the_page_names_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (entry,) = yaml.safe_load(blocks(root / "docs" / "rewards.md", "yaml")[0])["rewards"]
    reward = rewards.load(entry["name"])
    images = torch.zeros(3, 3, 8, 8)
    images[0, 0], images[1, 2] = 1, 1
    scores = rewards.score(reward, images=images, prompts=["a fire", "a fire", "a blue sea"])
    assert scores.values[:2] == [1.0, 0.0] and math.isnan(scores.values[2]) and scores.failed == 0


def test_every_yaml_of_the_page_is_a_configuration(root: Path) -> None:
    from genrl.config import Config

    base = {"model": {"path": "org/name"}, "prompts": {"train": "t.txt"}, "evaluation": {"every": 0}}
    base |= {"trainer": {"algorithm": "diffusion_nft"}}
    for block in blocks(root / "docs" / "rewards.md", "yaml"):
        assert Config.model_validate(base | yaml.safe_load(block)).rewards


def test_every_built_in_is_in_the_pages_table(root: Path) -> None:
    page = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    for row in rewards.listing():
        if row.origin == "built-in":
            assert f"| `{row.name}` |" in page


def test_the_arguments_of_the_page_are_those_of_the_classes(root: Path) -> None:
    from rewards.scorers.preference.clipscore import SCALES as CLIP_SCALES
    from rewards.scorers.preference.pickscore import SCALES as PICK_SCALES
    from rewards.scorers.texts.ocr import VARIANTS, Ocr

    page = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    for word in [*inspect.signature(Ocr).parameters, *VARIANTS, *CLIP_SCALES, *PICK_SCALES]:
        assert f"`{word}`" in page, word


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_option_of_a_built_in_is_on_the_page(root: Path, name: str) -> None:
    page = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    target = vars(importlib.import_module(BUILT_IN[name].module))[BUILT_IN[name].attribute]
    given = () if inspect.isclass(target) else ("images", "prompts")
    for option in inspect.signature(target).parameters:
        if option not in (*given, "device"):
            assert f"`{option}`" in page or f"`{option}:" in page, option
