"""What a run of a published policy holds, from names and shapes alone: against the classes, and measured peaks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genrl import recipes
from genrl.config import load
from genrl.vla.config.memory_estimate import Known, in_folder, memory, published
from genrl.vla.config.schema import VLAConfig
from genrl.vla.policies.folder import load_policy
from genrl.vla.setup import choose_trained
from tests.cli.commands import run
from tests.vla.published_runs import MADE

TABLE = "environment={name: minitable, num_envs: 64, chunk: 5, max_steps: 5, group_size: 8}"
CAMERA = {"input_features": {"observation.images.image": {"type": "VISUAL"}}}


def recipe(name: str, *changes: str) -> VLAConfig:
    config = load(recipes.find(name).file, list(changes))
    assert isinstance(config, VLAConfig)
    return config


def known(config: VLAConfig) -> Known:
    result = published(config.policy.path or "")
    assert result is not None
    return result


def test_every_policy_that_a_recipe_names_is_known_by_its_size() -> None:
    sizes = {"pi0_libero": 3.501, "pi05_libero": 3.617, "smolvla_libero": 0.450, "groot_libero": 3.144}
    sizes["openvla_oft_libero"] = 7.541
    for name, billions in sizes.items():
        assert sum(map(math.prod, known(recipe(name)).shapes.values())) / 1e9 == pytest.approx(billions, rel=1e-3)
    named = {one.values["policy"].get("path") for one in recipes.recipes() if "policy" in one.values}
    assert not [path for path in named if path and not path.startswith(("assets/", "runs/")) and not published(path)]
    assert published("org/unknown") is None


@pytest.mark.parametrize("lora", ["null", "{rank: 4}"])
@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla", "groot"])
def test_what_is_trained_is_what_the_class_trains(kind: str, lora: str, tmp_path: Path) -> None:
    """Numbers and bytes, of the tiny policies in the published layout."""
    MADE[kind](tmp_path)
    config = recipe("pi0_libero", f"policy.path={tmp_path}", f"policy.lora={lora}", "policy.dtype=bfloat16")
    policy, result = load_policy(tmp_path), in_folder(tmp_path)
    choose_trained(config, policy)
    assert result is not None
    parameters = list(policy.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    held = sum(one.numel() * one.element_size() for one in parameters if not one.requires_grad)
    parts = dict(memory(config, result))
    name = "weights that are trained (float32)" if lora == "null" else "adapters"
    assert parts[name] == 4 * trained == parts["gradients"]
    assert parts["weights that are not trained"] == held


def test_measured_peaks_and_that_the_stored_estimate_is_the_present_one(root: Path) -> None:
    """Stored by benchmarks/full_size_policies.py: one iteration each in a process of its own, within 15 %."""
    measured = json.loads((root / "benchmarks/results/full_size_policies.json").read_text())["found"]
    rows = {name: row for name, row in measured.items() if "estimate_bytes" in row}
    assert rows.keys() >= {"smolvla", "pi05"}
    for name, row in rows.items():
        assert row["estimate_bytes"] == pytest.approx(row["peak_bytes"], rel=0.15), name
    small = [f"trainer.{key}=2" for key in ("minibatch", "microbatch")] + ["policy.dtype=float32", "evaluation.every=0"]
    config = recipe("smolvla_libero", TABLE, "environment.num_envs=2", "environment.group_size=1", *small)
    policy = known(config)
    one = replace(policy, settings=policy.settings | CAMERA | {"tokenizer_max_length": 12})
    estimate = sum(size for _, size in memory(config, one))
    assert estimate == pytest.approx(rows["smolvla"]["estimate_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("pi05", 40), ("pi0", 40), ("smolvla", 12), ("openvla_oft", 24), ("groot", 80)]
)
def test_check_names_cards_without_a_policy_on_the_machine(name: str, gigabytes: int, monkeypatch: Any) -> None:
    """And why there are none, and which keys to change."""
    monkeypatch.setenv("COLUMNS", "200")
    file = str(recipes.find(f"{name}_libero").file)
    text = run("check", file, TABLE)
    assert re.search(rf"│ {gigabytes} GB .* yes", text) and "weights that are not trained" in text
    assert "not checked: weights and licence of" in text and "; memory" not in text.partition("\nnot checked: ")[2]
    if name == "pi05":
        unknown = run("check", file, TABLE, "policy.path=org/unknown")
        assert "memory: not estimated, because org/unknown is not on this machine" in unknown
        assert "; memory;" in unknown.partition("\nnot checked: ")[2]
        printed = run("check", file, TABLE, "--memory", "24GB")
        assert "policy.dtype=bfloat16" in printed and "it fits with the change above" in printed
        assert "policy.lora.rank=32" in run("check", file, TABLE, "--memory", "8GB")
