"""Trees and windows as settings of Flow-GRPO: what a run draws, what it costs, what its gradient is."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from genrl.config import Config, ConfigError, estimate, load
from genrl.config.method import code_of
from genrl.diffusion.methods.dynamic_tree_rpo import train as dynamic_tree_rpo
from genrl.diffusion.methods.edges import Edges, progress_table
from genrl.diffusion.methods.plans import sampling_plan, trained_steps
from genrl.diffusion.methods.transitions import actions_of
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.mdp.tree import Tree
from genrl.runtime.run import Run
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

GRPO = {"algorithm": "flow_grpo", "clip_range": 1e-3}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}
TREE_RPO = {"algorithm": "dynamic_tree_rpo", "tree": {"ways": 8, "noise_growth": 0}}
EIGHT = {"num_inference_steps": 5, "prompts_per_iteration": 2, "group_size": 8, "batch_size": 6}


def config(folder: Path, model: Path, trainer: dict[str, Any], **changes: Any) -> Config:
    sampling = EIGHT | changes.pop("sampling", {})
    return runs.config(
        folder, model, trainer=GRPO | trainer, sampling=sampling, **{**QUIET, "iterations": 1, **changes}
    )


def run(config: Config, prepare: Callable[[DiffusionRun], None] = lambda run: None) -> list[dict[str, Any]]:
    """Train in this process; the metric rows."""
    with runs.opened(config) as run:
        prepare(run)
        code_of(config.trainer).train(run, config.trainer)
    return runs.rows(Path(config.output))


# -- cost ------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {},
    "window": {"window": {"size": 2, "schedule": "progressive", "every": 1}},
    "window_start": {"window": {"size": 2, "schedule": "progressive", "every": 1}, "tree": {"ways": 4}},
    "one_tree": {"window": {"size": 2, "schedule": "decaying", "every": 2}, "tree": {"ways": 8}},
    "window_tree": {
        "window": {"size": 3, "schedule": "progressive", "every": 1},
        "tree": {"ways": 2, "at": "window"},
    },
    "splits": {"tree": {"ways": 2, "at": [0, 1, 3], "spread": 4.0}},
    "window_and_splits": {
        "window": {"size": 1, "low": 2, "high": 4, "schedule": "progressive", "every": 1},
        "tree": {"ways": 2, "at": [0]},
    },
    "backward": {
        "window": {"size": 3, "schedule": "backward", "shortest": 1},
        "noise_outside_window": True,
        "tree": {"ways": 4, "contrast": {"low": 0.0, "high": 0.0}},
    },
    "tail": {"window": {"size": 1, "schedule": "progressive", "every": 1}, "tail_ratio": 0.5},
    "tree_and_tail": {"window": {"size": 1, "high": 1}, "tree": {"ways": 8}, "tail_ratio": 0.5},
    "sliding_prune": {"tree": {"ways": 2, "at": [0], "prune": {"depths": [3, 4], "slide_every": 1}}},
    "kl": {"tree": {"ways": 4, "at": [1]}, "kl_weight": 0.01, "inner_epochs": 2},
    "tree_rpo": {**TREE_RPO, "window": {"size": 2, "schedule": "progressive", "every": 1}},
    "growing": {
        "algorithm": "dynamic_tree_rpo",
        "window": {"size": 3, "schedule": "progressive", "every": 1},
        "tree": {"ways": 2, "at": "window"},
        "layer_tuning": {"target": "best_image"},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_model_calls_are_those_of_the_estimate(folder: Path, model: Path, name: str) -> None:
    """Over all iterations of a run; those of `genrl check` and `genrl plan`."""
    found = config(folder, model, SETTINGS[name], iterations=3)
    expected = estimate.plan(found, estimate.read_components(model))
    rows = run(found)
    assert sum(row["model_calls/sample"] for row in rows) == pytest.approx(3 * expected.sample_calls)
    assert sum(row["model_calls/train"] for row in rows) == pytest.approx(3 * expected.train_calls)
    for iteration, row in enumerate(rows):
        plan = sampling_plan(found, found.trainer, iteration)  # type: ignore[arg-type]
        assert row["model_calls/sample"] == 2 * plan.calls
        assert row["ratio/max_abs_dev"] == 0.0 or "kl" in row  # a second epoch is off-policy
        assert row["window/size"] == len(trained_steps(found, found.trainer, iteration))  # type: ignore[arg-type]


@pytest.mark.parametrize("in_training", [True, False])
def test_guided_calls_are_those_of_the_estimate(folder: Path, model: Path, in_training: bool) -> None:
    trainer = {**TREE_RPO, "window": {"size": 2, "low": 1, "high": 3}, "guidance_in_training": in_training}
    found = config(folder, model, trainer, sampling={"guidance_scale": 4.5})
    expected = estimate.plan(found, estimate.read_components(model))
    (row,) = run(found)
    assert (row["model_calls/sample"], row["model_calls/train"]) == (expected.sample_calls, expected.train_calls)


B2 = {
    "kernel": "ddim",
    "noise_level": 1.0,
    "window": {"size": 3, "high": 3, "schedule": "backward", "shortest": 2},
    "noise_outside_window": True,
    "tree": {"ways": 8, "contrast": {"high": 0.0, "low": 0.0}},
}


def of_noise(folder: Path, final: bool = False) -> Path:
    """A noise-predicting pipeline on disk. final: its schedule ends at alpha-bar 1."""
    pipe = FAMILIES["sd15"]().pipe
    pipe.scheduler.register_to_config(set_alpha_to_one=final)
    pipe.save_pretrained(folder / "sd15")
    return folder / "sd15"


def test_the_last_step_of_ddim_is_trained_where_the_window_reaches_it(folder: Path) -> None:
    """As theirs (B2-DiffuRL); its calls are those of the estimate, and its log-probabilities replay."""
    model = of_noise(folder)
    found = config(folder, model, B2, iterations=2, sampling={"num_inference_steps": 3})
    expected = estimate.plan(found, estimate.read_components(model))
    rows = run(found)
    assert [row["window/size"] for row in rows] == [2, 3]
    assert sum(row["model_calls/sample"] for row in rows) == 2 * expected.sample_calls
    assert all(row["ratio/max_abs_dev"] == 0 and row["grad_norm"] > 0 for row in rows)


def test_a_last_step_without_noise_cannot_be_trained(folder: Path) -> None:
    found = config(folder, of_noise(folder, final=True), B2, sampling={"num_inference_steps": 3})
    with pytest.raises(ValueError, match=r"window.high: .* ends at alpha-bar 1, so its last step has no noise; use 2"):
        run(found)


def test_the_last_step_of_a_flow_is_not_trained(folder: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="the last of 5 steps is never stochastic, so the window must end by 4"):
        config(folder, model, {"window": {"size": 2, "high": 5}})


# -- what is said, what is kept, what is the same --------------------------------------------------------------------


def test_skipped_depths_are_said_once(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two, two and eight states: the first two are measured against the leaves."""
    trainer = {"tree": {"ways": 2, "at": [0, 2, 3], "normalise": "depth"}}
    train(config(folder, model, trainer, iterations=3))
    told = capsys.readouterr().err
    assert told.count("have fewer than 4 states: measured against the leaves") == 1
    assert "depths 1, 2 have fewer" in told


def test_enough_states_are_not_remarked_on(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(folder, model, {"tree": {"ways": 4, "at": [0], "normalise": "depth"}}))
    assert "fewer than 4 states" not in capsys.readouterr().err


def test_groups_without_scores_do_not_stop_a_run_that_prunes(folder: Path, model: Path) -> None:
    (folder / "silent.py").write_text(
        "def silent(images, prompts):\n"
        "    return [None if p != prompts[0] else float(k) for k, p in enumerate(prompts)]\n"
    )
    trainer = {"tree": {"ways": 2, "at": [0, 1], "prune": {"width": "extremes"}}}
    rewards = [{"name": f"{folder}/silent.py:silent"}]
    (row,) = run(config(folder, model, trainer, rewards=rewards))
    assert row["reward/silent_failed"] > 0 and row["grad_norm"] > 0


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
    found: list[Supervised] = []
    made = dynamic_tree_rpo.best_targets

    def kept(run: DiffusionRun, chosen: Any, rollouts: Rollouts, tree: Tree, edges: Edges) -> Any:
        found.append(Supervised(tree, edges, made(run, chosen, rollouts, tree, edges), rollouts, run))
        return found[-1].targets

    with runs.opened(settings) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_tree_rpo, "best_targets", kept)
        code_of(settings.trainer).train(run, settings.trainer)
    return found[0]


def test_samples_learn_the_velocity_on_the_best_path(folder: Path, model: Path) -> None:
    tree, edges, targets, rollouts, run = supervised(folder, model, "best_path")
    best = rollouts.total.view(2, 8).argmax(1)
    short, seen = progress_table(tree, rollouts.total), 0
    for actions in actions_of(run, run.config.trainer, rollouts, edges).values():  # type: ignore[arg-type]
        for action in actions:
            i, slots = action.step, action.piece.slots[action.step]
            with torch.no_grad():
                outputs = run.policy.replay(action.piece.trajectory, i).model_output
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
            rows, aims = trajectory.rows(i), dynamic_tree_rpo.target_of(action, targets, 8)
            for k, (slot, aim) in enumerate(zip(action.piece.slots[i], aims, strict=True)):
                state = trajectory.states[i][k if rows is None else int(rows[k])]
                picture = finals[int(slot // 8 * 8 + best[slot // 8])]
                torch.testing.assert_close(state - float(trajectory.sigmas[i]) * aim, picture, atol=1e-5, rtol=0)


def test_a_prompts_history_goes_on_after_a_resume(folder: Path, model: Path) -> None:
    """B2-DiffuRL's scores need the iterations before: a run stopped in its third of four equals one that was not."""

    def settings(name: str, call: int) -> Config:
        rewards = [runs.reward(folder, "Interrupt", args={"number": int(signal.SIGTERM), "call": call})]
        kept = {"checkpoint": {"every": 1}, "output": str(folder / name), "rewards": rewards, "iterations": 4}
        return config(folder, model, SETTINGS["backward"], **kept)

    train(settings("straight", 1000))
    with pytest.raises(SystemExit):
        train(settings("stopped", 3))
    assert runs.last_state(folder / "stopped").step in (2, 3)
    (folder / "quiet").touch()
    train(load(Run(folder / "stopped").config), folder / "stopped")
    assert runs.differences(folder / "straight", folder / "stopped") == []
    history = runs.last_state(folder / "stopped").state["memory"]["prompt_history"]
    assert sorted(history) == sorted(runs.PROMPTS)
    assert [len(stage) for stages in history.values() for stage in stages] == [8] * 8  # each prompt in two of four


@pytest.mark.slow  # processes of their own
@pytest.mark.parametrize("name", ["tree_rpo", "backward"])
def test_two_processes_do_what_one_does(folder: Path, model: Path, name: str) -> None:
    """Up to rounding: trees are cut to other batches."""
    rows = []
    for count in (1, 2):
        config(folder, model, SETTINGS[name], output=str(folder / f"world-{count}"))
        path = (folder / "tiny.yaml").rename(folder / f"{count}.yaml")
        log = folder / f"{count}.log"
        processes = (
            [runs.start(runs.train_file, str(path), log=log)]
            if count == 1
            else runs.start_ranks(count, runs.train_file, str(path), log=log)
        )
        assert runs.wait(processes, 200) == [0] * count, [p.read_text()[-2000:] for p in folder.glob("*.log")]
        rows += runs.rows(folder / f"world-{count}")
    one, two = rows
    assert one.keys() == two.keys()
    for key in one.keys() - {"ratio/std"}:
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6), key
    assert one["grad_norm"] > 0
