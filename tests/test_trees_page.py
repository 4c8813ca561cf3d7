"""docs/trees.md: its configurations load, and its numbers are those of `genrl plan`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from genrl.cli.plan import lines
from genrl.config import ConfigError, load
from genrl.diffusion.config.estimate import plan
from genrl.diffusion.config.schema import Config


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def page(root: Path) -> Path:
    return root / "docs" / "trees.md"


def test_every_yaml_of_the_page_is_a_trainer(page: Path) -> None:
    for block in blocks(page, "yaml"):
        trainer = {"algorithm": "flow_grpo", **yaml.safe_load(block)}
        tree = trainer.get("tree", {"ways": 1, "at": []})
        splits = trainer["window"]["size"] if tree.get("at") == "window" else len(tree["at"]) if tree["ways"] > 1 else 1
        splits = 1 if tree.get("at") == "window_start" else splits
        Config.model_validate(
            {
                "model": {"path": "org/model"},
                "prompts": {"train": "a.txt"},
                "rewards": [{"name": "shapes"}],
                "sampling": {"group_size": max(2, tree["ways"] ** splits)},
                "trainer": trainer,
                "evaluation": {"every": 0},
            }
        )


def test_the_plan_of_the_page_is_what_is_printed(page: Path, root: Path) -> None:
    (command, *text), *_ = [block.splitlines() for block in blocks(page, "text")]
    _, _, _, file, *overrides = command.split()
    assert text == "\n".join(lines(load(root / file, overrides))).splitlines()
    later = [w for w in re.findall(r"`(trainer\.window[^`]*)`", page.read_text())[0].split()]
    assert "ratio 0.450" in "\n".join(lines(load(root / file, later)))


def test_the_table_of_systems_has_the_numbers_of_the_plan(page: Path, root: Path) -> None:
    rows = re.findall(r"\| `([\w./]+\.yaml)` \|.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page.read_text())
    assert len(rows) == 8
    for file, sampling, ratio, training in rows:
        config = load(root / "configs" / "diffusion" / file)
        found = plan(config)
        calls, steps = found.sample_calls / found.images, config.sampling.num_inference_steps
        assert (f"{calls:.2f}", f"{calls / steps:.3f}") == (sampling, ratio), file
        assert f"{found.train_calls / found.images:.2f}" == training, file


def test_the_error_of_the_page_is_what_is_printed(page: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    command, *said = blocks(page, "text")[1].splitlines()
    *_, file, override = command.split()
    with pytest.raises(ConfigError) as refused:
        load(Path(file), [override])
    assert said == str(refused.value).splitlines()
