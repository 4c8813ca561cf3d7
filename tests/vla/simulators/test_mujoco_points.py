"""Clouds of points: pixels to places, farthest points, and what MuJoCo's simulators show of themselves."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from genrl.vla.data.demonstrations import demonstrated
from genrl.vla.policies.policy import POINTS
from genrl.vla.simulators.contract import Misuse, Reading, Simulation
from genrl.vla.simulators.mujoco_scenes import Box, cloud, farthest, placed, renderer
from genrl.vla.simulators.simulator import Simulator, headless
from genrl.vla.simulators.tables import open_environment

headless()
SCENE = """<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="aslant" pos="0.6 -0.5 0.7" xyaxes="0.64 0.768 0 -0.5 0.42 0.757" fovy="50"/>
    <geom type="plane" size="2 2 0.1"/>
    <geom type="box" pos="0.1 0.05 0.1" size="0.12 0.08 0.1" euler="0 0 20"/>
  </worldbody>
</mujoco>"""


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def test_pixels_become_places() -> None:
    """A camera one metre over the origin that looks down, its up along y: right is x, and depth is along its axis."""
    near = {"frustum_near": 0.1, "frustum_top": 0.1, "frustum_bottom": -0.1, "frustum_center": 0.0}
    camera = SimpleNamespace(pos=(0, 0, 1), forward=(0, 0, -1), up=(0, 1, 0), frustum_width=0.0, **near)
    found = placed(np.array([[1.0, 1.0], [0.5, 1.0]], dtype=np.float32), camera)
    np.testing.assert_allclose(found, [[-0.5, 0.5, 0], [0.5, 0.5, 0], [-0.25, -0.25, 0.5], [0.5, -0.5, 0]], atol=1e-6)


def test_farthest_points() -> None:
    line = np.zeros((11, 3), dtype=np.float32)
    line[:, 0] = np.arange(11)
    assert farthest(line, 4)[:, 0].tolist() == [0, 10, 5, 2]  # of equally far ones the first
    few = farthest(line[:2], 5)
    assert few[:, 0].tolist() == [0, 1, 0, 0, 0]


@needs("mujoco")
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


@pytest.mark.parametrize(
    ("name", "task", "where", "away"),
    [
        pytest.param("metaworld", "push-v3", slice(4, 7), 0.03, marks=needs("metaworld")),
        pytest.param("fetch", "push", slice(0, 3), 0.04, marks=needs("gymnasium_robotics")),
        pytest.param("point_maze", "umaze", slice(0, 2), 0.3, marks=needs("gymnasium_robotics")),
        pytest.param("reacher", "reach", slice(0, 2), 0.04, marks=needs("gymnasium_robotics")),
    ],
)
def test_simulators_show_what_they_know(name: str, task: str, where: slice, away: float) -> None:
    """There are points at the object (or the target) that the state tells of; demonstrations show the same."""
    env = open_environment(Simulation(name, num_envs=2, chunk=2, tasks=(task,), points=128))
    seen, _ = env.reset(seed=0)  # where no arm hides them
    env.close()
    points = seen["environment_points"]
    assert points.shape == (2, 128, 3) and points.dtype == np.float32
    goal = seen["environment_state"][:, where]
    gaps = np.linalg.norm(points[..., : goal.shape[1]] - goal[:, None], axis=-1).min(1)
    assert gaps.max() < away
    shown = next(iter(demonstrated(name, (task,), 1, seed=0, points=64).episodes))
    assert shown.columns[POINTS].shape[1:] == (64, 3)


class Bare(gymnasium.Env[Any, Any]):
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = spaces.Dict({"agent_pos": spaces.Box(-1.0, 1.0, (2,))})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {"agent_pos": np.zeros(2), **self.shown()}, {}

    def shown(self) -> dict[str, Any]:
        return {}


class Shows(Bare):
    def shown(self) -> dict[str, Any]:
        return {"environment_points": np.ones((5, 3))}


def test_an_environment_of_your_own_shows_points_or_is_told_to() -> None:
    seen = Simulator(Shows(), Reading(chunk=1, points=5)).begin(0).observation
    assert seen["environment_points"].shape == (1, 5, 3) and seen["environment_points"].dtype == np.float32
    with pytest.raises(Misuse, match=r"shows points \[5, 3\], the policy reads \[6, 3\]"):
        Simulator(Shows(), Reading(chunk=1, points=6)).begin(0)
    with pytest.raises(Misuse, match=r"shows no points: give it a method points\(count\)"):
        Simulator(Bare(), Reading(chunk=1, points=5)).begin(0)
