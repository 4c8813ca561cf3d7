"""LIBERO: tasks, protocols and starts without it, the environment over a double; and the real one, where it is
installed (`make libero`)."""

import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from genrl.vla.evaluate import evaluation_episodes
from genrl.vla.simulators.contract import Misuse, Reading, Run, Simulation
from genrl.vla.simulators.libero import env as libero
from genrl.vla.simulators.libero import expert, package
from genrl.vla.simulators.simulator import Simulator, SlotHost
from genrl.vla.simulators.tables import Simulators
from genrl.vla.simulators.workers import FarSimulators, Process

real = pytest.mark.skipif(bool(package.missing()), reason="; ".join(package.missing()) or "all of it is here")


def test_names_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "missing", lambda assets="": ["all"])
    assert package.expanded(()) == tuple(f"libero_spatial/{i}" for i in range(10))
    assert package.expanded(("libero_10/3", "libero_90/89")) == ("libero_10/3", "libero_90/89")
    assert len(package.expanded(("libero_130",))) == 130 and package.expanded(("libero_100",))[90] == "libero_10/0"
    for wrong in ("libero_spatial/10", "libero", "libero_goal/x", "libero_130/3"):
        with pytest.raises(ValueError, match=f"no task '{wrong}'"):
            package.expanded((wrong,))


def test_a_protocol_is_named_by_one_key() -> None:
    def limit(tasks: tuple[str, ...], **settings: str) -> int | None:
        return libero.describe(tasks, Reading(chunk=1), settings).max_steps

    assert [limit(("libero_spatial",), protocol=name) for name in package.PROTOCOLS] == [280, 220, 240]
    assert limit(("libero_10/3", "libero_goal/0")) == 520, "the longest of them; each suite has its own within"
    assert package.PROTOCOLS["rlinf"].settle == 15 and package.PROTOCOLS["lerobot"].limit("libero_goal_swap") == 300
    assert libero.describe((), Reading(chunk=1, max_steps=7), {}).max_steps == 7
    with pytest.raises(ValueError, match="no protocol 'openpy'; did you mean openpi"):
        limit((), protocol="openpy")
    with pytest.raises(ValueError, match=r"knows protocol, assets and reflections, not \['camera'\]"):
        limit((), camera="front")
    with pytest.raises(ValueError, match="reflections is true or false, found 'off'"):
        limit((), reflections="off")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    bare, parts = package.missing()
    assert "lacks libero, robosuite, bddl: pip install --no-deps hf-libero==0.1.4" in bare and "numba" in parts
    monkeypatch.undo()
    there = {"libero": "0.1", "robosuite": "1.5.1", "mujoco": "3.10.0"}
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(package.metadata, "version", there.__getitem__)
    monkeypatch.setattr(package, "homes", lambda name: [])
    lines = "\n".join(package.missing(str(tmp_path)))
    assert "needs robosuite 1.4, and 1.5.1" in lines and "a mujoco before 3.9, not 3.10.0" in lines
    assert f"scenes are not in {tmp_path}" in lines
    (tmp_path / "scenes").mkdir()
    assert package.scenes(str(tmp_path)) == tmp_path


def test_what_belongs_to_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts of other scenes, which would put things anywhere; and a simulator whose packages are incomplete."""
    env = object.__new__(libero.LiberoEnv)
    env.task, env.starts = "libero_object/1", np.zeros((3, 5))
    env.env = SimpleNamespace(sim=SimpleNamespace(model=SimpleNamespace(nq=7, nv=6)))
    monkeypatch.setattr(env, "_forget", lambda: None)
    with pytest.raises(Misuse, match=r"starts of libero_object/1 have 5 numbers, its scene 14.*another version"):
        env.reset(seed=0)
    monkeypatch.setattr(package, "missing", lambda assets="": ["LIBERO's scenes are not in nowhere: pip"])
    with pytest.raises(Misuse, match="scenes are not in nowhere"):
        package.opened("nowhere")


def test_axis_angle() -> None:
    half = np.sqrt(0.5)
    np.testing.assert_allclose(libero.axis_angle(np.array([0, 0, half, half])), [0, 0, np.pi / 2])
    np.testing.assert_allclose(libero.axis_angle(np.array([1.0, 0, 0, 0])), [np.pi, 0, 0])
    assert libero.axis_angle(np.array([0.0, 0, 0, 1])).tolist() == [0, 0, 0]


class Context:
    """A GL context; pictures come from the one that is current, whoever asks."""

    current: Any = None

    def __init__(self) -> None:
        self.gl_ctx = self
        self.make_current()

    def make_current(self) -> None:
        Context.current = self


class Sim:
    def __init__(self) -> None:
        self._render_context_offscreen = Context()

    def render(self, *, width: int, height: int, camera_name: str) -> np.ndarray:
        picture = np.zeros((height, width, 3), dtype=np.uint8)
        picture[0, 0] = {"agentview": 255, "robot0_eye_in_hand": 99}[camera_name]
        return picture


class Doubled(libero.LiberoEnv):
    """A hand that follows its actions; success at x = .5."""

    def __init__(self, limit: int = 1000) -> None:
        self.sim, self.closed, self.begun, self.limit = Sim(), 0, [], limit
        self.env, self.task_description = self, "push the hand forward"
        self.listed = -np.arange(5.0) / 10
        self.action_space = libero.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self._as_observed = nullcontext  # type: ignore[assignment]

    @property
    def listed_starts(self) -> int:
        return len(self.listed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert options is not None
        self.begun.append(options["start"])
        self.place, self.elapsed = np.array([self.listed[options["start"]], 0.0, 0.0]), 0
        return self._named({}), {}

    def _moved(self, action: np.ndarray) -> tuple[dict[str, Any], bool]:
        self.place = self.place + 0.1 * action[:3]
        return {}, bool(self.place[0] >= 0.5)

    def _named(self, seen: Any) -> dict[str, np.ndarray]:
        return {"agent_pos": np.concatenate([self.place, np.zeros(5)])}

    def close(self) -> None:
        self.closed += 1


def test_an_episode_and_two_cameras_by_lerobots_names() -> None:
    simulator = Simulator(Doubled(), Reading(chunk=4, image_size=8))
    outcome = simulator.begin(3)
    assert outcome.observation["agent_pos"].shape == (1, 8) and outcome.instruction == ["push the hand forward"]
    assert outcome.observation["pixels"][0, 7, 7].tolist() == [255] * 3, "turned by 180 degrees"
    chunk = np.zeros((4, 7), dtype=np.float32)
    chunk[:, 0] = 1.0
    executed = 0
    while not outcome.terminated[0]:
        outcome = simulator.execute(chunk)
        executed += int(outcome.n_executed[0])
    assert outcome.success[0] and executed == 8
    short = Simulator(Doubled(limit=2), Reading(chunk=4, max_steps=100))
    short.begin(0)
    assert short.execute(0 * chunk).truncated[0] and short.elapsed == 2, "the suite's own limit"
    how = Reading(chunk=4, image_size=8, cameras=("image", "image2"))
    shown = Simulator(Doubled(), how).begin(3).observation
    assert set(shown) == {"agent_pos", "pixels/image", "pixels/image2"}
    assert [int(shown[f"pixels/{name}"][0, 7, 7, 0]) for name in ("image", "image2")] == [255, 99]
    with pytest.raises(Misuse, match=r"no camera 'image3'.*nearest is 'image2?'"):
        Simulator(Doubled(), Reading(chunk=4, image_size=8, cameras=("image3",))).begin(3)


def test_an_evaluation_visits_each_listed_start_once_in_order() -> None:
    begun: list[tuple[int, Doubled]] = []

    def make(task: int) -> Doubled:
        begun.append((task, Doubled()))
        return begun[-1][1]

    host = SlotHost(make, 10, Reading(chunk=1))
    numbers = evaluation_episodes(77, 50, in_order=True).tolist()
    for first in range(0, 50, 5):
        assert len(list(host.run(Run(dict(enumerate(numbers[first : first + 5])), {})))) == 5
    for task in range(10):
        assert sum((env.begun for own, env in begun if own == task), []) == [0, 1, 2, 3, 4]
    few = Simulator(Doubled(), Reading(chunk=1, goals=2))
    for number in range(4):
        few.begin(number)
    assert few.env.begun == [0, 1, 0, 1], "goals: so many of the first ones"
    assert libero.describe((), Reading(chunk=1), {}).in_order


def test_there_is_one_environment_per_slot() -> None:
    """Slots that swap tasks take each other's; what no slot of the round needs is closed, as is one that raised."""
    made: list[Doubled] = []

    def make(task: int) -> Doubled:
        made.append(Doubled())
        return made[-1]

    host = SlotHost(make, 10, Reading(chunk=1), resting=False)

    def begin(*tasks: int) -> list[int]:
        assert len(list(host.run(Run(dict(enumerate(tasks)), {})))) == len(tasks)
        return [env.closed for env in made]

    assert begin(0, 1) == begin(1, 0) == [0, 0], "swapped"
    assert begin(1, 2) == [1, 0, 0]
    assert begin(3, 4) == [1, 1, 1, 0, 0]
    made[3]._moved = None  # type: ignore[assignment]
    (fault,) = host.run(Run({}, {0: np.zeros((1, 7), dtype=np.float32)}))
    assert "NoneType" in fault.report and made[3].closed == 1  # type: ignore[union-attr]


def test_each_of_several_in_a_process_draws_into_its_own_context() -> None:
    for env in (one := Doubled(), Doubled(), one):
        env.picture(4)
        assert Context.current is env.sim._render_context_offscreen


def test_the_global_generator_goes_on_as_before() -> None:
    np.random.seed(3)
    want = np.random.uniform(size=2)
    np.random.seed(3)
    first = np.random.uniform()
    with libero.seeded(5):
        inside = np.random.uniform()
    assert [first, np.random.uniform()] == want.tolist()
    with libero.seeded(5):
        assert np.random.uniform() == inside


def test_starts_are_read_without_unpickling_anything_else(tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(3, 5))
    torch.save(states, tmp_path / "good.pruned_init")
    assert np.array_equal(package.starts(tmp_path / "good.pruned_init"), states)
    np.savez(tmp_path / "packed.pruned_init.npz", states=states)
    assert np.array_equal(package.starts(tmp_path / "packed.pruned_init"), states)
    with pytest.raises(Misuse, match="is not there"):
        package.starts(tmp_path / "none.pruned_init")

    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save(Evil(), tmp_path / "evil.pruned_init")
    with pytest.raises(pickle.UnpicklingError):
        package.starts(tmp_path / "evil.pruned_init")


@pytest.fixture(scope="module")
def two() -> Any:
    made = [libero.LiberoEnv("libero_object/1"), libero.LiberoEnv("libero_spatial/2")]
    yield made
    for env in made:
        env.close()


@real
@pytest.mark.slow
class TestTheRealOne:
    def test_pictures_are_of_the_moment_of_agent_pos(self, two: Any) -> None:
        env, data = two[0], two[0].env.sim.data
        env.reset(seed=0, options={"start": 0})
        hand, seen = env.env.env.robots[0].eef_site_id, env.step(np.full(7, 0.5, dtype=np.float32))[0]
        end = data.site_xpos[hand].copy()
        with env._as_observed():
            assert np.array_equal(data.site_xpos[hand], seen["agent_pos"][:3])
        assert np.array_equal(data.site_xpos[hand], end) and not np.array_equal(end, seen["agent_pos"][:3])

    def test_pictures_of_several_are_those_of_each_alone(self) -> None:
        """By processes of their own, which is what another environment cannot disturb."""
        tasks = ("libero_object/1", "libero_spatial/2")
        how = Reading(chunk=2, image_size=64, cameras=("image", "image2"))
        seen = []
        for workers in (0, 2):
            described = libero.describe(tasks, how, {})
            patient = {"timeout_s": 600.0, "start_timeout_s": 600.0}  # numba compiles in each process
            made = Simulation("libero", num_envs=2, chunk=2, image_size=64, cameras=how.cameras, **patient)
            tables = FarSimulators(described, made, Process, 2) if workers else Simulators(described, made)
            tables.reset(seed=0, options={"episodes": np.arange(2)})
            seen.append(tables.step(np.full((2, 2, 7), 0.3, dtype=np.float32))[0])
            tables.close()
        for name, value in seen[0].items():
            assert np.array_equal(value, seen[1][name]), name
            assert not name.startswith("pixels") or (value[0] != value[1]).any()

    def test_a_start_is_a_function_of_its_number(self, two: Any) -> None:
        """Whatever was before it: a gripper that is closed, things that lie elsewhere."""
        for env in two:
            seen = []
            for _ in range(2):
                first, _ = env.reset(seed=11, options={"start": 3})
                action = np.array([0.4, 0.3, -0.6, 0.2, 0, 0, 1], dtype=np.float32)
                shown = [first, *(env.step(action)[0] for _ in range(12))]
                seen.append(np.stack([np.concatenate(list(row.values())) for row in shown]))
            assert np.array_equal(*seen) and np.ptp(seen[0][:, :3], axis=0).max() > 0.01

    def test_the_expert_succeeds_and_what_it_tries_out_has_not_happened(self, two: Any) -> None:
        for env in two:
            first, _ = env.reset(seed=0, options={"start": 0})
            before, success = env.env.get_sim_state(), False
            chunk = env.expert_chunk(4)
            assert np.array_equal(before, env.env.get_sim_state()) and np.array_equal(chunk[0], expert.action(env))
            while not success and env.elapsed < 150:
                success = env.step(expert.action(env))[2]
            assert success, env.task
            assert np.array_equal(env.reset(seed=0, options={"start": 0})[0]["agent_pos"], first["agent_pos"])
