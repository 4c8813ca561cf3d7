"""Flow-GRPO from inside: its gradient computed a second time by other means, its gate, its settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import Config
from genrl.config.method import code_of
from genrl.diffusion import run as diffusion_run
from genrl.diffusion.methods.flow_grpo import train as flow_grpo
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.rollout.forest import Piece
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.runtime.run import read_metrics
from genrl.runtime.weights import Weights
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

GRPO = {"algorithm": "flow_grpo", "noise_level": 0.7, "advantage_scale": "group", "clip_range": 1e-3}
EIGHT = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 4, "guidance_scale": 4.5}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}


@dataclass
class Update:
    """One optimiser step as it was about to be taken."""

    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]


@dataclass
class Watched:
    """What a run did."""

    rollouts: list[Rollouts]
    updates: list[Update]
    rows: list[dict[str, float]]
    weights: dict[str, Tensor]


def values(weights: Weights) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in weights.named.items()}


def watch(run: DiffusionRun) -> Watched:
    """Record the run's rollouts, its gradients and its metric rows."""
    seen = Watched([], [], [], {})
    collect, step, finish = run.collect, run.step, run.finish

    def watched_collect(draw: Any, **shape: Any) -> Rollouts:
        seen.rollouts.append(collect(draw, **shape))
        return seen.rollouts[-1]

    def watched_step() -> float:
        gradient = {key: p.grad.clone() for key, p in run.weights.named.items() if p.grad is not None}
        seen.updates.append(Update(values(run.weights), gradient))
        return step()

    def watched_finish(metrics: Any) -> None:
        seen.rows.append(dict(metrics))
        finish(metrics)

    run.collect, run.step, run.finish = watched_collect, watched_step, watched_finish  # type: ignore
    return seen


def run(config: Config, prepare: Any = lambda run: None) -> Watched:
    """Train in this process and report."""
    with runs.opened(config) as run:
        seen = watch(run)
        prepare(run)
        code_of(config.trainer).train(run, config.trainer)
        seen.weights = values(run.weights)
    return seen


# -- the gradient, by other means ------------------------------------------------------------------------------------


def velocity(pipe: Any, prompts: list[str], x: Tensor, sigma: float, guidance: float) -> Tensor:
    """Classifier-free guidance on the bare transformer."""
    rows = [pipe.encode_prompt(prompt=[p], prompt_2=None, prompt_3=None, max_sequence_length=4) for p in prompts]
    text, empty, pooled, empty_pooled = (torch.cat([row[k] for row in rows]) for k in range(4))
    unguided, guided = pipe.transformer(
        hidden_states=torch.cat([x, x]),
        timestep=torch.full((2 * len(x),), 1000 * sigma),
        encoder_hidden_states=torch.cat([empty, text]),
        pooled_projections=torch.cat([empty_pooled, pooled]),
        return_dict=False,
    )[0].chunk(2)
    return unguided + guidance * (guided - unguided)


def flow_sde(x: Tensor, v: Tensor, sigma: float, sigma_next: float, sigma_max: float, a: float) -> tuple[Tensor, float]:
    """Mean and transition std of Flow-GRPO's SDE, as the paper writes them."""
    s = a * math.sqrt(sigma / (1 - min(sigma, sigma_max)))
    dt = sigma_next - sigma
    mean = x * (1 + s**2 * dt / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s * math.sqrt(-dt)


def log_density(y: Tensor, mean: Tensor, std: float) -> Tensor:
    return (-((y - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)


def by_hand(config: Config, rollouts: Rollouts, update: Update, slots: list[int], *, beta: float = 0.0) -> Any:
    """Gradient of one update over `slots`, by autograd on the stored states, from a model loaded afresh."""
    torch.manual_seed(0)
    pipe = DiffusionPipeline.from_pretrained(config.model.path)
    pipe.transformer.eval().requires_grad_(False)
    named = trainable({"transformer": pipe.transformer}, config.model.lora).named
    with torch.no_grad():
        for key, p in named.items():
            p.copy_(update.weights[key])

    scores = rollouts.total
    groups = scores.view(2, 4)
    advantages = (
        (groups - groups.mean(1, keepdim=True)) / (groups.std(1, correction=0, keepdim=True) + 1e-4)
    ).flatten()
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
                v = velocity(pipe, prompts, x, sigmas[i], 4.5)
                return flow_sde(x, v, sigmas[i], sigmas[i + 1], sigmas[1], 0.7)

            mean, std = mean_of()
            ratio = (log_density(y, mean, std) - old).exp()
            weight = advantages[one.slots].float()
            surrogate = torch.maximum(-weight * ratio, -weight * ratio.clamp(1 - 1e-3, 1 + 1e-3))
            kl = torch.zeros(len(x))
            if beta:
                pipe.transformer.disable_adapters()
                with torch.no_grad():
                    reference, _ = mean_of()
                pipe.transformer.enable_adapters()
                kl = ((mean - reference) ** 2 / (2 * std**2)).flatten(1).mean(1)
            loss = loss + (surrogate + beta * kl).sum() / (len(slots) * len(recorded.log_probs))
            ratios.append(ratio.detach())
            divergences.append(kl.detach())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {k: g for k, g in zip(named, gradients, strict=True) if g is not None}
    return found, torch.cat(ratios), torch.cat(divergences)


def relative(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, over all parameters."""
    assert one.keys() == other.keys()
    difference = math.fsum(float((one[k] - other[k]).double().square().sum()) for k in one)
    return math.sqrt(difference / math.fsum(float(other[k].double().square().sum()) for k in other))


def slots_of(rollouts: Rollouts, update: int, count: int) -> list[int]:
    return [s for micro_batch in list(rollouts.updates(count))[update][0] for s in micro_batch.slots]


def test_gradient_of_the_first_update(folder: Path, model: Path) -> None:
    config = runs.config(folder, model, trainer=GRPO, sampling=EIGHT, iterations=1, **QUIET)
    seen = run(config)
    gradient, ratios, _ = by_hand(config, seen.rollouts[0], seen.updates[0], list(range(8)))
    assert relative(seen.updates[0].gradient, gradient) < 1e-5
    assert len(ratios) == 16 and (ratios - 1).abs().max() < 1e-5
    norm = math.sqrt(math.fsum(float(g.square().sum()) for g in gradient.values()))
    assert norm > 1e-4 and seen.rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_gradient_of_a_later_update_with_clip_and_divergence(folder: Path, model: Path) -> None:
    """Second inner epoch: ratios have moved, some are clipped, and the policy is away from the reference."""
    trainer = {**GRPO, "kl_weight": 0.04, "updates_per_iteration": 2, "inner_epochs": 2}
    config = runs.config(folder, model, trainer=trainer, sampling=EIGHT, iterations=1, **QUIET)
    seen = run(config)
    assert len(seen.updates) == 4
    slots = slots_of(seen.rollouts[0], 1, 2)
    assert len(slots) == 4
    gradient, ratios, divergences = by_hand(config, seen.rollouts[0], seen.updates[3], slots, beta=0.04)
    assert relative(seen.updates[3].gradient, gradient) < 1e-4
    assert ((ratios - 1).abs() > 1e-3).any() and divergences.max() > 0
    plain, _, _ = by_hand(config, seen.rollouts[0], seen.updates[3], slots)
    assert relative(seen.updates[3].gradient, plain) > 1e-3  # the divergence is part of it


# -- the update without running steps again ---------------------------------------------------------------------------

TREE: dict[str, Any] = {"window": {"size": 2, "low": 1, "high": 3}, "tree": {"at": "window", "ways": 2}}


@pytest.mark.parametrize(
    ("trainer", "lora"),
    [
        ({}, {"rank": 4, "alpha": 8}),
        ({"kl_weight": 0.1, "kl": "velocity"}, {"rank": 4, "alpha": 8}),
        ({"kl_weight": 0.1}, None),
        ({"algorithm": "grpo_guard"}, {"rank": 4, "alpha": 8}),
        (TREE, {"rank": 4, "alpha": 8}),
        ({**TREE, "tree": {**TREE["tree"], "prune": {"depths": [2]}}}, {"rank": 4, "alpha": 8}),
        ({"window": {"size": 1, "low": 1, "high": 2}, "noise_outside_window": True}, {"rank": 4, "alpha": 8}),
    ],
    ids=["plain", "kl", "kl-full", "guard", "tree", "pruned", "noise-outside"],
)
def test_kept_graphs_give_the_same_update_without_the_calls(
    folder: Path, model: Path, trainer: dict[str, Any], lora: Any
) -> None:
    """Bit for bit over two iterations: pictures, gradients, weights. No graph is kept that the update does not use."""
    seen = []
    for keep in (False, True):
        (folder / f"{keep}").mkdir()
        runs.write_folder(folder / f"{keep}")
        chosen = {**GRPO, **trainer, "keep_graph": keep}
        sampling = {**EIGHT, "num_inference_steps": 4}
        config = runs.config(
            folder / f"{keep}", model, lora=lora, trainer=chosen, sampling=sampling, iterations=2, **QUIET
        )
        seen.append((run(config), read_metrics(Path(config.output) / "metrics.jsonl")))
    (again, again_rows), (kept, kept_rows) = seen
    assert len(kept.updates) == 2
    for one, other in zip(again.updates, kept.updates, strict=True):
        assert one.gradient.keys() == other.gradient.keys()
        assert all(torch.equal(g, other.gradient[key]) for key, g in one.gradient.items())
        assert any(bool(g.any()) for g in one.gradient.values())
    assert all(torch.equal(w, kept.weights[key]) for key, w in again.weights.items())
    assert not any(piece.trajectory.graphs for one in kept.rollouts[1].mine.values() for piece in one.pieces)
    for one, other in zip(again_rows, kept_rows, strict=True):
        assert one["model_calls/sample"] == other["model_calls/sample"]
        left = one["model_calls/train"] / 2 if "kl_weight" in trainer else 0  # those of the reference
        assert one["model_calls/train"] > 0 and other["model_calls/train"] == left


def test_graphs_are_kept_of_weights_that_autocast_has_cast_without_one(folder: Path, model: Path) -> None:
    """Autocast keeps its copies of weights for a whole pipeline call, whose first step here needs no gradient."""
    gradients = []
    for keep in (False, True):
        trainer = {**GRPO, "clip_range": 0.1, "window": {"size": 2, "low": 1, "high": 3}, "keep_graph": keep}
        config = runs.config(
            folder, model, trainer=trainer, sampling={**EIGHT, "num_inference_steps": 4}, iterations=1, **QUIET
        )
        half = config.model.model_copy(update={"autocast": "bfloat16"})
        output = str(folder / f"half-{keep}")
        gradients.append(run(config.model_copy(update={"model": half, "output": output})).updates[0].gradient)
    again, kept = gradients
    assert all(torch.equal(gradient, kept[key]) for key, gradient in again.items())
    assert any(bool(gradient.any()) for gradient in again.values())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trainer": {**GRPO, "keep_graph": True, "updates_per_iteration": 2}}, "trainer.updates_per_iteration"),
        ({"trainer": {**GRPO, "keep_graph": True, "inner_epochs": 2}}, "trainer.inner_epochs"),
        ({"trainer": {**GRPO, "keep_graph": True, "guidance_in_training": False}}, "trainer.guidance_in_training"),
        ({"trainer": {**GRPO, "keep_graph": True}, "distributed": {"fsdp": True}}, "distributed.fsdp"),
    ],
)
def test_kept_graphs_are_refused_where_they_are_not_those_of_training(
    folder: Path, model: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        runs.config(folder, model, **changes)


# -- batch geometry --------------------------------------------------------------------------------------------------


def recut(rollouts: Rollouts, size: int) -> Rollouts:
    """The same samples, states and all, in micro-batches of another size."""
    pieces: list[MicroBatch] = []
    for one in rollouts.mine.values():
        for first in range(0, len(one.slots), size):
            rows = slice(first, first + size)
            batch = replace(one.batch, prompts=one.batch.prompts[rows], keys=one.batch.keys[rows])
            whole, slots = one.pieces[0].trajectory, one.slots[rows]
            trajectory = replace(
                whole,
                batch=batch,
                states={i: x[rows] for i, x in whole.states.items()},
                next_states={i: x[rows] for i, x in whole.next_states.items()},
                log_probs={i: x[rows] for i, x in whole.log_probs.items()},
                final=whole.final[rows],
            )
            part = Piece(trajectory, dict.fromkeys(whole.log_probs, slots))
            pieces.append(MicroBatch(slots, batch, one.final[rows], one.sigmas, [part], one.images[rows]))
    cut = [piece.slots for piece in pieces]
    return replace(rollouts, mine=dict(enumerate(pieces)), num_micro_batches=len(pieces), slots=cut)


@pytest.mark.parametrize("size", [4, 2, 1, 3])
def test_accumulation_gives_the_gradient_of_the_whole_batch(folder: Path, model: Path, size: int) -> None:
    """The same samples, to the bit, as 8 x 1 and in smaller pieces (3: unequal ones). Without guidance, whose
    difference of two passes makes more of their rounding."""
    sampling = {**EIGHT, "batch_size": 8, "guidance_scale": 1.0}
    config = runs.config(folder, model, trainer=GRPO, sampling=sampling, iterations=1, **QUIET)

    def in_pieces(opened: DiffusionRun) -> None:
        collect = opened.collect
        opened.collect = lambda draw, **shape: recut(collect(draw, **shape), size)  # type: ignore[method-assign]

    whole, pieces = run(config).updates[0].gradient, run(config, in_pieces).updates[0].gradient
    assert relative(pieces, whole) < 1e-6


# -- the gate --------------------------------------------------------------------------------------------------------


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


def test_gate_stops_a_pipeline_that_is_not_replayed(folder: Path, model: Path) -> None:
    config = runs.config(folder, model, trainer=GRPO, iterations=1, **QUIET)
    with pytest.raises(
        RuntimeError, match=r"off 1 by .*, more than a tenth of trainer\.clip_range \(0\.001\)"
    ) as error:
        run(config, drifting(1e-2))
    assert "skip-layer guidance" in str(error.value)
    assert not read_metrics(Path(config.output) / "metrics.jsonl")  # before any update


def aloud(prepare: Callable[[DiffusionRun], None]) -> Callable[[DiffusionRun], None]:
    """Prepare a run that tells the reader what it has to say."""

    def prepared(opened: DiffusionRun) -> None:
        opened.process.progress.enabled = True
        prepare(opened)

    return prepared


def test_gate_lets_rounding_pass_and_says_so(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.config(folder, model, trainer=GRPO, iterations=1, **QUIET)
    seen = run(config, aloud(drifting(1e-6)))
    assert seen.rows[0]["ratio/max_abs_dev"] > 0
    assert "below a tenth of the clip range (0.001)" in capsys.readouterr().err


def test_gate_is_silent_where_replay_is_exact(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.config(folder, model, trainer=GRPO, iterations=2, **QUIET)
    seen = run(config, aloud(lambda opened: None))
    assert [row["ratio/max_abs_dev"] for row in seen.rows] == [0.0, 0.0]
    assert [row["ratio/mean"] for row in seen.rows] == [1.0, 1.0]
    assert "ratio of the replayed" not in capsys.readouterr().err


def test_gate_does_not_take_nan_for_exact(folder: Path, model: Path) -> None:
    def breaks(opened: DiffusionRun) -> None:
        inner, collect = opened.policy.denoiser, opened.collect

        def collect_then_break(draw: Any, **shape: Any) -> Rollouts:
            found = collect(draw, **shape)
            inner.register_forward_hook(lambda module, arguments, output: (output[0] * math.nan,))
            return found

        opened.collect = collect_then_break  # type: ignore[method-assign]

    config = runs.config(folder, model, trainer=GRPO, iterations=1, **QUIET)
    with pytest.raises(RuntimeError, match="off 1 by nan"):
        run(config, breaks)


# -- settings --------------------------------------------------------------------------------------------------------


def test_window_trains_its_steps_only(folder: Path, model: Path) -> None:
    trainer = {**GRPO, "window": {"size": 2, "low": 1, "high": 4}}
    sampling = {"num_inference_steps": 6}
    config = runs.config(folder, model, trainer=trainer, sampling=sampling, iterations=6, **QUIET)
    seen = run(config)
    for row, rollouts in zip(seen.rows, seen.rollouts, strict=True):
        first = int(row["window/first"])
        assert row["window/size"] == 2.0 and first in (1, 2)
        assert all(sorted(one.pieces[0].trajectory.log_probs) == [first, first + 1] for one in rollouts.mine.values())
    assert {int(row["window/first"]) for row in seen.rows} == {1, 2}


def test_without_a_window_all_steps_but_the_last_are_trained(folder: Path, model: Path) -> None:
    seen = run(runs.config(folder, model, trainer=GRPO, sampling={"num_inference_steps": 4}, iterations=1, **QUIET))
    assert all(sorted(one.pieces[0].trajectory.log_probs) == [0, 1, 2] for one in seen.rollouts[0].mine.values())
    assert (seen.rows[0]["window/first"], seen.rows[0]["window/size"]) == (0.0, 3.0)


@pytest.mark.parametrize("kind", ["gaussian", "gaussian_dt", "mean_square", "velocity"])
@pytest.mark.parametrize("lora", [{"rank": 4, "alpha": 8}, None], ids=["lora", "full"])
def test_divergences_are_zero_at_the_start_and_then_grow(folder: Path, model: Path, kind: str, lora: Any) -> None:
    trainer = {**GRPO, "kl_weight": 0.1, "kl": kind}
    config = runs.config(folder, model, lora=lora, trainer=trainer, optimizer={"lr": 1e-3}, iterations=2, **QUIET)
    rows = run(config).rows
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] > 0.0


def test_the_weight_of_the_divergence_holds_the_policy_back(folder: Path, model: Path) -> None:
    sampling = {"num_inference_steps": 3, "group_size": 4}

    def end(kl_weight: float) -> float:
        trainer = {**GRPO, "kl": "velocity", "kl_weight": kl_weight, "inner_epochs": 4}
        config = runs.config(folder, model, trainer=trainer, sampling=sampling, iterations=2, **QUIET)
        return run(config).rows[-1]["kl"]

    assert end(1000.0) < 0.5 * end(1e-9)


def test_updates_and_inner_epochs_are_counted(folder: Path, model: Path) -> None:
    trainer = {**GRPO, "updates_per_iteration": 2, "inner_epochs": 3}
    gentle = {"lr": 1e-4}  # none so large that all its samples are clipped in the next: that one would be skipped
    config = runs.config(folder, model, trainer=trainer, optimizer=gentle, iterations=2, **QUIET)
    with runs.opened(config) as run:
        seen = watch(run)
        flow_grpo.train(run, config.trainer)  # type: ignore[arg-type]
        assert run.loop.optimizer_steps == len(seen.updates) == 2 * 2 * 3 == config.optimizer_steps
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    assert [row["updates"] for row in rows] == [6.0, 6.0]
    # 4 samples x 3 steps in sampling; 2 of the steps are trained, 3 times
    assert [row["model_calls/sample"] for row in rows] == [12.0, 12.0]
    assert [row["model_calls/train"] for row in rows] == [24.0, 24.0]  # the gate's replays are not counted
    assert seen.rows[0]["ratio/max_abs_dev"] > 0  # off policy after the first update


def test_groups_without_spread_change_nothing(folder: Path, model: Path) -> None:
    config = runs.config(
        folder,
        model,
        trainer=GRPO,
        rewards=[runs.reward(folder, "nothing")],
        optimizer={"lr": 1e-2, "weight_decay": 0},
        iterations=2,
        **QUIET,
    )
    seen = run(config)
    assert [row["zero_std_ratio"] for row in seen.rows] == [1.0, 1.0]
    assert [row["advantage/abs_mean"] for row in seen.rows] == [0.0, 0.0]
    assert all(torch.equal(seen.updates[0].weights[key], tensor) for key, tensor in seen.weights.items())


def test_momentum_alone_moves_nothing(folder: Path, model: Path) -> None:
    """After updates, an iteration without spread: neither momentum nor weight decay nor the average moves on."""
    common = {"trainer": GRPO, "ema": {"decay": 0.5}, "iterations": 2, **QUIET}
    config = runs.config(folder, model, optimizer={"lr": 1e-2, "weight_decay": 0.1}, **common)
    with runs.opened(config) as run:
        seen = watch(run)
        collect, after_first = run.collect, []

        def flattened(draw: Any, **shape: Any) -> Rollouts:
            rollouts = collect(draw, **shape)
            if run.iteration == 1:
                after_first.append((values(run.weights), dict(run.weights.snapshots["average"])))
                rollouts.total.fill_(0.5)
            return rollouts

        run.collect = flattened  # type: ignore[method-assign]
        flow_grpo.train(run, config.trainer)  # type: ignore[arg-type]
        ((weights, average),) = after_first
        assert all(torch.equal(weights[key], tensor) for key, tensor in values(run.weights).items())
        assert all(torch.equal(average[key], t) for key, t in run.weights.snapshots["average"].items())
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    assert [row["updates"] for row in rows] == [1.0, 0.0] and rows[1]["grad_norm"] == 0.0
    assert any(not torch.equal(seen.updates[0].weights[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_do_not_vanish(
    folder: Path, model: Path, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 024 numbers a sample: a scale 64 times as large changes nothing any more, none at all does."""
    large = {"height": 32, "width": 32, "num_inference_steps": 2, "prompts_per_iteration": 1}
    trainer = {**GRPO, "log_prob_reduction": reduction}
    config = runs.config(folder, model, trainer=trainer, sampling=large, iterations=1, **QUIET)
    config = config.model_copy(update={"model": config.model.model_copy(update={"autocast": "float16"})})
    chosen = diffusion_run.loss_scale

    def gradient(factor: float) -> Tensor:
        monkeypatch.setattr(diffusion_run, "loss_scale", lambda *of: factor * chosen(*of) if factor else 1.0)
        output = str(folder / f"{factor}")
        update = run(config.model_copy(update={"output": output})).updates[0].gradient
        (row,) = runs.rows(Path(output))
        whole = torch.cat([g.flatten() for _, g in sorted(update.items())])
        return whole / torch.linalg.vector_norm(whole) * row["grad_norm"]

    found, larger, unscaled = gradient(1.0), gradient(64.0), gradient(0.0)
    norm = torch.linalg.vector_norm(larger)
    assert torch.linalg.vector_norm(found - larger) < 0.01 * norm
    if reduction == "mean":
        assert torch.linalg.vector_norm(unscaled - larger) > 0.03 * norm


def test_iterations_without_any_score_change_nothing(folder: Path, model: Path) -> None:
    (folder / "silent.py").write_text("def silent(images):\n    return [None] * len(images)\n")
    config = runs.config(
        folder,
        model,
        trainer=GRPO,
        rewards=[{"name": f"{folder}/silent.py:silent"}],
        optimizer={"lr": 1e-2, "weight_decay": 0},
        evaluation={"every": 1},
        iterations=1,
    )
    seen = run(config)
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    assert rows[-1]["reward/silent_failed"] == 4.0 and rows[-1]["reward/total_mean"] is None
    assert rows[0]["eval/silent_failed"] == 2.0 and rows[0]["eval/total_mean"] is None
    assert all(torch.equal(seen.updates[0].weights[key], tensor) for key, tensor in seen.weights.items())


def test_training_without_guidance_judges_by_the_unguided_policy(folder: Path, model: Path) -> None:
    trainer = {**GRPO, "guidance_in_training": False, "inner_epochs": 2}
    config = runs.config(folder, model, trainer=trainer, sampling={"guidance_scale": 4.5}, iterations=1, **QUIET)
    with runs.opened(config) as run:
        seen = watch(run)
        ratios: list[float] = []
        backward = run.backward

        def watched(settings: Any, results: Any, recorded: Any, **counts: float) -> None:
            assert recorded.batch.sampling["guidance_scale"] == 1.0
            ratios.append(float((results["log_prob"] - recorded["old_log_prob"]).exp().sub(1).abs().max()))
            backward(settings, results, recorded, **counts)

        run.backward = watched  # type: ignore[method-assign]
        flow_grpo.train(run, config.trainer)  # type: ignore[arg-type]
    first, second = ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :]
    assert max(first) == 0.0 and min(second) > 0.0
    recorded = next(iter(seen.rollouts[0].mine.values()))
    assert recorded.batch.sampling["guidance_scale"] == 4.5


def test_sum_reduction_reaches_the_loss(folder: Path, model: Path) -> None:
    """The joint density: gradients D times as large, D = 256 elements of a state."""
    sampling = {**EIGHT, "guidance_scale": 1.0}
    by_reduction = {
        reduction: run(
            runs.config(
                folder,
                model,
                trainer={**GRPO, "log_prob_reduction": reduction},
                sampling=sampling,
                iterations=1,
                **QUIET,
            )
        )
        for reduction in ("mean", "sum")
    }
    scaled = {key: 256 * g for key, g in by_reduction["mean"].updates[0].gradient.items()}
    assert relative(by_reduction["sum"].updates[0].gradient, scaled) < 1e-5


@pytest.mark.parametrize("kernel", ["dance_sde", "wan_sde", "flow_cps", "flow_ddim"])
def test_every_kernel_trains(folder: Path, model: Path, kernel: str) -> None:
    level = {"dance_sde": 0.3, "wan_sde": None, "flow_cps": 0.8, "flow_ddim": 1.0}[kernel]
    seen = run(
        runs.config(folder, model, trainer={**GRPO, "kernel": kernel, "noise_level": level}, iterations=1, **QUIET)
    )
    assert seen.rows[0]["ratio/max_abs_dev"] == 0.0
    assert any(not torch.equal(seen.updates[0].weights[key], tensor) for key, tensor in seen.weights.items())
