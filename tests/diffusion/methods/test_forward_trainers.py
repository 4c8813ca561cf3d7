"""AWM, DGPO, CRD, DPO, D3PO and DiffusionNFT from inside: gradients computed a second time by other means, settings."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.diffusion.forward.noising import own_noise
from genrl.diffusion.methods.crd import train as crd
from genrl.diffusion.methods.crd.settings import CRD
from genrl.diffusion.methods.diffusion_nft import train as diffusion_nft
from genrl.diffusion.methods.diffusion_nft.train import levels
from genrl.diffusion.policy.policy import Policy, without_guidance
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.kernels import flow_sde
from genrl.objectives import matching, preferences
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop.recorded import Recorded
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import EIGHT, QUIET, Bare, Given, Update, equal, relative, run
from tests.run_folders import tiered

TWO = {"updates_per_iteration": 2}
KL = {"kl_weight": 0.3}
TRAINERS: dict[str, dict[str, Any]] = {
    "awm": {"algorithm": "awm", "timesteps_per_sample": 2, "kl_weight": 0.3, "ema_kl_weight": 0.2, **TWO},
    "dgpo": {"algorithm": "dgpo", "first_steps": 3, "timesteps_per_sample": 2, "clip_range": 0.5, **KL, **TWO},
    "crd": {"algorithm": "crd", **KL, **TWO},
    "dpo": {"algorithm": "dpo", "timesteps_per_sample": 2, **TWO},
    "d3po": {"algorithm": "d3po", "kernel": "flow_sde", "noise_level": 0.7, "beta": 2.0, **TWO},
    "diffusion_nft": {"algorithm": "diffusion_nft", "beta": 0.5, "advantage_scale": "global", **KL, **TWO},
}


def mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


Loss = Callable[[Bare, Update, list[str], Given, dict[str, Any]], Tensor]


def velocities(bare: Bare, update: Update, prompts: list[str], given: Given, *names: str) -> list[Tensor]:
    """Of the weights in training, of the model that training began with, and of these snapshots."""
    state = prompts, given["noisy"], given["sigma"]
    with torch.no_grad():
        others = [bare.under(values, *state) for values in (None, *(update.snapshots[name] for name in names))]
    return [bare.under(update.weights, *state), *others]


def awm_loss(bare: Bare, update: Update, prompts: list[str], given: Given, t: dict[str, Any]) -> Tensor:
    def log_prob(v: Tensor) -> Tensor:
        return -((mean((v - given["target"]) ** 2) + 1e-10) ** 0.25 - 1e-10**0.25) * given["sigma"] / 0.25

    new, reference, ema, old = velocities(bare, update, prompts, given, "ema_reference", "old")
    distances = 0.3 * mean((new - reference) ** 2) + 0.2 * mean((new - ema) ** 2)
    return -t["advantage"] / 5 * torch.exp(log_prob(new) - log_prob(old)) + distances


def dgpo_loss(bare: Bare, update: Update, prompts: list[str], given: Given, t: dict[str, Any]) -> Tensor:
    new, reference, ema = velocities(bare, update, prompts, given, "ema_reference")
    u, advantage = given["target"], t["advantage"]
    error = mean((new - u) ** 2)
    order = 100 * (advantage * (error.detach() - mean((reference - u) ** 2))).mean()  # one group is one piece
    assert float((mean((ema - u) ** 2) - error.detach()).abs().max()) < 0.4  # no clip at 0.5
    return torch.sigmoid(order) * advantage * error + 0.3 * mean((new - reference) ** 2)


def crd_loss(bare: Bare, update: Update, prompts: list[str], given: Given, t: dict[str, Any]) -> Tensor:
    new, reference, old = velocities(bare, update, prompts, given, "old")
    aim = t["advantage"].clamp(-5, 5) / 10 + 0.5
    implicit = matching.implicit_reward(new, old, given["target"])
    centres = matching.group_centres(implicit, aim, torch.zeros(len(aim)).long())  # one group is one piece
    weight = matching.reward_adaptive_weight(aim, 0.3)
    return 5 * matching.crd_loss(implicit, aim, centres) + weight * mean((new - reference) ** 2)


def test_the_loss_of_crd_is_where_the_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.zeros(2, 3, device="meta")
    monkeypatch.setattr(crd, "group_centres", lambda *_: matching.Centre(there[:, 0], there[:, 0]))
    given = dict.fromkeys(("noisy", "sigma", "target", "old"), there) | {"aim": there[:, 0]}
    recorded = Recorded(None, given | {"group": torch.tensor([0, -1])})
    policy: Any = SimpleNamespace(velocity=lambda *_: there)
    assert crd.loss(CRD(kl_weight=0), policy, recorded)["loss"].device.type == "meta"


def dpo_loss(bare: Bare, update: Update, prompts: list[str], given: Given, t: dict[str, Any]) -> Tensor:
    (win, lose), (ref_win, ref_lose) = (
        mean((v - given["target"]) ** 2) for v in velocities(bare, update, prompts, given)
    )
    return -torch.nn.functional.logsigmoid(-50 * ((win - lose) - (ref_win - ref_lose)))[None]


def d3po_loss(bare: Bare, update: Update, prompts: list[str], given: Given, t: dict[str, Any]) -> Tensor:
    i, x = int(given["step"]), given["state"]
    s, s_next, largest = t["sigmas"][i], t["sigmas"][i + 1], t["sigmas"][1]

    def log_prob(values: Given | None) -> Tensor:
        step = flow_sde(x, bare.under(values, prompts, x, s), s, s_next, noise_level=0.7, sigma_max=largest)
        squares = (given["next_state"] - step.mean) ** 2 / (2 * step.std**2)
        return mean(-squares - step.std.log().expand_as(squares) - 0.5 * torch.log(torch.tensor(2 * torch.pi)))

    reference = log_prob(None)
    new = log_prob(update.weights)
    pairs = [(a, b) if t["reward"][a] > t["reward"][b] else (b, a) for a, b in combinations(range(4), 2)]
    win, lose = (list(side) for side in zip(*pairs, strict=True))
    sides = new[win], reference[win], new[lose], reference[lose]
    return preferences.step_preference_loss(*sides, torch.ones(len(win)), beta=2.0, clip=0.1).loss


def nft_loss(bare: Bare, update: Update, prompts: list[str], given: Given, t: dict[str, Any]) -> Tensor:
    new, reference, old = velocities(bare, update, prompts, given, "old")
    weight = matching.nft_reward_weight(t["advantage"])
    matched = matching.diffusion_nft_loss(new, old, given["noisy"], t["clean"], given["sigma"], weight, beta=0.5)
    return matched + 0.3 * mean((new - reference) ** 2)


LOSSES: dict[str, Loss] = {
    "awm": awm_loss, "dgpo": dgpo_loss, "crd": crd_loss, "dpo": dpo_loss, "d3po": d3po_loss, "diffusion_nft": nft_loss,
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(LOSSES, ("diffusion_nft",)))
def test_gradient_of_the_updates(folder: Path, model: Path, name: str) -> None:
    """On policy and, in the second, off it; what is noised comes from the trainer, outputs and formulas from here."""
    config = runs.config(folder, model, trainer=TRAINERS[name], sampling=EIGHT, iterations=1, **QUIET)
    seen = run(config)
    (rollouts,), bare = seen.rollouts, Bare(config)
    groups = rollouts.total.view(2, 4)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (rollouts.total.std(correction=0) + 1e-4)).flatten().float()
    assert len(seen.updates) == 2
    for position, update in enumerate(seen.updates):
        part = rollouts.mine[position]
        tensors = {"advantage": advantages[part.slots], "reward": rollouts.total[part.slots]}
        tensors |= {"sigmas": part.sigmas, "clean": part.final}
        assert len(update.pieces) == 2
        total = {key: torch.zeros_like(p) for key, p in bare.named.items()}
        for piece in update.pieces:
            prompts, given = list(piece.batch.prompts), piece.given
            if name not in ("d3po", "diffusion_nft"):
                pair = [int(tensors["reward"].argmax()), int(tensors["reward"].argmin())]
                rows = pair if name == "dpo" else list(range(4))
                check_noised(part.final[rows], given, same=name in ("dgpo", "dpo"))
                assert prompts == [part.batch.prompts[row] for row in rows]
            loss = LOSSES[name](bare, update, prompts, given, tensors).mean() / len(update.pieces)
            for key, gradient in bare.gradient(loss).items():
                total[key] += gradient
        assert relative(update.gradient, total) < 2e-5
    first, second = seen.updates
    assert not equal(second.weights, first.weights)


def check_noised(clean: Tensor, given: Given, *, same: bool) -> None:
    """x_t = (1 - t) x_0 + t eps, with unit noise, the same or another for each sample; the target is eps - x_0."""
    sigma = given["sigma"].view(-1, *[1] * (clean.dim() - 1)) if given["sigma"].dim() else given["sigma"]
    noise = given["target"] + clean
    torch.testing.assert_close(given["noisy"], (1 - sigma) * clean + sigma * noise)
    assert abs(float(noise.mean())) < 0.3 and abs(float(noise.std()) - 1) < 0.2
    assert bool((noise == noise[:1]).all()) == same or float((noise - noise[:1]).abs().max()) < 1e-5
    assert same or float((noise[1] - noise[0]).abs().max()) > 0.5


@pytest.mark.parametrize("name", ["dpo", "d3po"])
def test_groups_without_pairs_leave_no_trace_in_the_metrics(folder: Path, model: Path, name: str) -> None:
    """A sharded model is evaluated for them too, so that every process calls it as often; the rows are the same."""
    score = "[float(i.mean()) * (p != 'a cat') for i, p in zip(images, prompts)]"
    (folder / "half.py").write_text(f"def half(images, prompts):\n    return {score}\n")
    (folder / "train.txt").write_text("a cat\na red star\n")
    trainer = {**TRAINERS[name], "updates_per_iteration": 1}  # an update without any pair is left out by all
    changes: dict[str, Any] = {"trainer": trainer, "rewards": [{"name": f"{folder / 'half.py'}:half"}]}
    changes |= {"sampling": EIGHT, "iterations": 1}

    def sharded(opened: DiffusionRun) -> None:
        opened.weights.in_step = True

    plain = run(runs.config(folder, model, output=str(folder / "plain"), **changes, **QUIET))
    padded = run(runs.config(folder, model, output=str(folder / "padded"), **changes, **QUIET), sharded)
    (one,), (other,) = plain.updates, padded.updates
    assert len(other.pieces) > len(one.pieces) > 0
    assert plain.rows == padded.rows and plain.rows[0]["preference/pairs"] == 0.5


@pytest.mark.parametrize("name", TRAINERS)
def test_models_that_are_no_flow_are_trained_by_preferences_alone(folder: Path, sd: Path, name: str) -> None:
    """An epsilon prediction with guidance, which is off in DPO's training."""
    trainer = {**TRAINERS[name], "updates_per_iteration": 1}
    if name == "d3po":
        trainer |= {"kernel": "ddim", "noise_level": 1.0}
    sampling = {"pipeline_args": {}, "guidance_scale": 3.0}
    config = runs.config(folder, sd, trainer=trainer, iterations=1, **QUIET)
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update=sampling)})
    if name not in ("dpo", "d3po"):
        with pytest.raises(ValueError, match=f"{name} needs a flow-matching model; .* predicts epsilon"):
            run(config)
        return
    seen = run(config)
    assert all(row["grad_norm"] > 0 for row in seen.rows)
    if name == "dpo":
        given = seen.updates[0].pieces[0].given
        assert not given["sigma"].is_floating_point() and float(given["target"].std()) == pytest.approx(1, abs=0.2)


def test_guidance_that_is_an_input_of_the_model_stays(folder: Path) -> None:
    """`guidance_in_training: false` leaves out a second prediction; FLUX.1-dev has none, its scale is a condition."""
    flux, sampling = folder / "flux", {"guidance_scale": 3.5, "pipeline_args": {"max_sequence_length": 16}}
    FAMILIES["flux"]().pipe.save_pretrained(flux)
    trainers = {name: {**TRAINERS[name], "updates_per_iteration": 1} for name in ("dgpo", "dpo")}
    trainers["flow_grpo"] = {"algorithm": "flow_grpo", "guidance_in_training": False}
    common: dict[str, Any] = {"iterations": 1, **QUIET}
    for name, trainer in trainers.items():
        config = runs.config(folder, flux, trainer=trainer, sampling=sampling, output=str(folder / name), **common)
        pieces = [piece for update in run(config).updates for piece in update.pieces]
        assert {piece.batch.sampling["guidance_scale"] for piece in pieces} == {3.5}, name
    policy, batch = Policy(FAMILIES["sd3"]().pipe), Batch(["a"], [(0,)], {"guidance_scale": 3.5})
    assert without_guidance(policy, batch).sampling == {"guidance_scale": 1.0}


NFT = {"algorithm": "diffusion_nft", "beta": 0.5, "kl_weight": 0.0, "advantage_scale": "global"}


def test_noisy_states_are_on_the_straight_path(folder: Path, model: Path) -> None:
    """x_t = (1 - t) x_0 + t eps, with t from the sampling grid and unit noise, distinct levels per sample."""
    sampling = {**EIGHT, "num_inference_steps": 5, "batch_size": 8}
    seen = run(runs.config(folder, model, trainer=NFT, sampling=sampling, iterations=1, **QUIET))
    recorded = next(iter(seen.rollouts[0].mine.values()))
    pieces = seen.updates[0].pieces
    levels = torch.stack([piece.given["sigma"] for piece in pieces])
    assert levels.shape == (4, 8)  # all levels but one, per sample
    assert all(len(set(levels[:, row].tolist())) == 4 for row in range(8))
    assert set(levels.flatten().tolist()) == set(recorded.sigmas[:-1].tolist())
    given = [(piece.given["noisy"], piece.given["sigma"].view(-1, 1, 1, 1)) for piece in pieces]
    noise = torch.stack([(noisy - (1 - s) * recorded.final) / s for noisy, s in given])
    assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - 1) < 0.05
    assert (torch.corrcoef(noise.flatten(0, 1).flatten(1)) - torch.eye(32)).abs().max() < 0.4


def test_draws_do_not_depend_on_the_neighbours() -> None:
    clean, grid = torch.randn(3, 4, 8, 8), torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])

    def draws(rows: list[int], epoch: int = 0) -> list[tuple[Tensor, Tensor]]:
        batch = Batch(["a"] * len(rows), [(3, 0, r) for r in rows], {})
        one = MicroBatch(rows, batch, clean[rows], grid, [], clean[rows])
        return [(sigma, own_noise(one, epoch, k)) for k, sigma in enumerate(levels(one, epoch))]

    first, second = draws([0, 1, 2]), draws([0, 1, 2], epoch=1)
    for (sigma, noise), (sigma_alone, noise_alone) in zip(first, draws([2]), strict=True):
        assert sigma[2] == sigma_alone[0] and torch.equal(noise[2], noise_alone[0])
    assert not torch.equal(first[0][1], second[0][1])
    assert not torch.equal(*(torch.stack([sigma for sigma, _ in one]) for one in (first, second)))


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
