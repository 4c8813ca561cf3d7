"""Collect, fine-tune, evaluate, correct: a real robot by LeRobot's data format (docs/vla_robot.md).

The robot is touched in two functions, `read` and `send`, marked PLACE 1 and PLACE 2. Here it is a stand-in, a simulated
table with an operator who knows what to do; the names of its methods are those of LeRobot's robots and teleoperators.

    python docs/example_robot.py record demos --episodes 20
    python docs/example_robot.py run POLICY --episodes 50 --corrections corrections
    python docs/example_robot.py join both demos corrections
"""

import argparse
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from genrl.playground.minitable import INSTRUCTIONS, PUT, render, task
from genrl.runtime.show.compare.statistics import wilson
from genrl.vla.data.lerobot_dataset import Episode, open_dataset, write_dataset
from genrl.vla.policies.folder import load_policy
from genrl.vla.rollout.sampling import FlowSteps

FPS, LIMIT, PICTURE = 10, 40, 32
"""Actions a second, actions of an episode at most, pixels of a picture as the policy reads it."""


class StandIn:
    """A table, its camera, and the operator. role: he demonstrates, watches, or corrects: he takes over when the task
    is not done after 20 actions (a person does when it goes wrong), and keeps the lever to the end."""

    def __init__(self, role: str, number: int) -> None:
        self.role, self.number, self.time = role, number, 0

    def connect(self) -> None:
        """Somebody has laid out the scene, and told the instruction."""
        self.table = task.initial_state(task.episode_keys(7, np.array([self.number]), np.array([0])), PUT)
        self.instruction = INSTRUCTIONS[self.table.task[0]]

    def get_observation(self) -> dict:
        (x, y), holds = self.table.gripper[0], self.table.held[0] >= 0
        return {"x.pos": x, "y.pos": y, "holds": holds, "front": render(self.table, PICTURE)[0]}

    def get_action(self) -> dict | None:
        """Of the operator's lever; None while he does not hold it."""
        if self.role == "watches" or (self.role == "corrects" and self.time < 20):
            return None
        return dict(zip(("dx", "dy", "grip"), task.expert(self.table)[0], strict=True))

    def says_done(self) -> bool:
        """The operator's button: the task is done."""
        return bool(task.is_success(self.table)[0])

    def send_action(self, action: dict) -> None:
        self.table = task.step(self.table, np.array([list(action.values())], dtype=np.float32))
        self.time += 1


class Seen(NamedTuple):
    """observation: by LeRobot's names. operator [3]: what his lever says, None while he does not hold it. done: he
    says that the task is."""

    observation: dict[str, np.ndarray]
    operator: np.ndarray | None
    done: bool


def read(robot: StandIn) -> Seen:
    """PLACE 1: what the robot sees, and what the operator wants."""
    measured, lever = robot.get_observation(), robot.get_action()
    state = np.array([measured["x.pos"], measured["y.pos"], measured["holds"]], dtype=np.float32)
    observation = {"observation.state": state, "observation.image": measured["front"]}
    operator = None if lever is None else np.array([lever["dx"], lever["dy"], lever["grip"]], dtype=np.float32)
    return Seen(observation, operator, robot.says_done())


def send(robot: StandIn, action: np.ndarray) -> None:
    """PLACE 2: the robot moves. A real one waits for the next tick of its clock, 1 / FPS seconds."""
    robot.send_action({"dx": action[0], "dy": action[1], "grip": action[2]})


def decide(policy, observation: dict[str, np.ndarray], instruction: str) -> list[np.ndarray]:
    """A chunk of actions, in the robot's units."""
    batch = {name: torch.from_numpy(value)[None] for name, value in observation.items()}
    batch["observation.language.tokens"] = policy.tokenise([instruction])
    noise = torch.randn(1, policy.horizon, policy.action_dim)
    with torch.no_grad():
        chunk = FlowSteps(steps=4).act(policy, policy.encode(batch), noise)
    return list(policy.actions(chunk)[0].numpy())


def episode(robot: StandIn, policy=None) -> tuple[list[dict[str, np.ndarray]], list[bool], bool]:
    """Its frames, which of them the operator acted in, and whether it succeeded. Who does not hold the lever lets the
    policy act; what it had planned before he took over is forgotten."""
    robot.connect()
    frames, by_operator, planned = [], [], []
    for _ in range(LIMIT):
        seen = read(robot)
        if seen.done:
            return frames, by_operator, True
        if seen.operator is not None:
            planned, action = [], seen.operator
        else:
            planned = planned or decide(policy, seen.observation, robot.instruction)
            action = planned.pop(0)
        frames.append(seen.observation | {"action": action})
        by_operator.append(seen.operator is not None)
        send(robot, action)
    return frames, by_operator, read(robot).done


def stacked(frames: list[dict[str, np.ndarray]], instruction: str) -> Episode:
    return Episode([instruction] * len(frames), {name: np.stack([one[name] for one in frames]) for name in frames[0]})


def record(folder: Path, episodes: int) -> None:
    """Episodes in which the operator acts alone; those that fail are not kept."""
    successes = []
    for number in range(episodes):
        robot = StandIn("demonstrates", number)
        frames, _, success = episode(robot)
        if success:
            successes.append(stacked(frames, robot.instruction))
    write_dataset(folder, successes, fps=FPS, robot_type="stand_in")
    print(f"{folder}: {len(successes)} demonstrations, {sum(len(one.instructions) for one in successes)} frames")


def run(policy_folder: Path, episodes: int, corrections: Path | None) -> None:
    """The policy acts, the operator says what succeeded, and takes over where corrections are collected: they are the
    stretches in which he acted (HG-DAgger, arXiv 1810.02890). What he finished is no success of the policy."""
    policy, alone, stretches = load_policy(policy_folder), 0, []
    torch.manual_seed(0)
    for number in range(10_000, 10_000 + episodes):  # scenes that were not demonstrated
        robot = StandIn("watches" if corrections is None else "corrects", number)
        frames, by_operator, success = episode(robot, policy)
        alone += success and not any(by_operator)
        for by_hand, stretch in groupby(range(len(frames)), key=by_operator.__getitem__):
            if by_hand:
                stretches.append(stacked([frames[t] for t in stretch], robot.instruction))
    low, high = wilson(alone, episodes)
    print(f"{policy_folder}: {alone} of {episodes} succeed, {low:.3f} to {high:.3f}")
    if corrections is not None and stretches:
        write_dataset(corrections, stretches, fps=FPS, robot_type="stand_in")
        print(f"{corrections}: {len(stretches)} corrections, {sum(len(one.instructions) for one in stretches)} frames")


def join(folder: Path, parts: list[Path]) -> None:
    """All episodes of several data sets in one."""
    write_dataset(folder, (one for part in parts for one in open_dataset(part).read()), fps=FPS, robot_type="stand_in")


def no_simulator():
    """The environment of the configuration: a run needs one by name, and with `evaluation.every: 0` never makes it."""
    raise RuntimeError("the robot has no simulator: write evaluation: {every: 0}, and run this file with the policy")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "run", "join"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name == "join":
            command.add_argument("parts", type=Path, nargs="+")
        else:
            command.add_argument("--episodes", type=int, default=20)
        if name == "run":
            command.add_argument("--corrections", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "record":
        record(given.folder, given.episodes)
    elif given.command == "run":
        run(given.folder, given.episodes, given.corrections)
    else:
        join(given.folder, given.parts)


if __name__ == "__main__":
    main()
