"""Flow-GRPO's options from inside: GRPO-Guard, DDPO, kinds of divergence, several rewards to one advantage."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.data.prompts import Prompt
from genrl.diffusion.evaluate import same_prompt
from genrl.diffusion.methods.ddpo import train as ddpo
from genrl.diffusion.methods.ddpo.train import prompt_advantages
from genrl.diffusion.methods.flow_grpo import train as flow_grpo
from genrl.diffusion.methods.gardo import train as gardo
from genrl.diffusion.methods.gardo.settings import Gate
from genrl.diffusion.methods.paco_grpo import train as paco_grpo
from genrl.diffusion.methods.paco_grpo.train import log_tame_advantages
from genrl.diffusion.steps.transitions import reference_kl, replayed
from genrl.objectives.groups import gdpo_advantages, group_advantages
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.weights.weights import FOLLOWING, Weights
from genrl_rewards.scorers.pictures.dino import unlike
from tests.diffusion import runs
from tests.diffusion.methods.watched import DIFFUSION, QUIET, resumed, run
from tests.golden_cases import Arrays
from tests.run_folders import tiered

GUARD = {"algorithm": "grpo_guard", "clip_range": 4e-6}
DDPO = {"algorithm": "ddpo"}


@pytest.mark.parametrize("updates", [1, 2])
def test_guard_measures_from_the_policy_that_sampled(folder: Path, model: Path, updates: int) -> None:
    """What a later update measures from are the means of the weights before the first."""
    trainer = {**GUARD, "updates_per_iteration": updates, "inner_epochs": 2}
    config = runs.config(folder, model, trainer=trainer, sampling={"group_size": 4}, iterations=1, **QUIET)
    seen = run(config)
    pieces = [piece for update in seen.updates for piece in update.pieces]
    later = [piece for piece in pieces if "old_mean" in piece.given]
    assert (len(pieces), len(later)) == (16, 16 - 8 // updates)  # of two epochs, four micro-batches and two steps
    with runs.opened(config.model_copy(update={"output": str(folder / "fresh")})) as opened, torch.no_grad():
        for key, parameter in opened.weights.named.items():
            parameter.copy_(seen.updates[0].weights[key])
        for piece in later:
            first = replayed(config.trainer, opened.policy, Recorded(piece.batch, piece.given))
            assert torch.equal(piece.given["old_mean"], first.mean)
    (row,) = runs.rows(Path(config.output))
    # 8 samples, 2 trained steps, 2 epochs; and once for the second update's samples before the first
    assert row["ratio/max_abs_dev"] > 0 and row["model_calls/train"] == 32 + (8 if updates == 2 else 0)


@pytest.mark.slow
def test_advantages_are_measured_against_the_prompts_last_rewards(folder: Path, sd: Path, monkeypatch: Any) -> None:
    """To which a run that goes on from a checkpoint returns."""
    sampling = {**DIFFUSION, "prompts_per_iteration": 4, "group_size": 1}
    common: dict[str, Any] = {"trainer": {**DDPO, "history": {"size": 4, "min_count": 3}}, "sampling": sampling}
    actual: list[Tensor] = []
    original = ddpo.advantages_of
    with monkeypatch.context() as patch:
        patch.setattr(ddpo, "advantages_of", lambda *given: actual.append(original(*given)) or actual[-1])
        seen = run(runs.config(folder, sd, iterations=4, **common, **QUIET))
    history: dict[str, list[float]] = {}
    for rollouts, advantages in zip(seen.rollouts, actual, strict=True):
        expected, history = prompt_advantages(rollouts.total, rollouts.prompts, history, buffer_size=4, min_count=3)
        assert torch.equal(advantages, expected) and advantages.abs().max() > 0
    assert all(len(kept) == 4 for kept in history.values())
    assert all(row["advantage/abs_mean"] > 0 and "zero_std_ratio" not in row for row in seen.rows)
    assert len(next(iter(seen.rollouts[0].mine.values())).pieces[0].trajectory.log_probs) == 3  # all steps but the last
    straight = resumed(runs.config(folder, sd, iterations=2, output=str(folder / "whole"), **common), folder)
    assert len(runs.last_state(straight).state["memory"]["prompt_rewards"]) == 4


def test_divergences_are_named_functions() -> None:
    """x_prediction is sigma^2 times velocity, k2 half the squared difference of log-probabilities."""
    one, other = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 3, 4)
    step = SimpleNamespace(sigma=torch.tensor(0.6), sigma_next=torch.tensor(0.4))
    new: Any = SimpleNamespace(mean=one, std=torch.tensor(0.5), model_output=2 * one, log_prob=one[:, 0, 0], step=step)
    square = one.square().flatten(1).mean(1)
    wanted = {"gaussian": 2 * square, "gaussian_dt": 0.2 * 2 * square, "mean_square": square, "velocity": 4 * square}
    for kind, value in (wanted | {"x_prediction": 0.6**2 * 4 * square}).items():
        torch.testing.assert_close(reference_kl(kind, new, other), value)
    torch.testing.assert_close(reference_kl("k2", new, other[:, 0, 0]), one[:, 0, 0] ** 2 / 2)


@pytest.mark.parametrize("aggregate", tiered(["gdpo", "log_tame", "log_tame_released"], ("gdpo", "log_tame_released")))
def test_several_rewards_to_one_advantage(folder: Path, model: Path, aggregate: str, monkeypatch: Any) -> None:
    actual: list[Tensor] = []
    algorithm, method = ("flow_grpo", flow_grpo) if aggregate == "gdpo" else ("paco_grpo", paco_grpo)
    original = method.advantages_of
    monkeypatch.setattr(method, "advantages_of", lambda *given: actual.append(original(*given)) or actual[-1])
    scale = "none" if aggregate == "log_tame_released" else "group"
    changes: dict[str, Any] = {"sampling": {"group_size": 4}, "iterations": 1, **QUIET}
    changes["trainer"] = {"algorithm": algorithm, "aggregate": aggregate, "advantage_scale": scale}
    rewards = [runs.reward(folder, "brightness", weight=2.0), runs.reward(folder, "redness", weight=0.5)]
    (rollouts,) = run(runs.config(folder, model, rewards=rewards, **changes)).rollouts
    (advantages,), parts = actual, list(rollouts.scored.values.values())
    expected = gdpo_advantages(parts, [2.0, 0.5], rollouts.group)
    if aggregate != "gdpo":
        variant: Any = "paper" if aggregate == "log_tame" else "released"
        expected = log_tame_advantages(parts, [2.0, 0.5], rollouts.group, variant=variant)
    assert torch.equal(advantages, expected) and advantages.abs().max() > 0
    summed = group_advantages(rollouts.total, rollouts.group, scale="group")
    assert not torch.allclose(advantages, summed, atol=1e-3)


def test_rows_of_one_prompt_are_a_group() -> None:
    """The same line of the file, not the same words in two lines (of other source pictures, for one)."""
    a, b, c = Prompt("a", {}, 1), Prompt("b", {}, 2), Prompt("a", {}, 3)
    assert same_prompt([a, a, b, b, c, c]) == [0, 0, 2, 2, 4, 4]


# -- GARDO: golden advantages and gates, who is over-rated, the share that pays, and a reference that follows
def test_golden_advantages(golden: Any) -> None:
    data = Arrays(golden("gardo"))
    group = data.given("prompt")
    distance = unlike(data.given("features"), group.tolist(), nearest=True)
    plain = group_advantages(data.given("reward")[:, 0], group, scale="none")
    data.check("advantage", gardo.diverse(plain, distance, group)[:, None], rtol=1e-7)


def test_golden_gates(golden: Any) -> None:
    """The released over-rating is the paper's with the other sign, times the number of samples; the share is right."""
    data, settings = Arrays(golden("gardo")), Gate(rewards=("a", "b"))
    share, before = settings.share, list[float]()
    for call in data.tags(r"(call\d+)_main"):
        released = data.given(f"{call}_u_as_released")
        others = [data.given(f"{call}_aux{k}") for k in (1, 2)]
        over = gardo.overrated(data.given(f"{call}_main"), others)
        torch.testing.assert_close(over, -released / len(released))
        mean = float(released[released >= 0].mean())
        share = gardo.next_share(settings, share, mean, before)
        before.append(mean)
        data.check(f"{call}_share", torch.tensor(share, dtype=torch.float64))
        data.check(f"{call}_gated_as_released", gardo.paying(released, share))
    data.all_used(r"call\d+_.*", but=r"call\d+_threshold")


def test_who_pays_and_the_share_stays_within_its_bounds() -> None:
    """The best of the trained score and worst of the others pays; what has no score does not."""
    score = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    over = gardo.overrated(score, [score.flip(0), score])
    torch.testing.assert_close(over, torch.tensor([-0.375, -0.125, 0.125, 0.375], dtype=torch.float64))
    assert gardo.paying(over, 0.1).tolist() == [False, False, False, True]
    assert not gardo.paying(gardo.overrated(score, [score]), 0.1).any()
    unscored = gardo.overrated(torch.tensor([torch.nan, 1.0, 2.0]), [torch.tensor([1.0, 2.0, torch.nan])])
    assert unscored.isnan().tolist() == [True, False, True] and not gardo.paying(unscored, 1.0)[[0, 2]].any()
    settings, share = Gate(rewards=("a",)), 0.1
    for mean in range(1, 30):
        share = gardo.next_share(settings, share, float(mean), [0.0, mean - 0.5])
    assert share == settings.between[1] and gardo.next_share(settings, 0.1, 1.0, [0.0, 2.0]) == 0.1


def test_the_reference_follows_where_the_divergence_is_large_or_time_is_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    weights = Weights({"w": parameter}, is_lora=True, reference=lambda: pytest.fail("it has moved"))

    class Run:
        pass

    run: Any = Run()
    run.weights, run.loop = weights, Run()
    run.loop.memory = {}
    moving, due = gardo.Moving(reset_kl=1.0, reset_every=3), list[int]()
    for step, kl in enumerate([0.5, 2.0, 0.5, 0.5, 0.5]):
        parameter.data.fill_(step)
        due.append(gardo.follow(run, moving, kl))
    assert due == [0, 1, 1, 1, 2]
    with weights.reference():
        assert parameter.item() == 4.0
    assert f"snapshot-{FOLLOWING}" in weights.state()
