"""LIBERO's tasks as environments: pictures from their own contexts, a start that forgets its past, one evaluation of
the physics where the library makes three.

Tasks are "suite/number" ("libero_spatial/3") or whole suites. What an episode begins from is one of its task's listed
starts, and the place of the furniture, by the seed: nothing of what was before, and no global generator, has a part.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Description, Misuse, Reading
from genrl.vla.simulators.libero.package import PROTOCOLS, chosen, opened, starts, tasks_of
from genrl.vla.simulators.simulator import SlotHost

CAMERAS = {"image": "agentview", "image2": "robot0_eye_in_hand"}
"""LeRobot's names of the camera before the table, and of that at the hand."""
REST = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""The action while objects fall into place: none, gripper open."""
READ = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
"""What of robosuite's observations is read; the others are taken out, as even those that are off are asked for in each
of the 25 substeps of an action."""
THINGS = 4
"""Places in `environment_state`: no task of LIBERO's own suites names more."""

Seen = dict[str, NDArray[np.float64]]


def describe(tasks: Sequence[str], reading: Reading, settings: Mapping[str, Any]) -> Description:
    """Single tasks, or all of suites. settings as `package.chosen` reads them."""
    names, longest = chosen(tasks, settings)
    protocol, assets = settings.get("protocol", "lerobot"), settings.get("assets", "")
    # with a limit of the user's, a suite's own is that, too
    own = {"protocol": protocol, "assets": assets, "limit": reading.max_steps}
    own["reflections"] = settings.get("reflections", True)
    limit = longest if reading.max_steps is None else reading.max_steps
    arguments = {"tasks": names, "reading": replace(reading, max_steps=limit), "own": own}
    return Description(host, arguments, len(names), limit, in_order=True)


def host(slots: int, *, tasks: Sequence[str], reading: Reading, own: Mapping[str, Any]) -> SlotHost:
    """Slots of these tasks, each with one environment, half a gigabyte large (one with pictures): that of another task
    is closed."""
    return SlotHost(lambda task: LiberoEnv(tasks[task], **own), len(tasks), reading, resting=False)


class LiberoEnv(gymnasium.Env[Seen, NDArray[np.float32]]):
    """One task, by a protocol. options["start"] of a reset is the number of a listed start; without it, the seed
    chooses one.

    Observation: "agent_pos" [8], the hand's place, its axis times angle, and the two fingers, as openpi and LeRobot
    have it; "environment_state" [THINGS * 7], place and quaternion (w, x, y, z) of the things that the task names, the
    first of which is usually to be moved to the second, then zeros. Actions [7] in [-1, 1]: move, turn, grip. Reward 1
    at success; info["is_success"].
    """

    cameras = tuple(CAMERAS)

    def __init__(
        self,
        task: str,
        *,
        protocol: str = "lerobot",
        assets: str = "",
        limit: int | None = None,
        reflections: bool = True,
    ) -> None:
        suite, _, number = task.partition("/")
        folder, row = opened(assets), tasks_of(suite, assets)[int(number)]
        self.task, self.protocol, self.reflections = task, PROTOCOLS[protocol], reflections
        self.limit = self.protocol.limit(suite) if limit is None else limit
        self.task_description: str = row.language
        self.starts = starts(folder / "init_files" / row.problem_folder / row.init_states_file)
        self.elapsed = 0
        nowhere: NDArray[np.float64] = np.zeros(0)
        self.computed, self.observed = nowhere, nowhere
        """Joints, [nq], of which MuJoCo has computed where things are, and those when robosuite last observed."""
        self.env = self._made(str(folder / "bddl_files" / row.problem_folder / row.bddl_file))
        boxes = {"agent_pos": 8, "environment_state": 7 * THINGS}
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {name: spaces.Box(-np.inf, np.inf, (size,), np.float64) for name, size in boxes.items()}
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def _made(self, bddl: str) -> Any:
        from libero.libero.envs.env_wrapper import ControlEnv

        # without a context for pictures, which `picture` makes when one is first wanted
        with seeded(0):  # furniture is put anew by each reset
            control: Any = ControlEnv(
                bddl, use_camera_obs=False, has_offscreen_renderer=False, ignore_done=True, hard_reset=False
            )
        control.env._observables = {name: control.env._observables[name] for name in READ}
        first = control.env._observables[READ[0]]
        sensor = first._sensor

        @wraps(sensor)
        def noted(cache: Any) -> Any:
            self.observed = self.computed
            return sensor(cache)

        # It observes in one of the substeps of an action, by a clock of its own.
        first._sensor = noted
        return control

    @property
    def listed_starts(self) -> int:
        """How many starts there are."""
        return len(self.starts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """Begin at a listed start, and wait until things lie still."""
        super().reset(seed=seed)
        number = (options or {}).get("start")
        number = int(self.np_random.integers(len(self.starts))) if number is None else number
        with seeded(int(self.np_random.integers(2**31)) if seed is None else seed):
            self._forget()
        width = 1 + self.env.sim.model.nq + self.env.sim.model.nv
        if self.starts.shape[1] != width:
            raise Misuse(
                f"the starts of {self.task} have {self.starts.shape[1]} numbers, its scene {width}: they belong to "
                "another version of LIBERO, or of its scenes"
            )
        observation = self.env.set_init_state(self.starts[number])
        self.observed = self.env.sim.data.qpos.copy()
        for _ in range(self.protocol.settle):
            observation = self._moved(np.array(REST))[0]
        self.elapsed = 0
        return self._named(observation), {"is_success": False}

    def _forget(self) -> None:
        """Reset what a start must not depend on: robosuite's reset of a scene that is there leaves out the controller's
        goal, of places that are not computed yet, and how far the gripper is closed. The bits are those of a reset that
        loads the scene anew, which takes seconds."""
        from robosuite.utils.errors import RandomizationError

        inner, sim = self.env.env, self.env.sim
        inner.robots[0].gripper.current_action = np.zeros(inner.robots[0].gripper.dof)

        def reset() -> None:
            type(sim).reset(sim)
            sim.forward()

        sim.reset = reset
        try:
            while True:
                try:
                    inner.reset()
                    return
                except RandomizationError:
                    pass  # furniture fell on furniture: drawn again, as LIBERO does
        finally:
            del sim.reset

    def step(self, action: NDArray[np.float32]) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """One action."""
        observation, success = self._moved(np.asarray(action, dtype=np.float64))
        self.elapsed += 1
        over = self.elapsed >= self.limit and not success
        return self._named(observation), float(success), success, over, {"is_success": success}

    def _moved(self, action: NDArray[np.float64]) -> tuple[dict[str, Any], bool]:
        """One action: robosuite's observation, and success.

        robosuite evaluates the dynamics three times in each of 25 substeps: before the controller, again within it,
        and in MuJoCo's step. Nothing moves in between, so the halves of MuJoCo's step, one before the controller and
        one after it, give the same bits in half the time.
        """
        import mujoco

        sim, fresh = self.env.sim, False
        model, data = sim.model._model, sim.data._data

        def forward() -> None:
            nonlocal fresh
            if not fresh:
                mujoco.mj_step1(model, data)
                self.computed = data.qpos.copy()
            fresh = True

        def step() -> None:
            nonlocal fresh
            mujoco.mj_step2(model, data)
            fresh = False

        sim.forward, sim.step = forward, step
        try:
            observation, _, success, _ = self.env.step(action)
        finally:
            del sim.forward, sim.step
        return observation, bool(success)

    def _named(self, seen: Mapping[str, Any]) -> Seen:
        return {"agent_pos": state(seen), "environment_state": self.things().reshape(-1)}

    def things(self) -> NDArray[np.float64]:
        """Place and quaternion of the things that the task names, [THINGS, 7]; zeros where there are fewer."""
        import mujoco

        inner, data = self.env.env, self.env.sim.data
        rows = np.zeros((THINGS, 7))
        for row, name in zip(rows, inner.obj_of_interest, strict=False):
            if name in inner.obj_body_id:
                row[:3], row[3:] = data.body_xpos[inner.obj_body_id[name]], data.body_xquat[inner.obj_body_id[name]]
            else:  # a part of a thing: a drawer, the middle of a stove
                row[:3] = data.get_site_xpos(name)
                mujoco.mju_mat2Quat(row[3:], np.asarray(data.get_site_xmat(name)).reshape(-1))
            # A quaternion and its negative are one turn: a policy is shown the same one of them each time.
            row[3:] *= np.copysign(1.0, row[3])
        return rows

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Whatever is done within has not happened afterwards."""
        import mujoco

        inner, sim = self.env.env, self.env.sim
        robot, plain = inner.robots[0], (np.ndarray, np.generic, float, int, bool)
        parts = [self, inner, robot.controller, robot.gripper, *inner._observables.values()]
        before = [{k: copy.copy(v) for k, v in vars(part).items() if isinstance(v, plain)} for part in parts]
        data, cache = copy.copy(sim.data._data), dict(inner._obs_cache)
        try:
            yield
        finally:
            mujoco.mj_copyData(sim.data._data, sim.model._model, data)
            for part, values in zip(parts, before, strict=True):
                vars(part).update(values)
            inner._obs_cache = cache

    def expert_chunk(self, horizon: int) -> NDArray[np.float32]:
        """See `simulator.Expert`: the scripted expert's next actions, tried out; it rests after its success."""
        from genrl.vla.simulators.libero.expert import action

        actions, success = np.tile(np.array(REST, dtype=np.float32), (horizon, 1)), False
        with self.tried():
            for k in range(horizon):
                if not success:
                    actions[k] = action(self)
                    success = self.step(actions[k])[2]
        return actions

    def picture(self, size: int, camera: str = "image") -> NDArray[np.uint8]:
        """One of `cameras`, turned by 180 degrees as openpi and LeRobot do; uint8 [size, size, 3]."""
        self._make_current()
        with self._as_observed():
            picture = self.env.sim.render(width=size, height=size, camera_name=CAMERAS[camera])
        return np.ascontiguousarray(picture[::-1, ::-1])

    @contextmanager
    def _as_observed(self) -> Iterator[None]:
        """Things are where they were at the moment of `agent_pos`, some milliseconds before the end of the last action:
        robosuite's own pictures, and so those of published data, are of that moment."""
        import mujoco

        model, data = self.env.sim.model._model, self.env.sim.data._data
        now = copy.copy(data)
        data.qpos[:] = self.observed
        for compute in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_camlight):
            compute(model, data)
        try:
            yield
        finally:
            mujoco.mj_copyData(data, model, now)

    def close(self) -> None:
        """Close the simulator, and give its memory back: what holds it is a circle of objects."""
        if self.env is not None:
            if self.env.sim._render_context_offscreen is not None:
                self._make_current()  # a context is freed within the current one, which may be another simulator's
            self.env.close()
            self.env = None
            gc.collect()

    def _make_current(self) -> None:
        """Draw into this simulator's own context: robosuite never says so, and several in one process then show each
        other's scenes."""
        sim = self.env.sim
        if sim._render_context_offscreen is None:
            import mujoco
            from robosuite.utils.binding_utils import MjRenderContextOffscreen

            sim.forward = lambda: (
                None
            )  # the first picture shows what later ones would: places as the last step left them
            try:
                context = MjRenderContextOffscreen(sim, device_id=-1)
            finally:
                del sim.forward
            context.vopt.geomgroup[:2] = 0, 1  # what is seen, without what collides
            if not self.reflections:
                context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        sim._render_context_offscreen.gl_ctx.make_current()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """LIBERO draws from numpy's global generator: it begins from this seed within, and goes on as before afterwards."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def state(seen: Mapping[str, Any]) -> NDArray[np.float64]:
    """Proprioception [8] of robosuite's observation."""
    turn = axis_angle(np.asarray(seen["robot0_eef_quat"]))
    return np.concatenate([seen["robot0_eef_pos"], turn, seen["robot0_gripper_qpos"]]).astype(np.float64)


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Axis times angle [3] of a unit quaternion (x, y, z, w)."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    length = math.sqrt(1.0 - w * w)
    if length < 1e-9:
        return np.zeros(3)
    turned: NDArray[np.float64] = quaternion[:3] * (2.0 * math.acos(w) / length)
    return turned
