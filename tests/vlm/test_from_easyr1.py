"""The files of docs/from_easyr1.md: shown as they are, and run on a few rows of their format with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from genrl.config import load
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import tiny_checkpoints, vlm_runs
from tests.vlm.policies.test_token_policy import picture

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("from_trl_geometry3k", "from_easyr1_video", "from_verl_tool")


def file(name: str) -> Path:
    return ROOT / "configs" / "vlm" / f"{name}.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_file(name: str) -> None:
    shown = "\n".join(line for line in file(name).read_text().splitlines() if not line.startswith("#"))
    assert f"```yaml\n{shown}\n```" in (ROOT / "docs" / "from_easyr1.md").read_text()


def data(place: Path, columns: dict[str, Any], pictures: int) -> str:
    """Four questions whose pictures are in the second column, and their answers."""
    place.mkdir()
    (prompt, image), lines = columns.items(), []
    for number in range(4):
        names = [f"{number}-{k}.png" for k in range(pictures)]
        for k, one in enumerate(names):
            picture(10 * number + k, 24, 20).save(place / one)
        answer = ("2 \\sqrt{221}", "\\frac{1}{2}", "5", "37")[number] if pictures == 1 else "ABCD"[number]
        asked = f"{'<image>' if pictures == 1 else 'See <video>. '}Question {number}?"
        lines.append(json.dumps({prompt[1]: asked, image[1]: names, "answer": answer}))
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return str(place / "rows.jsonl")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_rows_of_its_format(name: str, tmp_path: Path) -> None:
    tree = yaml.safe_load(file(name).read_text())
    tree["vlm"] |= {"dtype": "float32"}
    if "task" in tree:
        tree["vlm"]["path"] = str(tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model"))
        columns = {key: tree["task"][key] for key in ("prompt", "image", "video") if tree["task"].get(key)}
        for part in ("train", "eval"):
            tree["task"][part] = data(tmp_path / part, columns, 3 if name == "from_easyr1_video" else 1)
        tree["rewards"].append(vlm_runs.low(tmp_path))
    else:
        tree["vlm"]["path"] = str(ROOT / "assets" / "tiny-vlm-crop")
    tree["generation"] |= {"prompts_per_iteration": 4, "group_size": 4, "max_new_tokens": 24}
    tree |= {"distributed": {}, "iterations": 1, "trackers": [], "output": str(tmp_path / "run")}
    tree["evaluation"] = {"every": 0, "questions": 4}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tree))
    (row,) = rows(train(load(tmp_path / "tiny.yaml")))
    assert row["grad_norm"] > 0
