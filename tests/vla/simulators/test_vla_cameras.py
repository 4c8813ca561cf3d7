"""Several cameras: from an environment, or a data set, to the pictures that a policy has names for. Clouds of points:
pixels to places, farthest points, what MuJoCo shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
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
from genrl.vla.simulators.mujoco_scenes import Box, cloud, farthest, placed, renderer
from genrl.vla.simulators.simulator import Simulator, headless
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
    with pytest.raises(Misuse, match="shows observation.images.top, which policy.rename leaves empty"):
        Simulator(kind(), Reading(chunk=1, image_size=8, cameras=("wrist",), left_empty=("top",))).begin(0)


def test_one_picture_of_several_is_refused_unless_it_is_drawn() -> None:
    with pytest.raises(Misuse, match=r"shows the cameras \['top', 'wrist'\], and the policy reads one"):
        Simulator(Shows(), Reading(chunk=1, image_size=8)).begin(0)
    shown = Simulator(Draws(), Reading(chunk=1, image_size=8)).begin(0).observation
    assert np.array_equal(shown["pixels"][0], grey("top", 8))
    for name in ("minitable", "metaworld", "maniskill"):
        with pytest.raises(ValueError, match=f"{name} has one camera.*policy.rename .observation.image: observation"):
            open_environment(Simulation(name, num_envs=1, chunk=1, image_size=8, cameras=("image", "image2")))


@pytest.mark.parametrize("kind", ["Shows", "Draws"])
def test_a_policy_sees_each_camera_under_the_name_that_it_has_for_it(kind: str, folder: Path, tmp_path: Path) -> None:
    policy = load_policy(folder, adapt=Adapt(rename=RENAME))
    assert set(policy.inputs) == {STATE, TOKENS, *RENAME}
    env = open_tables(config(tmp_path, kind), policy, num_envs=2)
    rollout = collect(env, policy, FlowSteps(steps=2), RolloutPlan(decisions=2, seed=0, iteration=0))
    env.close()
    for camera, colour in COLOURS.items():
        seen = rollout.observations[f"observation.images.{camera}"]
        assert seen.shape == (3, 2, 32, 32, 3) and (seen[..., -1, -1, :] == colour).all()
        assert (seen[..., 0, 0, :] == 0).all()
    batch, own = training_rows(rollout, torch.arange(2)), load_policy(folder)
    context = policy.encode(batch.observation)
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
    one = load_policy(folder, adapt=Adapt(rename={"observation.images.wrist": BASE}))
    assert one.left_empty == (WRIST,)
    write_dataset(
        tmp_path / "both", [Episode(["walk on"] * 6, columns | {WRIST: columns["observation.images.top"]})], fps=10
    )
    with pytest.raises(ValueError, match=f"policy.rename: it leaves {WRIST} empty by naming other pictures alone"):
        frames_of(config(tmp_path, demonstrations=Demonstrations(dataset=str(tmp_path / "both"))), one)
    plain = load_policy(folder)
    with pytest.raises(ValueError, match=r"policy.rename: .* has no pictures named .*base_0_rgb.*only"):
        frames_of(config(tmp_path, demonstrations=shown), plain)


headless()
SCENE = """<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="aslant" pos="0.6 -0.5 0.7" xyaxes="0.64 0.768 0 -0.5 0.42 0.757" fovy="50"/>
    <geom type="plane" size="2 2 0.1"/>
    <geom type="box" pos="0.1 0.05 0.1" size="0.12 0.08 0.1" euler="0 0 20"/>
  </worldbody>
</mujoco>"""


def test_pixels_become_places_and_the_farthest_are_taken() -> None:
    """A camera one metre over the origin that looks down, its up along y: right is x, and depth is along its axis."""
    near = {"frustum_near": 0.1, "frustum_top": 0.1, "frustum_bottom": -0.1, "frustum_center": 0.0}
    camera = SimpleNamespace(pos=(0, 0, 1), forward=(0, 0, -1), up=(0, 1, 0), frustum_width=0.0, **near)
    result = placed(np.array([[1.0, 1.0], [0.5, 1.0]], dtype=np.float32), camera)
    np.testing.assert_allclose(result, [[-0.5, 0.5, 0], [0.5, 0.5, 0], [-0.25, -0.25, 0.5], [0.5, -0.5, 0]], atol=1e-6)
    line = np.zeros((11, 3), dtype=np.float32)
    line[:, 0] = np.arange(11)
    assert farthest(line, 4)[:, 0].tolist() == [0, 10, 5, 2]  # of equally far ones the first
    few = farthest(line[:2], 5)
    assert few[:, 0].tolist() == [0, 1, 0, 0, 0]


@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="needs mujoco")
def test_a_boxs_corners_are_where_they_are() -> None:
    """Those that the camera sees, to a centimetre; and no point is off the surfaces."""
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    free = mujoco.MjvCamera()
    free.lookat[:], free.distance, free.azimuth, free.elevation = (0.1, 0.0, 0.1), 0.9, 130.0, -40.0
    turn, place, half = data.geom_xmat[1].reshape(3, 3), data.geom_xpos[1], model.geom_size[1]
    signs = np.array([[x, y, 1.0] for x in (-1, 1) for y in (-1, 1)])  # the top, which both cameras see
    corners = place + (signs * half) @ turn.T
    for camera in ("aslant", free):
        shown = renderer(mujoco, model, 200)
        shown.update_scene(data, camera=camera)
        box = Box((-0.3, -0.3, 0.01), (0.5, 0.5, 0.5))
        points = cloud(mujoco, shown, 4000, box)
        gaps = np.linalg.norm(points[None] - corners[:, None], axis=-1).min(1)
        assert gaps.max() < 0.01
        inside = np.abs((points - place) @ turn) - half
        assert np.abs(inside.max(1)).max() < 0.002  # on the box's faces
        again = cloud(mujoco, shown, 64, box)
        assert np.array_equal(again, cloud(mujoco, shown, 64, box)) and len(np.unique(again, axis=0)) == 64
        with pytest.raises(Misuse, match="sees nothing"):
            cloud(mujoco, shown, 8, Box((3.0, 3.0, 3.0), (4.0, 4.0, 4.0)))
        shown.close()


class ShowsPoints(Draws):
    def shown(self) -> dict[str, Any]:
        return super().shown() | {"environment_points": np.ones((5, 3))}


def test_an_environment_of_your_own_shows_points_or_is_told_to() -> None:
    seen = Simulator(ShowsPoints(), Reading(chunk=1, points=5)).begin(0).observation
    assert seen["environment_points"].shape == (1, 5, 3) and seen["environment_points"].dtype == np.float32
    with pytest.raises(Misuse, match=r"shows points \[5, 3\], the policy reads \[6, 3\]"):
        Simulator(ShowsPoints(), Reading(chunk=1, points=6)).begin(0)
    with pytest.raises(Misuse, match=r"shows no points: give it a method points\(count\)"):
        Simulator(Draws(), Reading(chunk=1, points=5)).begin(0)
