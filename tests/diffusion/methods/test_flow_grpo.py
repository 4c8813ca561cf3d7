"""Flow-GRPO from inside: its gradient computed a second time by other means, its gate, its settings."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.diffusion import run as diffusion_run
from genrl.diffusion.config.schema import Config
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import clipped_surrogate
from genrl.runtime.folder.run import read_metrics
from tests.diffusion import runs
from tests.diffusion.methods.watched import EIGHT, Bare, Update, after_collect, equal, relative, run
from tests.reference.flow_grpo import flow_sde, log_density
from tests.run_folders import tiered

GRPO = {"algorithm": "flow_grpo", "noise_level": 0.7, "advantage_scale": "group", "clip_range": 1e-3}
QUIET = runs.QUIET
GUIDED = {**EIGHT, "guidance_scale": 4.5}


def by_hand(config: Config, rollouts: Rollouts, update: Update, slots: list[int], *, beta: float = 0.0) -> Any:
    """Gradient of one update over `slots`, by autograd on the stored states, from a model loaded afresh."""
    bare = Bare(config, update.weights)
    advantages = group_advantages(rollouts.total, rollouts.group, scale="group").float()
    loss, ratios, divergences = torch.zeros(()), [], []
    for one in rollouts.mine.values():
        if not set(one.slots) <= set(slots):
            continue
        (piece,) = one.pieces
        recorded = piece.trajectory
        sigmas = recorded.sigmas.tolist()
        for i, old in recorded.log_probs.items():
            x, y, prompts = recorded.states[i], recorded.states[i + 1], one.batch.prompts

            def mean_of(x: Tensor = x, i: int = i, prompts: list[str] = prompts, sigmas: list[float] = sigmas) -> Any:
                texts = [*([""] * len(x)), *prompts]
                unguided, guided = bare.velocity(texts, torch.cat([x, x]), torch.tensor(sigmas[i])).chunk(2)
                v = unguided + 4.5 * (guided - unguided)
                return flow_sde(x, v, sigmas[i], sigmas[i + 1], sigmas[1], 0.7)

            mean, std = mean_of()
            moved = clipped_surrogate(log_density(y, mean, std), old, advantages[one.slots], 1e-3, 1e-3)
            kl = torch.zeros(len(x))
            if beta:
                with bare.untrained():
                    reference, _ = mean_of()
                kl = ((mean - reference) ** 2 / (2 * std**2)).flatten(1).mean(1)
            loss = loss + (moved.loss + beta * kl).sum() / (len(slots) * len(recorded.log_probs))
            ratios.append(moved.ratio.detach())
            divergences.append(kl.detach())
    return bare.gradient(loss), torch.cat(ratios), torch.cat(divergences)


def test_gradient_of_a_later_update_with_clip_and_divergence(folder: Path, model: Path) -> None:
    """Second inner epoch: ratios have moved, some are clipped, and the policy is away from the reference."""
    trainer = {**GRPO, "kl_weight": 0.04, "updates_per_iteration": 2, "inner_epochs": 2}
    config = runs.config(folder, model, trainer=trainer, sampling=GUIDED, iterations=1, **QUIET)
    seen = run(config)
    assert len(seen.updates) == 4 == config.optimizer_steps
    slots = [s for one in list(seen.rollouts[0].updates())[1][0] for s in one.slots]
    assert len(slots) == 4
    gradient, ratios, divergences = by_hand(config, seen.rollouts[0], seen.updates[3], slots, beta=0.04)
    assert relative(seen.updates[3].gradient, gradient) < 1e-4
    assert ((ratios - 1).abs() > 1e-3).any() and divergences.max() > 0 and seen.rows[0]["ratio/max_abs_dev"] > 0
    plain, _, _ = by_hand(config, seen.rollouts[0], seen.updates[3], slots)
    assert relative(seen.updates[3].gradient, plain) > 1e-3  # the divergence is part of it


TREE: dict[str, Any] = {"window": {"size": 2, "low": 1, "high": 3}, "tree": {"at": "window", "ways": 2}}
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of the trainer, other sections
    "kl": ({"kl_weight": 0.1, "kl": "velocity"}, {}),
    "kl-full": ({"kl_weight": 0.1}, {"lora": None}),
    "guard": ({"algorithm": "grpo_guard"}, {}),
    "pruned": ({**TREE, "tree": {**TREE["tree"], "prune": {"depths": [2]}}}, {}),
    "noise-outside": ({"window": {"size": 1, "low": 1, "high": 2}, "noise_outside_window": True}, {}),
    # autocast keeps its copies of weights for a whole pipeline call, whose first step here needs no gradient
    "autocast": ({"window": {"size": 2, "low": 1, "high": 3}}, {"model": {"autocast": "bfloat16"}}),
    # the ratio says nothing of them here: both of its sides are the kept one
    "our blocks": ({}, {"kernels": {"fused": True, "attention": "auto"}}),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", tiered(KEPT, ("kl",)))
def test_kept_graphs_give_the_same_update_without_the_calls(folder: Path, model: Path, name: str) -> None:
    """Bit for bit over two iterations: pictures, gradients, weights. No graph is kept that the update does not use."""
    seen = []
    trainer, sections = KEPT[name]
    for keep in (False, True):
        chosen = {**GRPO, **trainer, "keep_graph": keep}
        sampling = {**GUIDED, "num_inference_steps": 4}
        changes: dict[str, Any] = {"trainer": chosen, "sampling": sampling, "output": str(folder / f"{keep}"), **QUIET}
        config = runs.config(folder, model, iterations=2, **changes, **sections)
        seen.append((run(config), read_metrics(Path(config.output) / "metrics.jsonl")))
    (again, again_rows), (kept, kept_rows) = seen
    assert len(kept.updates) == 2
    for one, other in zip(again.updates, kept.updates, strict=True):
        assert equal(one.gradient, other.gradient) and any(bool(g.any()) for g in one.gradient.values())
    assert equal(again.weights, kept.weights)
    assert not any(piece.trajectory.graphs for one in kept.rollouts[1].mine.values() for piece in one.pieces)
    for one, other in zip(again_rows, kept_rows, strict=True):
        assert one["model_calls/sample"] == other["model_calls/sample"]
        left = one["model_calls/train"] / 2 if "kl_weight" in trainer else 0  # those of the reference
        assert one["model_calls/train"] > 0 and other["model_calls/train"] == left


def drifting(size: float) -> Any:
    """Make the denoiser's output depend on how often it was called, in the first iteration."""

    def prepare(run: DiffusionRun) -> None:
        calls = 0

        def drift(module: Any, arguments: Any, output: tuple[Tensor]) -> tuple[Tensor]:
            nonlocal calls
            calls += 1
            return (output[0] + size * calls * (run.iteration == 0),)

        run.policy.denoiser.register_forward_hook(drift)

    return prepare


def nan(run: DiffusionRun) -> None:
    """From the end of sampling on, the denoiser's output is none."""
    hook = lambda module, arguments, output: (output[0] * math.nan,)  # noqa: E731
    after_collect(run, lambda result: run.policy.denoiser.register_forward_hook(hook))


@pytest.mark.parametrize(("prepare", "off"), [(drifting(1e-2), "0"), (nan, "nan")], ids=["drifting", "nan"])
def test_gate_stops_a_pipeline_that_is_not_replayed(folder: Path, model: Path, prepare: Any, off: str) -> None:
    config = runs.config(folder, model, trainer=GRPO, iterations=1, **QUIET)
    with pytest.raises(
        RuntimeError, match=rf"off by {off}.*, more than 0\.0001: .*Or widen trainer\.clip_range"
    ) as error:
        run(config, prepare)
    assert "skip-layer guidance" in str(error.value)
    assert not read_metrics(Path(config.output) / "metrics.jsonl")  # before any update


def test_gate_lets_rounding_pass_and_says_so(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the first iteration; in the second replay is exact, and nothing is said."""

    def aloud(opened: DiffusionRun) -> None:
        opened.process.progress.enabled = True
        drifting(1e-6)(opened)

    seen = run(runs.config(folder, model, trainer=GRPO, iterations=2, **QUIET), aloud)
    assert seen.rows[0]["ratio/max_abs_dev"] > 0
    assert (seen.rows[1]["ratio/max_abs_dev"], seen.rows[1]["ratio/mean"]) == (0.0, 1.0)
    assert capsys.readouterr().err.count("rounding of the kernels in use") == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_do_not_vanish(folder: Path, model: Path, reduction: str, monkeypatch: Any) -> None:
    """At 1 024 numbers a sample: a scale 64 times as large changes nothing any more, none at all does."""
    large = {"height": 32, "width": 32, "num_inference_steps": 2, "prompts_per_iteration": 1}
    trainer, chosen = {**GRPO, "log_prob_reduction": reduction}, diffusion_run.loss_scale
    half: dict[str, Any] = {"sampling": large, "model": {"autocast": "float16"}, "iterations": 1, **QUIET}

    def gradient(factor: float) -> Tensor:
        monkeypatch.setattr(diffusion_run, "loss_scale", lambda *of: factor * chosen(*of) if factor else 1.0)
        seen = run(runs.config(folder, model, trainer=trainer, output=str(folder / f"{factor}"), **half))
        whole = torch.cat([g.flatten() for _, g in sorted(seen.updates[0].gradient.items())])
        return whole / torch.linalg.vector_norm(whole) * seen.rows[0]["grad_norm"]

    result, larger, unscaled = gradient(1.0), gradient(64.0), gradient(0.0)
    norm = torch.linalg.vector_norm(larger)
    assert torch.linalg.vector_norm(result - larger) < 0.01 * norm
    assert reduction == "sum" or torch.linalg.vector_norm(unscaled - larger) > 0.03 * norm


def test_training_without_guidance_judges_by_the_unguided_policy(folder: Path, model: Path) -> None:
    """The first update's ratios are exactly 1, those of the second epoch are not."""
    sampling = {"guidance_scale": 4.5}
    for epochs in (1, 2):
        trainer = {**GRPO, "guidance_in_training": False, "inner_epochs": epochs}
        changes: dict[str, Any] = {"output": str(folder / f"{epochs}"), "iterations": 1, **QUIET}
        seen = run(runs.config(folder, model, trainer=trainer, sampling=sampling, **changes))
        assert (seen.rows[0]["ratio/max_abs_dev"] > 0.0) == (epochs == 2)
    assert {p.batch.sampling["guidance_scale"] for update in seen.updates for p in update.pieces} == {1.0}
    assert next(iter(seen.rollouts[0].mine.values())).batch.sampling["guidance_scale"] == 4.5


@pytest.mark.parametrize("reward", ["rewards.py:nothing", "silent.py:silent"])
def test_scores_that_say_nothing_change_nothing(folder: Path, model: Path, reward: str) -> None:
    """The same for every picture, or none at all: no weight decay either."""
    (folder / "silent.py").write_text("def silent(images):\n    return [None] * len(images)\n")
    changes: dict[str, Any] = {"rewards": [{"name": f"{folder}/{reward}"}], "evaluation": {"every": 1}, "iterations": 1}
    config = runs.config(folder, model, trainer=GRPO, optimizer={"lr": 1e-2, "weight_decay": 0}, **changes)
    seen = run(config)
    assert equal(seen.updates[0].weights, seen.weights)
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    if "silent" in reward:
        assert rows[-1]["reward/silent_failed"] == 4.0 and rows[-1]["reward/total_mean"] is None
        assert rows[0]["eval/silent_failed"] == 2.0 and rows[0]["eval/total_mean"] is None
