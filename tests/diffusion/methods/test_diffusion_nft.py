"""DiffusionNFT from inside: its noisy states, its old policy, its costs. Its gradient: `test_forward_trainers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.diffusion.forward.noising import own_noise
from genrl.diffusion.methods.diffusion_nft import train as diffusion_nft
from genrl.diffusion.methods.diffusion_nft.train import levels
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch
from genrl.runtime.folder.run import read_metrics
from tests.diffusion import runs
from tests.diffusion.methods.watched import EIGHT, QUIET, equal, run

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

NFT = {"algorithm": "diffusion_nft", "beta": 0.5, "kl_weight": 0.0, "advantage_scale": "global"}


# -- the gradient, by other means ------------------------------------------------------------------------------------


def test_noisy_states_are_on_the_straight_path(folder: Path, model: Path) -> None:
    """x_t = (1 - t) x_0 + t eps, with t from the sampling grid and unit noise, distinct levels per sample."""
    sampling = {**EIGHT, "num_inference_steps": 5, "batch_size": 8}
    seen = run(runs.config(folder, model, trainer=NFT, sampling=sampling, iterations=1, **QUIET))
    recorded = next(iter(seen.rollouts[0].mine.values()))
    assert not recorded.pieces[0].trajectory.log_probs  # sampling is deterministic
    pieces = seen.updates[0].pieces
    levels = torch.stack([piece.given["sigma"] for piece in pieces])
    assert levels.shape == (4, 8)  # all levels but one, per sample
    assert all(len(set(levels[:, row].tolist())) == 4 for row in range(8))
    assert set(levels.flatten().tolist()) == set(recorded.sigmas[:-1].tolist())
    assert len({tuple(levels[:, row].tolist()) for row in range(8)}) > 1
    given = [(piece.given["noisy"], piece.given["sigma"].view(-1, 1, 1, 1)) for piece in pieces]
    noise = torch.stack([(noisy - (1 - s) * recorded.final) / s for noisy, s in given])
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
    old = seen.updates[0].snapshots["old"]
    for decay, present, after in zip(decays, (seen.updates[2].weights, seen.weights), seen.snapshots, strict=True):
        for key, tensor in after["old"].items():
            expected = decay * old[key].double() + (1 - decay) * present[key].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-8)
        old = after["old"]


def test_samples_come_from_the_old_policy(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an old policy that never follows, every iteration samples from the model that training began from."""
    monkeypatch.setattr(diffusion_nft, "nft_old_policy_decay", lambda step, kind: 1.0)
    config = runs.config(folder, model, trainer=NFT, iterations=2, **QUIET)
    seen = run(config)
    fresh = config.model_copy(update={"output": str(folder / "fresh")})
    with runs.opened(fresh) as opened, torch.no_grad():
        for one in (one for rollouts in seen.rollouts for one in rollouts.mine.values()):
            assert torch.equal(opened.policy.roll_out(one.batch).final, one.final)
    assert not equal(seen.weights, seen.snapshots[-1]["old"])


# -- settings --------------------------------------------------------------------------------------------------------


def test_scores_without_spread_change_nothing_and_calls_are_counted(folder: Path, model: Path) -> None:
    """r = 1/2 pulls towards and away from each sample alike: at the old policy the two cancel to the bit."""
    trainer = {**NFT, "kl_weight": 1e-3, "timesteps_per_sample": 1, "inner_epochs": 2}
    changes: dict[str, Any] = {"trainer": trainer, "sampling": {"num_inference_steps": 4}, "iterations": 1, **QUIET}
    seen = run(runs.config(folder, model, **changes))
    assert len(seen.updates) == 2 and all(len(update.pieces) == 2 for update in seen.updates)
    (row,) = read_metrics(folder / "run" / "metrics.jsonl")
    assert row["updates"] == 2 and row["model_calls/sample"] == 16  # 4 samples x 4 steps
    # 4 samples x 1 level x 2 epochs: new and reference, and the old policy where it is not the present one
    assert row["model_calls/train"] == 16 + 4
    still = {"rewards": [runs.reward(folder, "nothing")], "optimizer": {"lr": 1e-2, "weight_decay": 0}}
    seen = run(runs.config(folder, model, **changes, **still, output=str(folder / "still")))
    assert seen.rows[0]["zero_std_ratio"] == 1.0 and seen.rows[0]["nft/reward_weight_mean"] == 0.5
    assert equal(seen.updates[0].weights, seen.weights)
