"""Trees and windows as settings of Flow-GRPO: what a run draws, what it costs, what its gradient is."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from genrl.config.method import code_of
from genrl.diffusion.config import estimate
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.dynamic_tree_rpo import train as dynamic_tree_rpo
from genrl.diffusion.methods.dynamic_tree_rpo.train import progress_table
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Edges, Steps
from genrl.diffusion.steps.transitions import actions_of
from genrl.diffusion.train import train
from genrl.mdp.tree import Tree
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import QUIET, run
from tests.run_folders import tiered

GRPO = {"algorithm": "flow_grpo", "clip_range": 1e-3}
TREE_RPO = {"algorithm": "dynamic_tree_rpo", "tree": {"ways": 8}}
EIGHT = {"num_inference_steps": 5, "prompts_per_iteration": 2, "group_size": 8, "batch_size": 6}


def config(folder: Path, model: Path, trainer: dict[str, Any], **changes: Any) -> Config:
    sampling = EIGHT | changes.pop("sampling", {})
    changes = {**QUIET, "iterations": 1, **changes}
    return runs.config(folder, model, trainer=GRPO | trainer, sampling=sampling, **changes)


SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"window": {"size": 2, "schedule": "progressive", "every": 1}},
    "splits": {"tree": {"ways": 2, "at": [0, 1, 3], "spread": 4.0}},
    "backward": {
        "window": {"size": 3, "schedule": "backward", "shortest": 1},
        **{"noise_outside_window": True, "tree": {"ways": 4, "contrast": True}},
    },
    "tree_and_tail": {"window": {"size": 1, "high": 1}, "tree": {"ways": 8}, "tail_ratio": 0.5},
    "sliding_prune": {"tree": {"ways": 2, "at": [0], "prune": {"depths": [3, 4], "slide_every": 1}}},
    "kl": {"tree": {"ways": 4, "at": [1]}, "kl_weight": 0.01, "inner_epochs": 2},
    "growing": {
        "algorithm": "dynamic_tree_rpo",
        **{"window": {"size": 3, "schedule": "progressive", "every": 1}, "tree": {"ways": 2, "at": "window"}},
        "layer_tuning": {"target": "best_image"},
    },
}


@pytest.mark.parametrize("name", tiered(SETTINGS, ("splits", "sliding_prune")))
def test_model_calls_are_those_of_the_estimate(folder: Path, model: Path, name: str) -> None:
    """Over all iterations of a run; those of `genrl check` and `genrl plan`. Trees are guided, in training or not."""
    guided: dict[str, Any] = {"guidance_scale": 4.5} if name.startswith("tree") else {}
    trainer = SETTINGS[name] | ({"guidance_in_training": False} if name == "tree_and_tail" else {})
    actual = config(folder, model, trainer, iterations=3 if name == "sliding_prune" else 2, sampling=guided)
    expected = estimate.plan(actual, estimate.read_components(model))
    rows = runs.rows(train(actual))
    assert sum(row["model_calls/sample"] for row in rows) == pytest.approx(len(rows) * expected.sample_calls)
    assert sum(row["model_calls/train"] for row in rows) == pytest.approx(len(rows) * expected.train_calls)
    for iteration, row in enumerate(rows):
        steps = Steps.of(actual, actual.trainer, iteration)  # type: ignore[arg-type]
        assert row["model_calls/sample"] == 2 * steps.plan.calls * (2 if guided else 1)
        assert row["ratio/max_abs_dev"] == 0.0 or "kl" in row  # a second epoch is off-policy
        assert row["window/size"] == len(steps.trained)


B2 = {"kernel": "ddim", "noise_level": 1.0, "noise_outside_window": True, "tree": {"ways": 8, "contrast": True}}
B2["window"] = {"size": 3, "high": 3, "schedule": "backward", "shortest": 2}


def test_the_last_step_of_ddim_is_trained_where_it_has_noise(folder: Path, sd: Path) -> None:
    """As theirs (B2-DiffuRL); its calls are those of the estimate, and its log-probabilities replay."""
    actual = config(folder, sd, B2, iterations=2, sampling={"num_inference_steps": 3, "pipeline_args": {}})
    expected = estimate.plan(actual, estimate.read_components(sd))
    rows = runs.rows(train(actual))
    assert [row["window/size"] for row in rows] == [2, 3]
    assert sum(row["model_calls/sample"] for row in rows) == 2 * expected.sample_calls
    assert all(row["ratio/max_abs_dev"] == 0 and row["grad_norm"] > 0 for row in rows)
    # a schedule of DDIM that ends at alpha-bar 1
    pipe = FAMILIES["sd15"]().pipe
    pipe.scheduler.register_to_config(set_alpha_to_one=True)
    pipe.save_pretrained(folder / "sd15")
    actual = config(folder, folder / "sd15", B2, sampling={"num_inference_steps": 3, "pipeline_args": {}})
    with pytest.raises(ValueError, match=r"window.high: .* ends at alpha-bar 1, so its last step has no noise; use 2"):
        run(actual)


class Supervised(NamedTuple):
    """What the samples of the first iteration learn beside the policy gradient, before its update."""

    tree: Tree
    edges: Edges
    targets: dynamic_tree_rpo.Targets
    rollouts: Rollouts
    run: DiffusionRun


def supervised(folder: Path, model: Path, target: str) -> Supervised:
    trainer = {**TREE_RPO, "window": {"size": 2, "low": 1, "high": 3}, "layer_tuning": {"target": target}}
    settings = config(folder, model, trainer, optimizer={"lr": 1e-12})
    result: list[Supervised] = []
    made = dynamic_tree_rpo.best_targets

    def kept(run: DiffusionRun, chosen: Any, rollouts: Rollouts, tree: Tree, edges: Edges) -> Any:
        result.append(Supervised(tree, edges, made(run, chosen, rollouts, tree, edges), rollouts, run))
        return result[-1].targets

    with runs.opened(settings) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_tree_rpo, "best_targets", kept)
        code_of(settings.trainer).train(opened, settings.trainer)
    return result[0]


def test_samples_learn_the_velocity_on_the_best_path(folder: Path, model: Path) -> None:
    tree, edges, targets, rollouts, run = supervised(folder, model, "best_path")
    best = rollouts.total.view(2, 8).argmax(1)
    short, seen = progress_table(tree, rollouts.total), 0
    every = actions_of(run, run.config.trainer, rollouts, edges).values()  # type: ignore[arg-type]
    for action in (action for actions in every for action in actions):
        i, slots = action.step, action.piece.slots[action.step]
        with torch.no_grad():
            outputs = run.policy.replay(action.piece.trajectory.step(i)).model_output
        aims = dynamic_tree_rpo.target_of(action, targets, 8)
        for row, slot in enumerate(slots):
            if slot % 8 == best[slot // 8]:
                torch.testing.assert_close(aims[row], outputs[row], rtol=1e-4, atol=1e-5)
                same = [k for k, other in enumerate(slots) if other // 8 == slot // 8]
                assert all(torch.equal(aims[k], aims[row]) for k in same)
                seen += 1
                assert float(short[i, slot]) == 0.0  # it does not fall short of itself
    assert seen == 4  # two groups, two steps


def test_samples_learn_what_leads_to_the_best_image(folder: Path, model: Path) -> None:
    _, edges, targets, rollouts, run = supervised(folder, model, "best_image")
    best = rollouts.total.view(2, 8).argmax(1)
    (only,) = rollouts.mine.values()
    finals = dict(zip(only.slots, only.final, strict=True))
    for actions in actions_of(run, run.config.trainer, rollouts, edges).values():  # type: ignore[arg-type]
        for action in actions:
            i, trajectory = action.step, action.piece.trajectory
            rows, aims = trajectory.step(i).rows, dynamic_tree_rpo.target_of(action, targets, 8)
            for k, (slot, aim) in enumerate(zip(action.piece.slots[i], aims, strict=True)):
                state = trajectory.states[i][k if rows is None else int(rows[k])]
                picture = finals[int(slot // 8 * 8 + best[slot // 8])]
                torch.testing.assert_close(state - float(trajectory.sigmas[i]) * aim, picture, atol=1e-5, rtol=0)
