"""Other people's gymnasium environments by the same function: those that are installed, and how they are read."""

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from genrl.config import load
from genrl.vla.simulators.contract import Environment, Misuse, Reading, Simulation
from genrl.vla.simulators.simulator import Simulator, as_picture, find_registered, headless, is_function, named
from genrl.vla.simulators.tables import open_environment
from genrl.vla.train import train
from tests.run_folders import rows
from tests.vla.simulators.test_vla_workers import same

headless()


def needs(package: str, what: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: pip install '{what}'")


ROBOTICS = needs("gymnasium_robotics", "genrl-diffusion[robotics]")


def play(env: Environment, steps: int = 4, scale: float = 1.0, seed: int = 1) -> list[Any]:
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=seed)
    shown = [*observation.values(), env.task_description]
    for _ in range(steps):
        actions = scale * rng.uniform(-1, 1, (env.num_envs, env.chunk, env.action_dim)).astype(np.float32)
        observation, *rest = env.step(actions)
        shown += [*observation.values(), *rest[:3], rest[3]["n_executed"]]
    env.close()
    return shown


@needs("gym_pusht", "genrl-diffusion[pusht]")
def test_pusht() -> None:
    """Actions are places in pixels, [0, 512]; the goal is always the same, the start by the seed."""
    how: dict[str, Any] = {"num_envs": 4, "chunk": 4, "proprioception": 2, "instruction": "push the t to its place"}
    name = "gym_pusht/PushT-v0"
    env = open_environment(Simulation(name, group_size=2, image_size=96, max_steps=12, **how))
    observation, _ = env.reset(seed=1)
    assert env.action_dim == 2 and env.max_steps == 12 and env.task_description == ["push the t to its place"] * 4
    assert observation["pixels"].shape == (4, 96, 96, 3) and observation["environment_state"].shape == (4, 5)
    assert np.array_equal(observation["agent_pos"], observation["environment_state"][:, :2])
    assert np.array_equal(observation["pixels"][0], observation["pixels"][1])
    assert not np.array_equal(observation["pixels"][1], observation["pixels"][2])
    target = np.tile(np.float32([600.0, 100.0]), (4, 4, 1))  # clipped to the table
    for _ in range(3):
        observation, _, _, truncated, info = env.step(target)
    assert truncated.all() and info["n_executed"].tolist() == [4] * 4
    assert (observation["agent_pos"][:, 0] > 400).all() and (observation["agent_pos"] <= 512).all()
    assert env.render([0]).shape == (1, 128, 128, 3)
    env.close()
    assert open_environment(Simulation(name, **how)).max_steps == 300
    here = play(open_environment(Simulation(name, **how)), scale=500.0)
    assert same(here, play(open_environment(Simulation(name, workers=2, **how)), scale=500.0))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("metaworld", marks=needs("metaworld", "genrl-diffusion[metaworld]")),
        *(pytest.param(name, marks=ROBOTICS) for name in ("point_maze", "fetch", "reacher")),
    ],
)
def test_rollouts_do_not_depend_on_workers(name: str) -> None:
    how: dict[str, Any] = {"num_envs": 4, "chunk": 4, "group_size": 2, "max_steps": 8, "image_size": 32}
    here, there = (play(open_environment(Simulation(name, workers=workers, **how))) for workers in (0, 2))
    assert same(here, there)


def test_gymnasiums_own() -> None:
    """MountainCarContinuous says success by ending; its info does not, which is told with what there is."""
    assert find_registered("MountainCarContinuous-v0").max_episode_steps == 999
    env = open_environment(Simulation("MountainCarContinuous-v0", num_envs=1, chunk=2, max_steps=2))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"no 'is_success' in its info, only \[\]: set env"):
        env.step(np.zeros((1, 2, 1), dtype=np.float32))
    for name, text in {"FetchReech-v99": "pip install", "CartPole-v1": "space of vectors"}.items():
        with pytest.raises(ValueError, match=text):
            open_environment(Simulation(name, num_envs=1, chunk=2)).reset(seed=0)


def test_how_observations_are_named() -> None:
    vector, picture = np.arange(5.0), np.zeros((8, 8, 3), dtype=np.uint8)
    assert named(vector, 0, "x").keys() == {"agent_pos"} and named(vector, 0, "x")["agent_pos"].dtype == np.float32
    split = named(vector, 2, "x")
    assert split["agent_pos"].tolist() == [0, 1] and split["environment_state"].tolist() == [0, 1, 2, 3, 4]
    assert named(picture, 0, "x").keys() == {"pixels"}
    goal = {"observation": np.array([3.0]), "desired_goal": np.array([2.0]), "achieved_goal": np.array([1.0])}
    assert named(goal, 0, "x")["agent_pos"].tolist() == [1, 2, 3]
    own = {"pixels": {"top": picture}, "agent_pos": vector, "extra": "ignored"}
    assert named(own, 0, "x").keys() == {"pixels/top", "agent_pos"}
    assert named(own, 0, "x")["pixels/top"].shape == (8, 8, 3)
    with pytest.raises(Misuse, match="neither vectors nor one uint8 picture"):
        named({"a": vector, "b": picture}, 0, "x")
    with pytest.raises(Misuse, match="neither vectors"):
        named(np.zeros((3, 3)), 0, "x")
    with pytest.raises(Misuse, match="proprioception: 9"):
        named(vector, 9, "x")


class Blind(gymnasium.Env[np.ndarray, np.ndarray]):
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        return np.zeros(2), {}

    def render(self):
        return None


class Unseeded(Blind):
    def reset(self):  # type: ignore[override]
        return np.zeros(2), {}


def test_pictures_that_cannot_be_rendered_and_resets_without_a_seed_are_told() -> None:
    with pytest.raises(Misuse, match="render_mode"):
        Simulator(Blind(), Reading(chunk=1, image_size=32)).begin(0)
    with pytest.raises(Misuse, match="not int"):
        Simulator(3, Reading(chunk=1))  # type: ignore[arg-type]
    with pytest.raises(Misuse, match=r"cannot be given a seed.*reset\(self, \*, seed=None, options=None\)"):
        Simulator(Unseeded(), Reading(chunk=1))


class Wide(Blind):
    def __init__(self, by_itself: bool) -> None:
        self.by_itself = by_itself

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        shown = {"agent_pos": np.zeros(2)}
        return shown | ({"pixels": self.render()} if self.by_itself else {}), {}

    def render(self):
        return np.zeros((48, 64, 3), np.uint8)


@pytest.mark.parametrize("by_itself", [True, False], ids=["observed", "rendered"])
def test_a_policys_picture_is_not_squeezed(by_itself: bool) -> None:
    """Its longer side is fitted, the policy pads it as it does those of its data; films may be squeezed."""
    simulator = Simulator(Wide(by_itself), Reading(chunk=1, image_size=32))
    assert simulator.begin(0).observation["pixels"].shape == (1, 24, 32, 3)
    assert simulator.picture(32).shape == (32, 32, 3)
    shown = as_picture(np.arange(480 * 640 * 3, dtype=np.uint8).reshape(480, 640, 3), 640, "it", squeezed=False)
    assert shown.shape == (480, 640, 3), "what a policy of such pictures reads (ACT on ALOHA) is as it is"


def test_names() -> None:
    assert is_function("a/b.py:make") and is_function("minitable")
    assert not any(map(is_function, ("gym_pusht/PushT-v0", "gym_pusht:gym_pusht/PushT-v0", "FetchReach-v4")))


def test_the_example_of_the_documentation(root: Path) -> None:
    how: dict[str, Any] = {"tasks": ("red", "blue"), "num_envs": 4, "chunk": 4, "image_size": 32, "max_steps": 30}
    env = open_environment(Simulation(f"{root}/docs/example_simulator.py:make", workers=2, **how))
    observation, _ = env.reset(seed=0)
    assert sorted(env.task_description) == ["go to the blue corner"] * 2 + ["go to the red corner"] * 2
    goals = np.array([[0.8 if "red" in line else -0.8, 0.8] for line in env.task_description])
    done = np.zeros(4, dtype=bool)
    for _ in range(4):
        way = 5 * (goals - observation["agent_pos"])
        observation, _, terminated, _, info = env.step(np.clip(way, -1, 1)[:, None].repeat(4, 1).astype(np.float32))
        assert observation["pixels"].shape == (4, 32, 32, 3) and (observation["pixels"] == 0).all(-1).any((1, 2)).all()
        done |= terminated & info["is_success"]
    assert done.all()
    env.close()


UNLIKE = """
import gymnasium

def make(task):
    return gymnasium.make(task)
"""


@pytest.mark.slow
def test_one_policy_learns_two_simulators(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(root / "docs")
    monkeypatch.syspath_prepend(root / "docs")
    monkeypatch.setattr("sys.argv", ["example_two_simulators.py", "both"])
    runpy.run_path("docs/example_two_simulators.py", run_name="__main__")
    page = (root / "docs" / "vla_simulators.md").read_text(encoding="utf-8")
    text = page.split("# both_sft.yaml")[1].split("```")[0]
    (tmp_path / "both_sft.yaml").write_text("#" + text)
    last = rows(train(load(tmp_path / "both_sft.yaml", ["trackers=[]"])))[-1]
    assert last["eval/success/go_to_the_red_corner"] > 0.8 and last["eval/success/drive_up_the_hill"] > 0.8


def test_simulators_that_are_not_alike_are_refused(tmp_path: Path) -> None:
    (tmp_path / "unlike.py").write_text(UNLIKE)
    tasks = ("MountainCarContinuous-v0", "Pendulum-v1")
    how = {"tasks": tasks, "num_envs": 2, "chunk": 1, "max_steps": 9, "success_key": None, "reward": "environment"}
    env = open_environment(Simulation(f"{tmp_path}/unlike.py:make", **how))
    with pytest.raises(ValueError, match="all tasks of a run must show the same"):
        env.reset(seed=0)
    env.close()
