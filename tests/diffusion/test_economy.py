"""Runs of pipelines that train on some samples of each group."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError, load
from genrl.diffusion.before import sizes
from genrl.diffusion.config.estimate import plan
from genrl.diffusion.config.schema import Config
from genrl.diffusion.rollout.rollout import downsampled
from genrl.diffusion.steps.plans import Steps
from genrl.diffusion.steps.transitions import collect
from genrl.diffusion.train import train
from genrl.objectives.credit import max_variance
from tests.diffusion import runs
from tests.run_folders import assert_resumes

pytestmark = pytest.mark.usefixtures("unproven")

SAMPLING = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 4}
NFT = {"algorithm": "diffusion_nft", "kl_weight": 1e-3, "updates_per_iteration": 2}
GRPO = {"algorithm": "flow_grpo", "window": {"size": 1, "low": 0, "high": 2}, "updates_per_iteration": 2}


def config(folder: Path, model: Path, /, **changes: Any) -> Config:
    return runs.config(folder, model, **{"sampling": SAMPLING, **changes})


@pytest.mark.parametrize("trainer", [GRPO, NFT], ids=["flow_grpo", "diffusion_nft"])
def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    both = config(folder, model, economy={"keep": 2}, trainer=trainer, output=str(folder / "whole"))
    assert_resumes(train, both, folder)
    first, second = runs.rows(folder / "whole")[1:]
    if trainer is GRPO:
        assert first["model_calls/train"] == second["model_calls/train"] == plan(both).train_calls
        assert plan(both).train_calls == plan(config(folder, model, trainer=trainer)).train_calls / 2


@pytest.mark.parametrize("window", [None, {"size": 1, "low": 1, "high": 2}], ids=["all steps", "window"])
def test_kept_samples_are_the_recorded_ones(folder: Path, model: Path, window: Any) -> None:
    """Their states, actions and log-probabilities to the bit; the others are in no update and in no statistic."""
    trainer = {"algorithm": "flow_grpo", "window": window, "updates_per_iteration": 2}
    with runs.opened(config(folder, model, trainer=trainer)) as run:
        settings = run.settings
        whole = collect(run, settings, Steps.of(run.config, settings, 0))
        some = downsampled(whole, 2)
        kept = max_variance(whole.total.view(2, 4), 2).flatten()
        assert torch.equal(some.total.isnan(), ~kept) and torch.equal(some.total[kept], whole.total[kept])
        trained = [slot for _, slots in some.updates() for slot in slots]
        assert trained == [slot for slots in whole.slots for slot in slots if kept[slot]]
        for position, part in some.mine.items():
            full = whole.mine[position]
            rows = [full.slots.index(slot) for slot in part.slots]
            assert len(rows) == 2 and part.batch.keys == [full.batch.keys[r] for r in rows]
            assert torch.equal(part.final, full.final[rows]) and torch.equal(part.images, full.images[rows])
            for piece in part.pieces:
                recorded, mine = next(p for p in full.pieces if p.slots.keys() == piece.slots.keys()), piece.trajectory
                for i, slots in piece.slots.items():
                    rows = [recorded.slots[i].index(slot) for slot in slots]
                    assert torch.equal(mine.states[i], recorded.trajectory.states[i][rows])
                    assert torch.equal(mine.log_probs[i], recorded.trajectory.log_probs[i][rows])
                    assert (run.policy.replay(mine.step(i)).log_prob - mine.log_probs[i]).abs().max() < 1e-5


def test_smaller_micro_batches_hold_whole_groups_too(folder: Path, model: Path) -> None:
    """As they are taken where memory runs out, or by sampling.fit_batch."""
    several = {"sampling": {**SAMPLING, "batch_size": 8}, "trainer": {**GRPO, "updates_per_iteration": 1}}
    assert sizes(config(folder, model, economy={"keep": 2}, **several)) == [8, 4]
    assert sizes(config(folder, model, **several)) == [8, 4, 2, 1]
    config(folder, model, trainer=NFT, economy={"keep": 2}, model={"dtype": "bfloat16"})  # replays nothing


PICTURES = {
    "model": {"path": "org/name"},
    "prompts": {"train": "a.txt", "eval": "b.txt"},
    "rewards": [{"name": "shapes"}],
    "trainer": {"algorithm": "flow_grpo"},
}
GRAPH = {"algorithm": "flow_grpo", "keep_graph": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"economy": {"keep": 8}}, "so none is left out; write 4"),
        ({"economy": {"keep": 4}, "sampling": {"batch_size": 12}}, "whole groups of 8; use 16"),
        ({"economy": {"keep": 4}, "trainer": {"algorithm": "dgpo"}}, "dgpo reads whole groups"),
        ({"economy": {"keep": 4}, "trainer": GRAPH}, "keep_graph: false"),
        ({"economy": {"keep": 4}, "kernels": {"compile": True}}, "by another graph; write false"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(json.dumps({**PICTURES, **changes}))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "a.yaml")
    assert len(caught.value.problems) == 1 and words in str(caught.value), str(caught.value)
