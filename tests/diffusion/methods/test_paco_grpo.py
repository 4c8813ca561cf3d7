"""PaCo-GRPO by settings: pictures of a prompt judged in pairs, one drawn step, trained small and evaluated large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.data.prompts import Prompt
from genrl.diffusion.config.schema import Config
from genrl.diffusion.evaluate import same_prompt
from genrl.diffusion.methods.paco_grpo.train import log_tame_advantages
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.methods.watched import run

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

PACO = {
    "algorithm": "paco_grpo",
    "window": {"size": 1, "low": 1, "high": 2},
    "aggregate": "log_tame",
    "advantage_scale": "global",
}
CLOSENESS = '''\
from pathlib import Path


def closeness(images, pairs):
    """1 less the difference of mean brightness."""
    with Path(__file__).with_name("sizes.txt").open("a") as file:
        file.write(f"{tuple(images.shape)}\\n")
    light = images.mean(dim=(1, 2, 3)).tolist()
    return [1 - abs(light[i] - light[j]) for i, j in pairs]
'''


def config(folder: Path, model: Path, **changes: Any) -> Config:
    (folder / "pairs.py").write_text(CLOSENESS, encoding="utf-8")
    judges = [runs.reward(folder, "brightness"), {"name": f"{folder}/pairs.py:closeness", "weight": 0.5}]
    evaluation = {"every": 2, "num_prompts": 2, "group_size": 3, "height": 32, "width": 32}
    sampling = {"num_inference_steps": 4, "group_size": 3, "batch_size": 2, **changes.pop("sampling", {})}
    evaluation |= changes.pop("evaluation", {})
    return runs.config(folder, model, trainer=PACO, rewards=judges, evaluation=evaluation, sampling=sampling, **changes)


def test_one_step_is_trained_on_the_tamed_sum(folder: Path, model: Path) -> None:
    """The one drawn step, with advantages of the log-tamed sum of both rewards over all samples."""
    changes: dict[str, Any] = {"iterations": 1, "evaluation": {"every": 0}}
    seen = run(config(folder, model, **changes))
    rollouts = seen.rollouts[0]
    bright, close = (rollouts.scored.values[label] for label in ("brightness", "closeness"))
    for group in (0, 1):
        mine = bright[3 * group : 3 * group + 3]
        others = [sum(1 - abs(float(a - b)) for b in mine) / 2 - 0.5 for a in mine]  # without the pair with itself
        assert close[3 * group : 3 * group + 3].tolist() == pytest.approx(others, abs=1e-6)
    tamed = log_tame_advantages([bright, close], [1.0, 0.5], rollouts.group, variant="paper", scale="global")
    for piece in seen.updates[0].pieces:
        slots = [key[-1] for key in piece.batch.keys]
        assert int(piece.given["step"]) == 1
        assert torch.equal(piece.given["advantage"], tamed[slots].clamp(-5, 5))


def test_it_is_trained_small_and_judged_large_in_groups(folder: Path, model: Path) -> None:
    """Pictures of 16 pixels in groups of 3 while training, of 32 in the evaluation, where pairs have a score, too."""
    rows = runs.rows(train(config(folder, model, iterations=2)))
    assert set((folder / "sizes.txt").read_text().splitlines()) == {"(3, 3, 16, 16)", "(3, 3, 32, 32)"}
    assert rows[1]["model_calls/train"] == 6 and rows[1]["model_calls/sample"] == 24
    for row in (rows[0], rows[-1]):
        assert 0 < row["eval/closeness_mean"] <= 1 and row["eval/closeness_failed"] == 0
        total = row["eval/brightness_mean"] + 0.5 * row["eval/closeness_mean"]
        assert row["eval/total_mean"] == pytest.approx(total)


def test_alone_a_picture_has_no_pairs(folder: Path, model: Path) -> None:
    rows = runs.rows(train(config(folder, model, iterations=1, evaluation={"group_size": 1, "every": 1})))
    assert rows[0]["eval/closeness_mean"] is None and rows[0]["eval/closeness_failed"] == 2


def test_rows_of_one_prompt_are_a_group() -> None:
    """The same line of the file, not the same words in two lines (of other source pictures, for one)."""
    a, b, c = Prompt("a", {}, 1), Prompt("b", {}, 2), Prompt("a", {}, 3)
    assert same_prompt([a, a, b, b, c, c]) == [0, 0, 2, 2, 4, 4]
