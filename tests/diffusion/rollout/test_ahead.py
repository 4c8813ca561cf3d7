"""Samples that earlier weights drew: which, what is learned from them; and that it is one run, whoever draws them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.diffusion.steps import transitions
from genrl.diffusion.train import train
from genrl.runtime.folder import checkpoint
from tests.diffusion import runs
from tests.diffusion.rollout import far_here
from tests.run_folders import tiered

pytestmark = pytest.mark.usefixtures("unproven")

SAMPLING = {"num_inference_steps": 4, "guidance_scale": 2.0, "prompts_per_iteration": 3, "group_size": 2}
GRPO = {"algorithm": "flow_grpo", "clip_range": 1e-2, "kl_weight": 0.01, "updates_per_iteration": 2}
METHODS: dict[str, dict[str, Any]] = {
    "window": {**GRPO, "window": {"size": 2, "low": 0, "high": 3, "schedule": "random"}},
    "grpo_guard": {"algorithm": "grpo_guard", "updates_per_iteration": 2},
    "diffusion_nft": {"algorithm": "diffusion_nft", "old_policy_decay": "ramp", "updates_per_iteration": 2},
}


def changes(name: str, staleness: int = 1, **further: Any) -> dict[str, Any]:
    common = {"evaluation": {"every": 0}, "checkpoint": {"every": 1, "keep": 5}}
    sampling = SAMPLING | {"staleness": staleness}
    return {"trainer": METHODS[name], "sampling": sampling, "iterations": 4, **common, **further}


@pytest.mark.parametrize("name", tiered(METHODS, ("window",)))
def test_one_run_whoever_draws_and_wherever_it_stops(folder: Path, model: Path, name: str, monkeypatch: Any) -> None:
    """Drawn here when it is needed, and there ahead of time, in one go and resumed after the second iteration."""
    staleness = 1 if name == "diffusion_nft" else 2
    here = train(runs.config(folder, model, output=str(folder / "here"), **changes(name, staleness)))
    far_here.install(monkeypatch)
    more = changes(name, staleness, engine=far_here.ENGINE)
    far = train(runs.config(folder, model, output=str(folder / "far"), **more))
    assert runs.differences(here, far) == []
    rows = runs.rows(far)
    assert [row["staleness"] for row in rows] == [float(min(k, staleness)) for k in range(4)]
    assert runs.differences(far, runs.resumed(far, folder, 2)) == []
    kept = runs.last_state(far).tensors["kept-drawing"]
    assert {key.split("/")[0] for key in kept} == {str(k) for k in range(3 - staleness, 4)}
    if name != "diffusion_nft":  # what was drawn by the present weights has no weight; later ones are near 1
        assert "importance/mean" not in rows[0]
        assert all(0 < row["importance/max_abs_dev"] < 0.5 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "diffusion_nft"])
def test_weights_that_stand_still(folder: Path, model: Path, name: str) -> None:
    """At a rate of 0 all versions are one: the run without staleness, and every weight exactly 1."""
    still = [changes(name, k, optimizer={"lr": 1e-30}, output=str(folder / str(k))) for k in (0, 2)]
    new, old = (runs.rows(train(runs.config(folder, model, **keys))) for keys in still)
    for ours, theirs in zip(new, old, strict=True):
        shared = {key for key in ours if "calls" not in key}
        assert {key: theirs.get(key) for key in shared} == {key: ours[key] for key in shared}
    if name == "window":
        assert [row["importance/max_abs_dev"] for row in old[-3:]] == [0.0] * 3


def test_the_samples_are_those_of_the_earlier_weights(folder: Path, model: Path, monkeypatch: Any) -> None:
    """Replayed by those of the checkpoint before, log-probabilities come back to the bit; by the present ones not."""
    seen: list[float] = []
    collect = transitions.collect

    def watched(run: Any, *given: Any) -> Any:
        rollouts = collect(run, *given)
        trajectory = next(iter(rollouts.mine.values())).pieces[0].trajectory
        step, recorded = next(iter(trajectory.log_probs.items()))

        def apart() -> float:
            return float((run.policy.replay(trajectory.step(step)).log_prob - recorded).abs().max())

        with torch.no_grad(), run.policy.uncounted():
            if run.iteration:
                before = checkpoint.load(run.process.run.checkpoints / f"step-{run.iteration:06d}")
                values = before.tensors["kept-drawing"]
                with run.weights.lent({key: values[f"{run.iteration - 1}/{key}"] for key in run.weights.named}):
                    seen.append(apart())
                assert apart() > 0
        return rollouts

    monkeypatch.setattr("genrl.diffusion.methods.flow_grpo.train.collect", watched)
    train(runs.config(folder, model, **changes("window", 1)))
    assert seen == [0.0] * 3
