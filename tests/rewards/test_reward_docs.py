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

import genrl_rewards
from genrl.diffusion.config.schema import Config
from genrl_rewards.built_in import BUILT_IN
from genrl_rewards.scorers.preference.clipscore import SCALES as CLIP_SCALES
from genrl_rewards.scorers.preference.pickscore import SCALES as PICK_SCALES
from genrl_rewards.scorers.texts.ocr import VARIANTS


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_example_in_the_page_is_the_file(root: Path) -> None:
    example = (root / "docs" / "example_reward.py").read_text(encoding="utf-8")
    assert example in blocks(root / "docs" / "rewards.md", "python")
    assert len(example.splitlines()) <= 15


def test_the_example_runs_as_the_page_names_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (entry,) = yaml.safe_load(blocks(root / "docs" / "rewards.md", "yaml")[0])["rewards"]
    reward = genrl_rewards.load(entry["name"])
    images = torch.zeros(3, 3, 8, 8)
    images[0, 0], images[1, 2] = 1, 1
    scores = genrl_rewards.score(reward, images=images, prompts=["a fire", "a fire", "a blue sea"])
    assert scores.values[:2] == [1.0, 0.0] and math.isnan(scores.values[2]) and scores.failed == 0


def test_every_yaml_of_the_page_is_a_configuration(root: Path) -> None:
    base = {"model": {"path": "org/name"}, "prompts": {"train": "t.txt"}, "evaluation": {"every": 0}}
    base |= {"trainer": {"algorithm": "diffusion_nft"}}
    for block in blocks(root / "docs" / "rewards.md", "yaml"):
        assert Config.model_validate(base | yaml.safe_load(block)).rewards


def test_every_built_in_with_its_options_and_scales_is_on_the_page(root: Path) -> None:
    page = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    asked = {*VARIANTS, *CLIP_SCALES, *PICK_SCALES}
    for name, entry in BUILT_IN.items():
        assert f"| `{name}` |" in page
        target = vars(importlib.import_module(entry.module))[entry.attribute]
        given = {"device"} if inspect.isclass(target) else {"device", "images", "prompts"}
        asked |= inspect.signature(target).parameters.keys() - given
    assert [word for word in asked if f"`{word}`" not in page and f"`{word}:" not in page] == []
