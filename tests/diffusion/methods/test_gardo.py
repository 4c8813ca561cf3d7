"""GARDO: golden advantages and gates, who is over-rated, the share that pays, and a reference that follows."""

from typing import Any

import pytest
import torch

from genrl.diffusion.methods.gardo import train as gardo
from genrl.diffusion.methods.gardo.settings import Gate
from genrl.objectives.groups import group_advantages
from genrl.runtime.weights.weights import FOLLOWING, Weights
from genrl_rewards.scorers.pictures.dino import unlike
from tests.golden_cases import Arrays


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


def test_who_pays_who_gains_and_the_share_stays_within_its_bounds() -> None:
    """The best of the trained score and worst of the others pays; unlike samples gain, and bad ones do not."""
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
    assert share == settings.between[1]
    for mean in range(1, 60):
        share = gardo.next_share(settings, share, -float(mean), [0.0])
    assert share == settings.between[0] and gardo.next_share(settings, 0.1, 1.0, [0.0, 2.0]) == 0.1
    group = torch.tensor([0, 0, 0, 1, 1])
    advantage = torch.tensor([1.0, 1.0, -2.0, 1.0, -1.0], dtype=torch.float64)
    distance = torch.tensor([0.3, 0.1, 0.2, 0.0, 0.0], dtype=torch.float64)
    want = torch.tensor([1.5, 0.5, -2.0, 1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(gardo.diverse(advantage, distance, group), want)


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
