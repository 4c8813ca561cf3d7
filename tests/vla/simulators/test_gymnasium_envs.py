"""Other people's gymnasium environments by the same function: how they are read, and what an expert would do from here:
told in every slot, whatever process has it; nothing moves."""

import re
import runpy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from genrl.config import load
from genrl.playground.minitable import MiniTable, expert_chunk
from genrl.vla.simulators.contract import Misuse, Reading, Simulation
from genrl.vla.simulators.simulator import Simulator, as_picture, find_registered, headless, is_function, named
from genrl.vla.simulators.tables import open_environment
from genrl.vla.train import train
from tests.run_folders import rows, tiered
from tests.vla.frail import Frail

headless()


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


def test_how_observations_and_environments_are_named() -> None:
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
    assert is_function("a/b.py:make") and is_function("minitable")
    assert not any(map(is_function, ("gym_pusht/PushT-v0", "gym_pusht:gym_pusht/PushT-v0", "FetchReach-v4")))


class Shows(gymnasium.Env[Any, np.ndarray]):
    """Nothing moves; it shows and draws what it is made with."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, shown: Any, picture: np.ndarray | None = None) -> None:
        self.shown, self.rendered = shown, picture

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        return self.shown, {}

    def render(self):
        return self.rendered


class Unseeded(Shows):
    def reset(self):  # type: ignore[override]
        return self.shown, {}


def test_pictures_that_cannot_be_rendered_and_resets_without_a_seed_are_told() -> None:
    for env, text in (
        (Shows(np.zeros(2)), "render_mode"),
        (3, "not int"),
        (Unseeded(np.zeros(2)), r"cannot be given a seed.*reset\(self, \*, seed=None, options=None\)"),
    ):
        with pytest.raises(Misuse, match=text):
            Simulator(env, Reading(chunk=1, image_size=32)).begin(0)  # type: ignore[arg-type]


def test_a_policys_picture_is_not_squeezed() -> None:
    """Its longer side is fitted, the policy pads it as it does those of its data; films may be squeezed."""
    wide, place = np.zeros((48, 64, 3), np.uint8), {"agent_pos": np.zeros(2)}
    for shown in (place, place | {"pixels": wide}):
        simulator = Simulator(Shows(shown, wide), Reading(chunk=1, image_size=32))
        assert simulator.begin(0).observation["pixels"].shape == (1, 24, 32, 3)
        assert simulator.picture(32).shape == (32, 32, 3)
    shown = as_picture(np.arange(480 * 640 * 3, dtype=np.uint8).reshape(480, 640, 3), 640, "it", squeezed=False)
    assert shown.shape == (480, 640, 3), "what a policy of such pictures reads (ACT on ALOHA) is as it is"


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


# -- Experts
HERE = f"{__file__}"


def test_the_chunks_are_those_of_the_tables_and_move_nothing() -> None:
    env = MiniTable(5, chunk=4, image_size=0)
    env.reset(seed=1)
    done = np.zeros(5, dtype=np.bool_)
    while not done.any():
        before = env.state
        chunks = env.expert_chunks(7)
        assert chunks.shape == (5, 7, 3) and np.array_equal(chunks, expert_chunk(before, 7))
        assert all(np.array_equal(a, b) for a, b in zip(before, env.state, strict=True))
        done = env.step(chunks[:, :4])[4]["is_success"]
    assert not done.all(), "nobody would be left to compare with"
    chunks = env.expert_chunks(4)
    assert not chunks[done].any() and chunks[~done].any((1, 2)).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_example_of_the_documentation_is_asked_in_its_process(workers: int, root: Path) -> None:
    how: dict[str, Any] = {"tasks": ("red", "blue"), "image_size": 32, "max_steps": 30, "workers": workers}
    env: Any = open_environment(Simulation(f"{root}/docs/example_simulator.py:make", num_envs=4, chunk=4, **how))
    seen, _ = env.reset(seed=0)
    assert sorted(env.task_description) == ["go to the blue corner"] * 2 + ["go to the red corner"] * 2
    goal = np.array([[0.8 if "red" in text else -0.8, 0.8] for text in env.task_description])
    done = np.zeros(4, dtype=bool)
    for decision in range(4):
        chunks = env.expert_chunks(5)
        after, _, terminated, _, info = env.step(chunks[:, :4])
        if decision == 0:
            moved, going = seen["agent_pos"] + 0.2 * chunks[:, :4].sum(1), ~terminated
            np.testing.assert_allclose(chunks[:, 0], np.clip((goal - seen["agent_pos"]) / 0.2, -1, 1), atol=1e-5)
            np.testing.assert_allclose(after["agent_pos"][going], moved[going], atol=1e-5)
            assert going.any()
        assert after["pixels"].shape == (4, 32, 32, 3) and (after["pixels"] == 0).all(-1).any((1, 2)).all()
        seen, done = after, done | (terminated & info["is_success"])
    assert done.all()
    env.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":Frail", "has no expert; minitable, metaworld, libero, point_maze, fetch, reacher have one, .*expert_chunk"),
        (":TooShort", r"expert_chunk\(3\) of .* must be finite numbers \[3, 2\], got \[2, 2\]"),
    ],
)
@pytest.mark.parametrize("workers", tiered([0, 1], [0]))
def test_where_nobody_knows_it_is_said(name: str, message: str, workers: int) -> None:
    env: Any = open_environment(Simulation(HERE + name, num_envs=2, chunk=2, workers=workers))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        env.expert_chunks(3)


@pytest.mark.parametrize("workers", tiered([0, 1], [0]))
def test_an_expert_that_raises_is_told_with_its_episode(workers: int) -> None:
    """Seed and step are those at which it raises again."""
    env: Any = open_environment(Simulation(HERE + ":Lost", num_envs=1, chunk=2, workers=workers))
    env.reset(seed=0)
    env.expert_chunks(3)
    env.step(np.zeros((1, 2, 2), dtype=np.float32))
    with pytest.raises(ValueError, match=r"expert_chunk\(3\) of <Lost instance> raised KeyError") as raised:
        env.expert_chunks(3)
    wanted = rf"{Path(__file__).name}, line \d+\): 'the way'.* after 2 actions .*seed=(\d+)"
    actual = re.search(wanted, str(raised.value))
    assert actual is not None, raised.value
    again = Lost()
    again.reset(seed=int(actual[1]))
    for _ in range(2):
        again.step(np.zeros(2))
    with pytest.raises(KeyError):
        again.expert_chunk(3)
    env.close()


class Lost(Frail):
    def expert_chunk(self, horizon: int) -> np.ndarray:
        if self.time:
            raise KeyError("the way")
        return np.zeros((horizon, 2))


class TooShort(Frail):
    def expert_chunk(self, horizon: int) -> np.ndarray:
        return np.zeros((horizon - 1, 2))
