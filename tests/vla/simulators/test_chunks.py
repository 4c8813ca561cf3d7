"""Chunks on single environments: they stop where the episode ends, and say what was executed."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from genrl.objectives.advantages.gae import executed_mask
from genrl.vla.config.schema import VLAConfig
from genrl.vla.config.sections import Demonstrations
from genrl.vla.data.demonstrations import frames_of
from genrl.vla.data.lerobot_dataset import Episode, write_dataset
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import STATE, TOKENS
from genrl.vla.rollout.collect import RolloutPlan, collect
from genrl.vla.rollout.rollout import training_rows
from genrl.vla.rollout.sampling import FlowSteps
from genrl.vla.setup import open_tables
from genrl.vla.simulators.contract import Misuse, Outcome, Reading, Simulation
from genrl.vla.simulators.simulator import Simulator
from genrl.vla.simulators.tables import open_environment
from tests.vla import vla_runs
from tests.vla.published import pi_folder
from tests.vla.two_cameras import COLOURS, Draws, Shows, grey


class Walk(gymnasium.Env[np.ndarray, np.ndarray]):
    """A position that actions add to: success at `goal`, a time limit of 5; the reward is the action."""

    def __init__(self, goal: float = 3.0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.goal, self.position, self.time, self.ended = goal, 0.0, 0, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.position, self.time, self.ended = 0.0, 0, False
        return np.array([self.position]), {}

    def step(self, action: np.ndarray):
        assert not self.ended, "stepped past the end"
        self.position += float(action[0])
        self.time += 1
        success = self.position >= self.goal
        truncated = self.time >= 5 and not success
        self.ended = success or truncated
        return np.array([self.position]), float(action[0]), success, truncated, {"is_success": success}


def chunk(*actions: float) -> np.ndarray:
    return np.array(actions, dtype=np.float32)[:, None]


def begun(chunk: int, **how: Any) -> Simulator:
    simulator = Simulator(Walk(), Reading(chunk=chunk, reward="environment", **how))
    first = simulator.begin(0)
    assert (
        first.n_executed[0] == 0 and first.rewards.tolist() == [[0.0] * chunk] and facts(first) == [0.0, False, False]
    )
    return simulator


def facts(outcome: Outcome) -> list[Any]:
    """Where it stands, whether the episode terminated, whether it was truncated."""
    return [outcome.observation["agent_pos"].item(), bool(outcome.terminated[0]), bool(outcome.truncated[0])]


def test_a_chunk_stops_where_the_episode_ends() -> None:
    outcome = begun(4).execute(chunk(1, 1, 1, 1))
    assert facts(outcome) == [3.0, True, False] and outcome.success[0]
    assert outcome.n_executed[0] == 3 and outcome.rewards.tolist() == [[1, 1, 1, 0]] and outcome.action_dim == 1
    mask = executed_mask(torch.from_numpy(outcome.n_executed), 4)
    assert mask.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("limit", [None, 5, 9])
def test_a_time_limit_inside_a_chunk_truncates(limit: int | None) -> None:
    simulator = begun(3, max_steps=limit)
    simulator.execute(chunk(0, 0, 0))
    outcome = simulator.execute(chunk(0.5, 0.5, 0.5))
    assert facts(outcome) == [1.0, False, True] and outcome.n_executed[0] == 2
    again = simulator.begin(1)
    assert facts(again) == [0.0, False, False]
    assert facts(simulator.execute(chunk(1, 1, 1))) == [3.0, True, False]


def test_a_limit_of_our_own_comes_first_and_success_is_no_truncation() -> None:
    assert facts(begun(4, max_steps=2).execute(chunk(0, 0, 0, 0))) == [0.0, False, True]
    outcome = begun(4, max_steps=3).execute(chunk(1, 1, 1, 1))
    assert facts(outcome) == [3.0, True, False] and outcome.n_executed[0] == 3


def test_actions_are_clipped_to_the_box() -> None:
    outcome = begun(2).execute(chunk(9, -4))
    assert facts(outcome) == [0.0, False, False] and outcome.rewards.tolist() == [[1.0, -1.0]]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Misuse, match="set environment.success_key"):
        begun(2, success_key="success").execute(chunk(0, 0))
    with pytest.raises(Misuse, match="space of vectors"):
        Simulator(gymnasium.make("CartPole-v1"), Reading(chunk=2))


class Says(Walk):
    """What its info says: `told` at the end, or in every step."""

    def __init__(self, told: Any, *, always: bool = False) -> None:
        super().__init__()
        self.told, self.always = told, always

    def step(self, action: np.ndarray):
        *rest, info = super().step(action)
        ended = bool(rest[2] or rest[3])
        says = {"is_success": self.told} if ended or self.always else {}
        return *rest, says


def said(told: Any, *, always: bool = False, **how: Any) -> Outcome:
    simulator = Simulator(Says(told, always=always), Reading(chunk=5, reward="environment", **how))
    simulator.begin(0)
    return simulator.execute(chunk(1, 1, 1, 1, 1))


@pytest.mark.parametrize(("told", "right"), [(True, True), (np.bool_(False), False), (1, True), (np.float32(0), False)])
def test_success_may_be_said_at_the_end_alone(told: Any, right: bool) -> None:
    assert said(told).success.tolist() == [right]


@pytest.mark.parametrize("told", [0.3, float("nan"), 2, "yes", [True, False], None])
def test_what_is_no_success_is_not_cast(told: Any) -> None:
    with pytest.raises(Misuse, match="success is true or false|no number"):
        said(told, always=True)


def test_an_end_that_says_nothing_is_no_failure() -> None:
    class Silent(Walk):
        def step(self, action: np.ndarray):
            return *super().step(action)[:4], {"other": 1}

    for limit in (None, 2):
        simulator = Simulator(Silent(), Reading(chunk=5, max_steps=limit))
        simulator.begin(0)
        with pytest.raises(Misuse, match=r"only \['other'\]: set environment.success_key"):
            simulator.execute(chunk(1, 1, 1, 1, 1))


# -- Several cameras: from an environment, or a data set, to the pictures that a policy has names for


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
