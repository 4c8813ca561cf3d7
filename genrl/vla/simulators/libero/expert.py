"""A scripted expert for the tasks of LIBERO that move one thing onto or into another: libero_object, libero_spatial.

It decides from the scene as it is, so it goes on from wherever a policy has brought the robot: above the thing, down,
grip, up, over the target, down, let go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.contract import no_expert
from genrl.vla.simulators.libero.env import REST, LiberoEnv, Seen
from genrl.vla.simulators.libero.package import PROTOCOLS, expanded, tasks_of

if TYPE_CHECKING:
    from genrl.vla.data.frames import Shown

STEP = 0.05
"""Metres that the hand is sent by an action of 1."""
GAIN = 1.5
"""It gets about half of the way until the next one."""
PALM = 0.035
"""Metres from between the finger tips up to where the palm would touch."""
HOVER = 0.1
"""Metres above the place to grip from which the hand comes down."""
PUSH, LASTING = 0.15, 0.8
"""Standard deviation of what disturbs each number of a demonstration that moves the hand, and its correlation from one
action to the next: pushes of a few steps, after which the hand is a centimetre or two off its way."""


@dataclass(frozen=True)
class Plan:
    """How a suite's things are taken and put down; metres, from the thing's and the target's place."""

    grip: tuple[float, float, float]
    """Where the middle between the fingers goes to grip."""
    carry: float
    """Height of the thing above the target's place on its way."""
    drop: float
    """Its height where it is let go."""
    near: float
    """How far beside the target's place it may be there."""


PLANS = {
    "libero_object": Plan((0.0, 0.0, 0.0), carry=0.22, drop=0.2, near=0.03),
    # a bowl is taken by its rim: between the fingers there is no room for all of it
    "libero_spatial": Plan((0.0, 0.048, 0.02), carry=0.12, drop=0.05, near=0.015),
}


def demonstrate(tasks: Sequence[str], count: int, *, max_steps: int | None, **how: Any) -> Shown:
    """`count` episodes of every task, of all of libero_spatial where there are none, within LeRobot's limits. The
    hand is pushed on its way (`Pushed`).

    how: seed, image_size, cameras and points, of `demonstrations.expert_episodes`.
    """
    from genrl.vla.data.demonstrations import expert_episodes
    from genrl.vla.data.frames import Shown

    names = expanded(tasks)
    suites = {name.partition("/")[0] for name in names}
    limit = max(map(PROTOCOLS["lerobot"].limit, suites)) if max_steps is None else max_steps
    texts = [tasks_of(suite)[int(number)].language for suite, _, number in (name.partition("/") for name in names)]
    return Shown(texts, expert_episodes(names, Pushed, scripted, count, max_steps=limit, **how), lambda actions: REST)


class Pushed(LiberoEnv):
    """A task in which the hand is pushed off its way, by the seed, while the expert goes on from where it is.

    What is recorded is what the expert wanted (DART, arXiv 1703.09327). Without it all demonstrations of a task are one
    path, and a policy that has left it by a centimetre has never seen a way back.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """Begin without a push."""
        begun = super().reset(seed=seed, options=options)
        self.pushes, self.push = np.random.default_rng(seed), np.zeros(3)
        return begun

    def step(self, action: NDArray[np.float32]) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """One action and the push."""
        fresh = PUSH * math.sqrt(1.0 - LASTING**2) * self.pushes.standard_normal(3)
        self.push = LASTING * self.push + fresh
        pushed = np.array(action, dtype=np.float32)
        pushed[:3] = np.clip(pushed[:3] + self.push, -1.0, 1.0)
        return super().step(pushed)


def scripted(env: LiberoEnv) -> Callable[[Any], NDArray[np.float32]]:
    """The expert in an environment."""
    return lambda seen: action(env)


def action(env: LiberoEnv) -> NDArray[np.float32]:
    """The action [7] from where the environment is. Raises Misuse for a suite without an expert."""
    plan = PLANS.get(env.task.partition("/")[0])
    if plan is None:
        raise no_expert(f"LIBERO's {env.task} (libero_object and libero_spatial have)")
    thing, target = env.things()[:2, :3]
    hand, shut, width = gripper(env)
    size = half_size(env)
    by_rim = plan.grip[1] != 0.0
    # a tall thing is taken below its top, where the palm does not reach it yet
    place = thing + plan.grip + (0.0, 0.0, 0.0 if by_rim else max(0.0, size[2] - PALM))
    # no wider open than the thing needs: its neighbours are near
    ready = 0.0 if size[1] > 0.025 and not by_rim else 0.25
    off, beside = target - thing, float(np.linalg.norm((place - hand)[:2]))
    above, over = float(hand[2] - place[2]), float(np.linalg.norm(off[:2])) < plan.near
    if shut == 1.0 and width > 0.003 and beside < 0.03 and abs(above) < 0.04:
        return _carried(off, plan, over=over)
    if over and shut > ready:
        return moved(np.zeros(3), grip=-1.0)  # let go before anything else: it falls
    shutting = shut > ready and beside < 0.03 and abs(above) < 0.02 and width > 0.003
    if shutting or (beside < 0.018 and abs(above) < 0.008):
        return moved(place - hand, grip=1.0)
    # robosuite reads the sign alone, so a policy that is a little off 0, the order to stay, would shut the gripper: an
    # open one is ordered open
    grip = -1.0 if shut >= ready == 0.0 else float(np.sign(ready - shut))
    if beside > 0.03 and above < HOVER / 2:
        return moved(np.array([0.0, 0.0, HOVER - above]), grip=grip)
    # high on the cabinet, near the end of its reach, the hand comes no nearer than this
    near = 0.014 if by_rim else 0.01
    height = HOVER if beside > near + 0.1 * max(0.0, HOVER / 2 - above) else 0.0
    return moved(place + (0.0, 0.0, height) - hand, grip=grip)


def _carried(off: NDArray[np.float64], plan: Plan, *, over: bool) -> NDArray[np.float32]:
    """With the thing between the fingers, `off` [3] from the target's place: up, across, down, let go."""
    if over:
        lower = float(off[2]) + plan.drop
        return moved(np.array([off[0], off[1], lower]), grip=-1.0 if lower > -0.01 else 1.0)
    up = float(off[2]) + plan.carry
    if up > 0.04:
        return moved(np.array([0.0, 0.0, up]), grip=1.0)
    return moved(np.array([off[0], off[1], up]), grip=1.0)


def half_size(env: LiberoEnv) -> NDArray[np.float64]:
    """How far the thing reaches to either side of its place, along the world's axes [3], by boxes around its shapes."""
    inner, model, data = env.env.env, env.env.sim.model._model, env.env.sim.data._data
    root = inner.obj_body_id[inner.obj_of_interest[0]]
    shapes = [g for g in np.flatnonzero(model.geom_contype) if model.body_rootid[model.geom_bodyid[g]] == root]
    turns = data.geom_xmat[shapes].reshape(-1, 3, 3)
    boxes = model.geom_aabb[shapes]
    middles = data.geom_xpos[shapes] + np.einsum("gij,gj->gi", turns, boxes[:, :3]) - data.xpos[root]
    reach = np.abs(middles) + np.einsum("gij,gj->gi", np.abs(turns), boxes[:, 3:])
    half: NDArray[np.float64] = reach.max(0)
    return half


def gripper(env: LiberoEnv) -> tuple[NDArray[np.float64], float, float]:
    """Place of the middle between the fingers [3], how far the gripper is told to be shut (0 to 1), and how far apart
    the fingers are."""
    robot, data = env.env.env.robots[0], env.env.sim.data
    ordered = float(robot.gripper.current_action[0])  # 1 opens, -1 shuts, a quarter of the way at each action
    fingers = data.qpos[robot._ref_gripper_joint_pos_indexes]
    return np.array(data.site_xpos[robot.eef_site_id]), (1.0 - ordered) / 2.0, float(np.abs(fingers).sum())


def moved(way: NDArray[np.float64], *, grip: float) -> NDArray[np.float32]:
    """The action that sends the hand along `way` [3] metres, as far as one action goes."""
    action = np.zeros(7, dtype=np.float32)
    action[:3], action[6] = np.clip(way * GAIN / STEP, -1.0, 1.0), grip
    return action
