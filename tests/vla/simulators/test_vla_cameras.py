"""Several cameras: from an environment, or a data set, to the pictures that a policy has names for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.vla.config.schema import VLAConfig
from genrl.vla.config.sections import Demonstrations
from genrl.vla.data.demonstrations import frames_of
from genrl.vla.data.lerobot_dataset import Episode, write_dataset
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import STATE, TOKENS
from genrl.vla.rollout.collect import RolloutPlan, collect, training_rows
from genrl.vla.rollout.sampling import FlowSteps
from genrl.vla.setup import open_tables
from genrl.vla.simulators.contract import Misuse, Reading, Simulation
from genrl.vla.simulators.simulator import Simulator
from genrl.vla.simulators.tables import open_environment
from tests.vla import vla_runs
from tests.vla.published import pi_folder
from tests.vla.two_cameras import COLOURS, Draws, Shows, grey

BASE, WRIST = "observation.images.base_0_rgb", "observation.images.left_wrist_0_rgb"
RENAME = {"observation.images.top": BASE, "observation.images.wrist": WRIST}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pi0")
    pi_folder(path, adaptive=False)
    return path


def config(place: Path, kind: str = "Draws", **changes: Any) -> VLAConfig:
    one = vla_runs.config(place)
    name = f"{Path(__file__).parents[1] / 'two_cameras.py'}:{kind}"
    env = one.environment.model_copy(update={"name": name, "tasks": None, "chunk": 4})
    return one.model_copy(update={"environment": env, **changes})


@pytest.mark.parametrize("kind", [Shows, Draws])
def test_pictures_are_those_of_the_cameras_that_are_asked_for(kind: type) -> None:
    for cameras in (("top", "wrist"), ("wrist",)):
        shown = Simulator(kind(), Reading(chunk=1, image_size=8, cameras=cameras)).begin(0).observation
        assert set(shown) == {"agent_pos", *(f"pixels/{name}" for name in cameras)}
        assert all(np.array_equal(shown[f"pixels/{name}"][0], grey(name, 8)) for name in cameras)
    assert set(Simulator(kind(), Reading(chunk=1)).begin(0).observation) == {"agent_pos"}
    with pytest.raises(Misuse, match=r"'wirst' \(the nearest is 'wrist'\), it shows .*images.top'.*policy.rename"):
        Simulator(kind(), Reading(chunk=1, image_size=8, cameras=("wirst",))).begin(0)


def test_one_picture_of_several_is_refused_unless_it_is_drawn() -> None:
    with pytest.raises(Misuse, match=r"shows the cameras \['top', 'wrist'\], and the policy reads one"):
        Simulator(Shows(), Reading(chunk=1, image_size=8)).begin(0)
    shown = Simulator(Draws(), Reading(chunk=1, image_size=8)).begin(0).observation
    assert np.array_equal(shown["pixels"][0], grey("top", 8))
    for name in ("minitable", "metaworld", "maniskill"):
        with pytest.raises(
            ValueError, match=f"{name} has one camera.*policy.rename .observation.image: observation.im"
        ):
            open_environment(Simulation(name, num_envs=1, chunk=1, image_size=8, cameras=("image", "image2")))


@pytest.mark.parametrize("kind", ["Shows", "Draws"])
def test_a_policy_sees_each_camera_under_the_name_that_it_has_for_it(kind: str, folder: Path, tmp_path: Path) -> None:
    policy = load_policy(folder, adapt=Adapt(rename=RENAME))
    assert set(policy.inputs) == {STATE, TOKENS, *RENAME}
    env = open_tables(config(tmp_path, kind), policy, num_envs=2)
    sampler = FlowSteps(steps=2)
    rollout = collect(env, policy, sampler, RolloutPlan(decisions=2, seed=0, iteration=0))
    env.close()
    for camera, colour in COLOURS.items():
        seen = rollout.observations[f"observation.images.{camera}"]
        assert (
            seen.shape == (3, 2, 32, 32, 3)
            and (seen[..., -1, -1, :] == colour).all()
            and (seen[..., 0, 0, :] == 0).all()
        )
    batch = training_rows(rollout, torch.arange(2))
    context = policy.encode(batch.observation)
    again = sampler.replay(policy, context, batch.states, batch.next_states, batch.step_index)
    assert torch.equal(again.log_prob.detach(), batch.log_prob)
    own = load_policy(folder)
    seen = {RENAME.get(name, name): value for name, value in batch.observation.items()}
    swapped = seen | {BASE: seen[WRIST], WRIST: seen[BASE]}
    assert torch.equal(own.encode(seen)["keys"], context["keys"])
    assert not torch.equal(own.encode(swapped)["keys"], context["keys"])
    save_policy(policy, tmp_path / "saved")
    assert load_policy(tmp_path / "saved").inputs == policy.inputs  # the names go with the folder


def test_columns_of_a_data_set_are_the_same_pictures(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(folder, adapt=Adapt(rename=RENAME))
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {name: np.stack([grey(name.split(".")[-1], 32)] * 6) for name in RENAME}
    columns |= {"observation.state": rng.normal(size=(6, 5)).astype(np.float32)}
    columns |= {"action": rng.normal(size=(6, 3)).astype(np.float32)}
    write_dataset(tmp_path / "shown", [Episode(["walk on"] * 6, columns)], fps=10)
    shown = Demonstrations(dataset=str(tmp_path / "shown"))
    frames, _ = frames_of(config(tmp_path, demonstrations=shown), policy)
    assert set(frames) >= {*policy.inputs, "action"}
    for camera, colour in COLOURS.items():
        assert (frames[f"observation.images.{camera}"][:, -1, -1] == colour).all()
    plain = load_policy(folder)
    with pytest.raises(ValueError, match=r"policy.rename: .* has no pictures named .*base_0_rgb.*only"):
        frames_of(config(tmp_path, demonstrations=shown), plain)
