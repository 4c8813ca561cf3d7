"""DiffusionNFT from inside: its gradient computed a second time by other means, its old policy, its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config import Config
from genrl.diffusion.methods.diffusion_nft import train as diffusion_nft
from genrl.diffusion.methods.diffusion_nft.train import levels
from genrl.diffusion.methods.noising import own_noise
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.runtime.run import read_metrics
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

NFT = {"algorithm": "diffusion_nft", "beta": 0.5, "kl_weight": 0.0, "advantage_scale": "global"}
EIGHT = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 4}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}


@dataclass
class Piece:
    """What one backward pass was made of."""

    batch: Batch
    noisy: Tensor
    sigma: Tensor


@dataclass
class Update:
    weights: dict[str, Tensor]
    old: dict[str, Tensor]
    gradient: dict[str, Tensor]
    pieces: list[Piece]


@dataclass
class Watched:
    rollouts: list[Rollouts] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    old: list[dict[str, Tensor]] = field(default_factory=list)
    """The old policy at the end of each iteration."""
    weights: dict[str, Tensor] = field(default_factory=dict)


def copied(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def run(config: Config) -> Watched:
    """Train in this process, and report samples, backward passes, gradients and metrics."""
    seen, pieces = Watched(), []
    with runs.opened(config) as run:
        weights = run.weights
        collect, backward, step, finish = run.collect, run.backward, run.step, run.finish

        def watched_collect(draw: Any, **shape: Any) -> Rollouts:
            seen.rollouts.append(collect(draw, **shape))
            return seen.rollouts[-1]

        def watched_backward(settings: Any, results: Any, recorded: Any, **counts: float) -> None:
            pieces.append(Piece(recorded.batch, recorded["noisy"].clone(), recorded["sigma"].clone()))
            backward(settings, results, recorded, **counts)

        def watched_step() -> float:
            gradient = {key: p.grad.clone() for key, p in weights.named.items() if p.grad is not None}
            seen.updates.append(Update(copied(weights.named), copied(weights.snapshots["old"]), gradient, list(pieces)))
            pieces.clear()
            return step()

        def watched_finish(metrics: Any) -> None:
            seen.rows.append(dict(metrics))
            seen.old.append(copied(weights.snapshots["old"]))
            finish(metrics)

        run.collect, run.backward = watched_collect, watched_backward  # type: ignore[method-assign]
        run.step, run.finish = watched_step, watched_finish  # type: ignore[method-assign]
        diffusion_nft.train(run, config.trainer)  # type: ignore[arg-type]
        seen.weights = copied(weights.named)
    return seen


# -- the gradient, by other means ------------------------------------------------------------------------------------


def velocity(pipe: Any, prompts: list[str], x: Tensor, sigma: Tensor) -> Tensor:
    """The bare transformer, without guidance."""
    rows = [pipe.encode_prompt(prompt=[p], prompt_2=None, prompt_3=None, max_sequence_length=4) for p in prompts]
    output: Tensor = pipe.transformer(
        hidden_states=x,
        timestep=1000 * sigma,
        encoder_hidden_states=torch.cat([row[0] for row in rows]),
        pooled_projections=torch.cat([row[2] for row in rows]),
        return_dict=False,
    )[0]
    return output


def by_hand(config: Config, rollouts: Rollouts, update: Update, *, kl_weight: float) -> dict[str, Tensor]:
    """Gradient of one update by autograd, from a model loaded afresh and the paper's formulas; 0 where unused."""
    pipe = DiffusionPipeline.from_pretrained(config.model.path)
    pipe.transformer.eval().requires_grad_(False)
    named = trainable({"transformer": pipe.transformer}, config.model.lora).named

    @torch.no_grad()
    def fill(values: dict[str, Tensor]) -> None:
        for key, p in named.items():
            p.copy_(values[key])

    clean = {key: x for one in rollouts.mine.values() for key, x in zip(one.batch.keys, one.final, strict=True)}
    slot = {key: s for one in rollouts.mine.values() for key, s in zip(one.batch.keys, one.slots, strict=True)}
    groups = rollouts.total.view(2, 4)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (rollouts.total.std(correction=0) + 1e-4)).flatten()
    beta, total = 0.5, {key: torch.zeros_like(p) for key, p in named.items()}
    for piece in update.pieces:
        x0 = torch.stack([clean[key] for key in piece.batch.keys])
        r = (advantages[[slot[key] for key in piece.batch.keys]].clamp(-5, 5) / 10 + 0.5).float()
        sigma = piece.sigma.view(-1, 1, 1, 1)

        def passed(piece: Piece = piece) -> Tensor:
            return velocity(pipe, piece.batch.prompts, piece.noisy, piece.sigma)

        with torch.no_grad():
            fill(update.old)
            old = passed()
            pipe.transformer.disable_adapters()
            reference = passed()
            pipe.transformer.enable_adapters()
        fill(update.weights)
        new = passed()
        positive, negative = beta * new + (1 - beta) * old, (1 + beta) * old - beta * new
        errors = []
        for v in (positive, negative):
            difference = piece.noisy - sigma * v - x0
            width = difference.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
            errors.append(difference.square().flatten(1).mean(1) / width)
        matching = 5 / beta * (r * errors[0] + (1 - r) * errors[1])
        kl = (new - reference).square().flatten(1).mean(1)
        loss = (matching + kl_weight * kl).mean() / len(update.pieces)  # pieces are of equal size
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for key, gradient in zip(named, gradients, strict=True):
            total[key] += torch.zeros(()) if gradient is None else gradient
    return total


def relative(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm; a parameter that is missing in `one` has gradient 0."""
    difference = math.fsum(float((one.get(k, torch.zeros(())) - other[k]).double().square().sum()) for k in other)
    return math.sqrt(difference / math.fsum(float(other[k].double().square().sum()) for k in other))


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_gradient_of_the_updates(folder: Path, model: Path, kl_weight: float) -> None:
    """The first, where the old policy is the present one, and the second, where it is not any more."""
    trainer = {**NFT, "kl_weight": kl_weight, "updates_per_iteration": 2}
    config = runs.config(folder, model, trainer=trainer, sampling=EIGHT, iterations=1, **QUIET)
    seen = run(config)
    assert len(seen.updates) == 2 and [len(update.pieces) for update in seen.updates] == [2, 2]
    for update in seen.updates:
        gradient = by_hand(config, seen.rollouts[0], update, kl_weight=kl_weight)
        assert relative(update.gradient, gradient) < 1e-5
    second = seen.updates[1]
    assert any(not torch.equal(second.weights[key], second.old[key]) for key in second.old)
    # The old policy matters: with the present one in its place the gradient is another.
    mistaken = by_hand(config, seen.rollouts[0], replace(second, old=second.weights), kl_weight=kl_weight)
    assert relative(second.gradient, mistaken) > 1e-4
    assert seen.rows[0]["nft/old_deviation"] > 0


def test_noisy_states_are_on_the_straight_path(folder: Path, model: Path) -> None:
    """x_t = (1 - t) x_0 + t eps, with t from the sampling grid and unit noise, distinct levels per sample."""
    sampling = {**EIGHT, "num_inference_steps": 5, "batch_size": 8}
    seen = run(runs.config(folder, model, trainer=NFT, sampling=sampling, iterations=1, **QUIET))
    recorded = next(iter(seen.rollouts[0].mine.values()))
    assert not recorded.pieces[0].trajectory.log_probs  # sampling is deterministic
    pieces = seen.updates[0].pieces
    levels = torch.stack([piece.sigma for piece in pieces])
    assert levels.shape == (4, 8)  # all levels but one, per sample
    assert all(len(set(levels[:, row].tolist())) == 4 for row in range(8))
    assert set(levels.flatten().tolist()) == set(recorded.sigmas[:-1].tolist())
    assert len({tuple(levels[:, row].tolist()) for row in range(8)}) > 1
    noise = torch.stack([(p.noisy - (1 - s) * recorded.final) / s for p in pieces for s in [p.sigma.view(-1, 1, 1, 1)]])
    assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - 1) < 0.05
    assert (torch.corrcoef(noise.flatten(0, 1).flatten(1)) - torch.eye(32)).abs().max() < 0.4


def test_draws_do_not_depend_on_the_neighbours() -> None:
    keys = [(3, 0, 0), (3, 0, 1), (3, 0, 2)]
    clean = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))

    def draws(rows: list[int], epoch: int = 0) -> list[tuple[Tensor, Tensor]]:
        batch = Batch(["a"] * len(rows), [keys[r] for r in rows], {})
        grid = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
        one = MicroBatch(rows, batch, clean[rows], grid, [], clean[rows])
        return [(sigma, own_noise(one, epoch, k)) for k, sigma in enumerate(levels(one, epoch))]

    for (sigma, noise), (sigma_alone, noise_alone) in zip(draws([0, 1, 2]), draws([2]), strict=True):
        assert sigma[2] == sigma_alone[0] and torch.equal(noise[2], noise_alone[0])
    first, second = draws([0, 1, 2]), draws([0, 1, 2], epoch=1)
    assert not torch.equal(first[0][1], second[0][1])
    orders = [torch.stack([sigma for sigma, _ in one]) for one in (first, second)]
    assert not torch.equal(*orders)


# -- the old policy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "decays"), [("none", [0.0, 0.0]), ("ramp", [0.002, 0.004]), ("delayed_ramp", [0, 0])])
def test_the_old_policy_follows(folder: Path, model: Path, kind: str, decays: list[float]) -> None:
    trainer = {**NFT, "old_policy_decay": kind, "updates_per_iteration": 2}
    seen = run(runs.config(folder, model, trainer=trainer, iterations=2, **QUIET))
    assert [row["policy/old_decay"] for row in seen.rows] == pytest.approx(decays)
    old = seen.updates[0].old
    for iteration, decay in enumerate(decays):
        present = seen.updates[2].weights if iteration == 0 else seen.weights
        for key, tensor in seen.old[iteration].items():
            expected = decay * old[key].double() + (1 - decay) * present[key].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-8)
        old = seen.old[iteration]


def test_samples_come_from_the_old_policy(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an old policy that never follows, every iteration samples from the model that training began from."""
    monkeypatch.setattr(diffusion_nft, "nft_old_policy_decay", lambda step, kind: 1.0)
    config = runs.config(folder, model, trainer=NFT, iterations=2, **QUIET)
    seen = run(config)
    with runs.opened(replace_output(config, folder / "fresh")) as opened, torch.no_grad():
        for rollouts in seen.rollouts:
            for one in rollouts.mine.values():
                assert torch.equal(opened.policy.roll_out(one.batch).final, one.final)
    assert any(not torch.equal(seen.weights[key], seen.old[-1][key]) for key in seen.weights)


def replace_output(config: Config, output: Path) -> Config:
    return config.model_copy(update={"output": str(output)})


# -- settings --------------------------------------------------------------------------------------------------------


def test_groups_without_spread_change_nothing(folder: Path, model: Path) -> None:
    """r = 1/2 pulls towards and away from each sample alike: at the old policy the two cancel to the bit."""
    config = runs.config(
        folder,
        model,
        trainer=NFT,
        rewards=[runs.reward(folder, "nothing")],
        optimizer={"lr": 1e-2, "weight_decay": 0},
        iterations=2,
        **QUIET,
    )
    seen = run(config)
    assert [row["zero_std_ratio"] for row in seen.rows] == [1.0, 1.0]
    assert [row["nft/reward_weight_mean"] for row in seen.rows] == [0.5, 0.5]
    assert all(torch.equal(seen.updates[0].weights[key], tensor) for key, tensor in seen.weights.items())


def test_divergence_is_zero_at_the_start_and_then_grows(folder: Path, model: Path) -> None:
    trainer = {**NFT, "kl_weight": 1e-3}
    rows = run(runs.config(folder, model, trainer=trainer, iterations=2, **QUIET)).rows
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] > 0.0
    assert (
        "kl"
        not in run(runs.config(folder, model, trainer=NFT, iterations=1, output=str(folder / "b"), **QUIET)).rows[0]
    )


def test_timesteps_per_sample_and_calls_are_counted(folder: Path, model: Path) -> None:
    trainer = {**NFT, "kl_weight": 1e-3, "timesteps_per_sample": 1, "inner_epochs": 2}
    sampling = {"num_inference_steps": 4}
    config = runs.config(folder, model, trainer=trainer, sampling=sampling, iterations=2, **QUIET)
    seen = run(config)
    assert len(seen.updates) == 4 and all(len(update.pieces) == 2 for update in seen.updates)
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    assert [row["updates"] for row in rows] == [2.0, 2.0]
    assert [row["model_calls/sample"] for row in rows] == [16.0, 16.0]  # 4 samples x 4 steps
    # 4 samples x 1 level x 2 epochs: new and reference, and the old policy where it is not the present one
    assert [row["model_calls/train"] for row in rows] == [16.0 + 4.0, 16.0 + 8.0]


def test_a_model_that_is_no_flow_is_refused(folder: Path) -> None:
    FAMILIES["sd15"]().pipe.save_pretrained(folder / "sd15")
    sampling = {"pipeline_args": {}}
    config = runs.config(folder, folder / "sd15", trainer=NFT, sampling=sampling, iterations=1, **QUIET)
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"pipeline_args": {}})})
    with pytest.raises(ValueError, match="diffusion_nft needs a flow-matching model; .* predicts epsilon"):
        run(config)
