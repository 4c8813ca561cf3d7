"""V-PTR: the value function of videos by its formula, what is drawn, what is kept of it, and whole runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.mdp.noise import generator
from genrl.playground.minitable.world import TableWorld
from genrl.vla.methods.v_ptr import train as v_ptr
from genrl.vla.methods.v_ptr.train import ICVF, draw, icvf_errors, order, train_icvf
from genrl.vla.offline.regression import wayward_data
from genrl.vla.policies.encoder import LOOKS
from genrl.vla.policies.policy import ENVIRONMENT, IMAGE, STATE, TOKENS
from tests.vla.methods.test_vla_offline_trainers import small
from tests.vla.tiny_policies import SEES, flow


def test_the_errors_are_those_of_the_formula() -> None:
    """Worked by hand: a step towards the intent counts .9, one away from it .1; at a goal the value is 0 and ends."""
    values = torch.tensor([[-2.0, -2.0, -1.0], [-3.0, -3.0, -1.0]], requires_grad=True)
    following = torch.tensor([[-1.0, -1.0, -9.0], [-2.0, -2.0, -9.0]])
    # advantages: -1 + .5 * min(-2, -4) - mean(-4, -6) = 2;  -1 + .5 * -8 - -4 = -1;  at the intent 0 - -1 = 1
    next_intent = torch.tensor([[-2.0, -8.0, -5.0], [-4.0, -6.0, -5.0]])
    intent = torch.tensor([[-4.0, -4.0, -1.0], [-6.0, -4.0, -1.0]])
    there = torch.tensor([False, False, True])
    found = icvf_errors(values, following, intent, next_intent, there, there, discount=0.5, expectile=0.9)
    # targets: -1 + .5 * -1 = -1.5 and -1 + .5 * -2 = -2; at the goal 0
    squares = torch.tensor([0.5**2 + 1.0**2, 0.5**2 + 1.0**2, 1.0 + 1.0])
    torch.testing.assert_close(found, squares * torch.tensor([0.9, 0.1, 0.9]))
    found.sum().backward()
    assert values.grad is not None and values.grad[0].tolist() == pytest.approx([-0.9, -0.1, -1.8])


def test_goals_are_the_frame_itself_a_later_one_or_one_of_another_video() -> None:
    videos, frames, count = 50, 9, 4000
    drawn = draw(videos, frames, count, generator(0, "x"))
    assert torch.equal(drawn.following, drawn.now + 1)
    assert torch.equal(drawn.now // frames, drawn.following // frames), "a step leaves its video"
    assert torch.equal(drawn.now // frames, drawn.later // frames) and bool((drawn.later >= drawn.now).all())
    assert set((drawn.later % frames).tolist()) == set(range(frames))
    own = torch.arange(count)
    for which in (drawn.goal, drawn.intent):
        assert abs(float((which == own).float().mean()) - 0.2) < 0.03
        assert abs(float((which == count + own).float().mean()) - 0.5) < 0.03
        assert int(which.max()) < 2 * count
    same = float((drawn.goal == drawn.intent).float().mean())
    assert abs(same - (0.5 + 0.5 * (0.2**2 + 0.5**2))) < 0.03


def crossing() -> torch.Tensor:
    """A red square goes from left to right, at another height in every video."""
    shown = torch.full((16, 13, 16, 16, 3), 230, dtype=torch.uint8)
    for n in range(16):
        for t in range(13):
            shown[n, t, n % 12 : n % 12 + 4, t : t + 4] = torch.tensor([200, 40, 40], dtype=torch.uint8)
    return shown


def test_values_learn_what_is_near_and_move_what_looks() -> None:
    """With these weights the end is worth less in the middle at first. What reads instructions stays."""
    policy = flow(replace(SEES, image=16), seed=2)
    torch.manual_seed(2)
    icvf = ICVF(copy.deepcopy(policy.encoder))
    assert order(icvf, crossing()) < 0.2
    losses = list(train_icvf(icvf, crossing(), steps=25, seed=2))
    assert order(icvf, crossing()) > 0.8 and len(losses) == 25 and all(0 < loss < 20 for loss in losses)
    before = policy.encoder.state_dict()
    moved = {name for name, value in icvf.encoder.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.split(".")[0] + "." for name in moved} == set(LOOKS)


def test_videos_are_pictures_of_play_alone() -> None:
    shown = v_ptr.videos(TableWorld(), 6, 32, seed=1)
    assert shown.shape == (6, 41, 32, 32, 3) and shown.dtype == torch.uint8
    assert all(len(video.flatten(1).unique(dim=0)) > 5 for video in shown), "nobody plays"
    assert torch.equal(shown, v_ptr.videos(TableWorld(), 6, 32, seed=1))
    assert not torch.equal(shown, v_ptr.videos(TableWorld(), 6, 32, seed=2))


@pytest.mark.parametrize("kind", ["video", "imitation", "random"])
def test_only_what_looks_is_taken_over(root: Path, tmp_path: Path, kind: str) -> None:
    settings = small(root, "v_ptr", tmp_path, f"trainer.encoder={kind}")
    policy: Any = v_ptr.new_policy(settings)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    data = wayward_data(settings, 12, 0.5, policy, 4)
    found = v_ptr.pretrained(TableWorld(), policy, data, settings.trainer, seed=0)  # type: ignore[arg-type]
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert bool(moved) == (kind != "random")
    assert all(name.startswith(tuple(f"encoder.{part}" for part in LOOKS)) for name in moved)
    told = {"video": {"pretraining/loss", "pretraining/order"}, "imitation": {"pretraining/loss"}, "random": set()}
    assert set(found) == told[kind]


def test_critics_see_the_features_of_the_encoder(root: Path, tmp_path: Path) -> None:
    settings = small(root, "v_ptr", tmp_path)
    policy: Any = v_ptr.new_policy(settings)
    data = wayward_data(settings, 12, 0.5, policy, 4)
    seen = v_ptr.with_features(policy, data)
    assert set(seen.observation) == {STATE, TOKENS, ENVIRONMENT} and seen.observation[ENVIRONMENT].shape[1] == 128
    one = policy.encoder.look(data.next_observation[IMAGE][3:4], torch.zeros(1, 64))
    torch.testing.assert_close(seen.next_observation[ENVIRONMENT][3:4], one.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(seen.action, data.action) and 0 < float(data.reward.sum()) <= 12
