"""The diversity of a finished run is what its own evaluations would have logged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import diversity
from benchmarks.claims import plan
from genrl.config import load
from genrl.diffusion.train import train
from genrl.runtime.folder.run import Run, read_metrics


def test_distance_by_hand() -> None:
    images = torch.zeros(3, 3, 2, 2)
    images[1, 0] = 1  # a third of the numbers: sqrt(1 / 3) from the others, which are alike
    assert diversity.distance(images) == pytest.approx(2 / 3 * 3**-0.5)
    assert diversity.distance(torch.tensor([[[0.0]], [[1.0]]])) == 1


SMALL = (
    *("iterations=1", "sampling.prompts_per_iteration=2", "sampling.batch_size=2", "optimizer.lr=0.03", "trackers=[]"),
    *("evaluation.num_prompts=3", "evaluation.group_size=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [("flow_grpo", ("ema={decay: 0.5}",)), ("prompt_rl", ())])
def test_as_the_run_evaluates(
    name: str, changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diversity, "PROMPTS", 3)
    monkeypatch.setattr(diversity, "PICTURES", 2)
    method = plan.read().recipes[f"pipelines/{name}"]
    rewards = [reward.model_dump(mode="json", exclude_defaults=True) for reward in load(method.config).rewards]
    rewards.append({"name": "benchmarks/diversity.py:diversity", "weight": 0})
    config = load(method.config, [*SMALL, *changes, f"rewards={json.dumps(rewards)}", f"output={tmp_path / 'run'}"])
    train(config)
    run = Run(tmp_path / "run")
    logged = [row[f"{method.evaluation}/diversity_mean"] for row in read_metrics(run.metrics)]
    assert logged[0] != pytest.approx(logged[1], abs=1e-4)
    assert diversity.measure(run, method.evaluation) == pytest.approx(logged, abs=1e-5)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ValueError, match="no checkpoint of iteration 1"):
        diversity.measure(run, method.evaluation)
