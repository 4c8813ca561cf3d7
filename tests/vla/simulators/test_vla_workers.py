"""Simulators in this process and in others: the same rollouts, and nothing hangs or is learnt from when they fail."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrl.vla.evaluate import evaluation_episodes
from genrl.vla.policies.policy import STATE
from genrl.vla.rollout.collect import ChunkRollout, RolloutPlan, collect
from genrl.vla.rollout.sampling import FlowSteps
from genrl.vla.simulators.contract import Environment, Simulation
from genrl.vla.simulators.tables import open_environment
from tests.run_folders import tiered
from tests.vla import frail
from tests.vla.frail import FINE, HANG, KILL, RAISE
from tests.vla.tiny_policies import Leads

FRAIL = f"{Path(frail.__file__)}:make"


@contextlib.contextmanager
def opened(name: str = FRAIL, **how: Any):
    env = open_environment(Simulation(name, **{"num_envs": 4, "chunk": 2} | how))
    try:
        yield env
    finally:
        env.close()


def actions(*modes: float, move: float = 0.1) -> np.ndarray:
    """[B, 2, 2]: every slot moves; its second action is of this mode."""
    chunk = np.zeros((len(modes), 2, 2), dtype=np.float32)
    chunk[..., 0] = move
    chunk[:, 1, 1] = modes
    return chunk


def walk(env: Environment, steps: int, seed: int = 3, failing: dict[int, tuple[float, ...]] | None = None) -> list[Any]:
    """All that an environment shows, seeded actions and the failures of some steps."""
    rng = np.random.default_rng(0)
    observation, info = env.reset(seed=seed)
    shown: list[Any] = [observation["agent_pos"], env.task_description]
    for step in range(steps):
        chunk = actions(*(failing or {}).get(step, (FINE,) * env.num_envs))
        chunk[..., 0] = rng.uniform(-0.2, 0.5, chunk.shape[:2])
        observation, reward, terminated, truncated, info = env.step(chunk)
        shown += [observation["agent_pos"], reward, terminated, truncated, *info.values(), env.task_description]
    return shown


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_rollout_does_not_depend_on_the_number_of_workers() -> None:
    how: dict[str, Any] = {"num_envs": 6, "group_size": 2, "tasks": ("left", "right", "home")}
    failing = {2: (FINE, RAISE, FINE, FINE, FINE, RAISE)}
    with opened(**how) as env:
        expected = walk(env, 8, failing=failing)
        assert env.dropped == 2 and env.restarts == 0 and 0 < env.waited_s < 60
    with opened(workers=2, **how) as env:
        assert same(walk(env, 8, failing=failing), expected) and env.dropped == 2
        assert not same(walk(env, 8, seed=4), walk(env, 8, seed=5))
        assert same(walk(env, 8, failing=failing), expected), "after use"


def test_the_contract() -> None:
    """Success ends and pays 1, the limit truncates, groups begin alike, tasks take turns, the reset row is empty."""
    with opened(num_envs=8, group_size=2, tasks=("a", "b"), reward="success") as env:
        observation, info = env.reset(seed=0)
        start = observation["agent_pos"]
        assert start.dtype == np.float32 and info["n_executed"].tolist() == [0] * 8
        assert np.array_equal(start[::2], start[1::2]) and len(np.unique(start[::2, 0])) == 4
        assert env.task_description[::2] == env.task_description[1::2]
        assert sorted(env.task_description[::2]) == ["walk a"] * 2 + ["walk b"] * 2
        chunk = actions(*[FINE] * 8, move=0.0)
        chunk[0] = [[1.0, 0], [1.0, 0]]
        first = env.task_description
        _, reward, terminated, truncated, info = env.step(chunk)
        assert terminated.tolist() == [True] + [False] * 7 and not truncated.any()
        assert reward.tolist() == [1.0] + [0.0] * 7 and info["is_success"][0]
        assert info["n_executed"][0] == np.argmax(info["rewards"][0]) + 1
        observation, reward, terminated, truncated, info = env.step(chunk)
        assert info["n_executed"].tolist() == [0] + [2] * 7 and env.task_description[0] != first[0]
        assert observation["agent_pos"][0, 1] == 0 and not terminated[0]
        _, _, terminated, truncated, _ = env.step(chunk)
        assert truncated[2:].all() and not truncated[0]


def test_chosen_episodes_and_few_starts() -> None:
    chosen = evaluation_episodes(7, 4)
    with opened(tasks=("a", "b"), workers=2) as env:
        few = env.reset(options={"episodes": chosen[:1], "once": True})[0]["agent_pos"]
        assert len(set(env.task_description)) == 1, "a slot that rests has an instruction that a policy knows"
        assert env.step(actions(*[FINE] * 4))[-1]["n_executed"].tolist() == [2, 0, 0, 0]
        first = env.reset(seed=1, options={"episodes": chosen})[0]["agent_pos"]
        again = env.reset(seed=9, options={"episodes": chosen[::-1]})[0]["agent_pos"]
        assert np.array_equal(first, again[::-1]) and np.array_equal(few[0], first[0])
        assert len(set(zip(env.task_description, again[:, 0].tolist(), strict=True))) == 4
    with opened(num_envs=8, goals=2) as env, opened(num_envs=8, goals=2, seed=1) as other:
        starts = env.reset(options={"episodes": evaluation_episodes(7, 8)})[0]["agent_pos"][:, 0]
        assert len(np.unique(starts)) == 2 and np.array_equal(starts[:2], starts[2:4])
        assert not np.isin(other.reset(seed=0)[0]["agent_pos"][:, 0], starts).any()


@pytest.mark.parametrize("failure", [KILL, HANG])
def test_a_worker_that_dies_or_hangs_is_restarted(failure: float) -> None:
    """Slots 0, 1 are of one worker, 2, 3 of the other: both of the first lose their episodes, nobody else's change."""
    with opened(workers=2, timeout_s=1.5) as env, opened() as calm:
        seen, ran = env.reset(seed=3)[0], calm.reset(seed=3)[0]
        assert np.array_equal(seen["agent_pos"], ran["agent_pos"])
        for step, mode in enumerate((FINE, failure, FINE)):
            begun = time.monotonic()
            actual, expected = env.step(actions(FINE, mode, FINE, FINE)), calm.step(actions(*[FINE] * 4))
            assert time.monotonic() - begun < 30
            for a, b in zip(actual[:4], expected[:4], strict=True):
                a, b = (x["agent_pos"] if isinstance(x, dict) else x for x in (a, b))
                assert np.array_equal(a[2:], b[2:])
            assert actual[4]["n_executed"].tolist() == ([0, 0, 2, 2] if step else [2] * 4)
            assert actual[4]["dropped"].tolist() == [step == 1] * 2 + [False] * 2
            if step == 1:
                assert actual[3].tolist() == [True, True, False, False] and not actual[2].any()
                assert actual[1][:2].tolist() == [0, 0]
        assert (actual[0]["agent_pos"][:2, 1] == 0).all()  # the dropped slots have begun the next episode
        assert (env.dropped, env.restarts) == (2, 1)


def test_a_process_that_is_killed_between_two_steps_or_after_an_end() -> None:
    with opened(workers=2) as env:
        env.reset(seed=0)
        env.crew.workers[1].process.kill()
        _, _, _, _, info = env.step(actions(*[FINE] * 4))
        assert info["dropped"].tolist() == [False, False, True, True] and env.restarts == 1
        env.crew.workers[0].process.kill()
        env.crew.workers[0].process.join()
        assert (env.render([0, 3])[0] == 0).all()
        _, _, _, _, info = env.step(actions(*[FINE] * 4))
        assert info["dropped"].tolist() == [True, True, False, False] and info["n_executed"][2:].tolist() == [0, 0]
    with opened(num_envs=2, workers=1) as env:
        env.reset(seed=3)
        chunk = actions(FINE, KILL)
        chunk[0, :, 0] = 1.0
        _, reward, terminated, truncated, info = env.step(chunk)
        assert info["dropped"].tolist() == [False, True] and terminated.tolist() == [True, False]
        assert reward.tolist() == [1.0, 0.0] and truncated.tolist() == [False, True]


def test_a_worker_imports_no_torch() -> None:
    names = ("workers", "metaworld", "robotics.families")
    needed = ", ".join(f"genrl.vla.simulators.{name}" for name in names)
    said = f"import sys, genrl.playground.minitable.env, {needed}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", said], text=True).strip() == "False"


TRAINER = """
import time
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
if __name__ == "__main__":
    env = open_environment(Simulation(FRAIL, num_envs=4, chunk=2, workers=2))
    env.reset(seed=0)
    print(*[worker.process.pid for worker in env.crew.workers], flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(TRAINER.replace("FRAIL", repr(FRAIL)))
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    trainer.kill()
    trainer.communicate()
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive


@pytest.mark.parametrize(("workers", "failure", "text"), [(0, RAISE, "gripper fell off"), (1, KILL, "exit code -9")])
def test_repeated_failure_ends_with_the_report(workers: int, failure: float, text: str) -> None:
    with opened(num_envs=2, workers=workers) as env:
        env.reset(seed=0)
        with pytest.raises(RuntimeError, match=rf"(?s)slot 1 failed 3 times.*{text}"):
            for _ in range(6):
                env.step(actions(FINE, failure))


@pytest.mark.parametrize("workers", tiered([0, 1], [0]))
def test_an_environment_that_cannot_be_made(workers: int, tmp_path: Path) -> None:
    name = FRAIL.replace(":make", ":broken_start")
    with opened(name, workers=workers) as env, pytest.raises(RuntimeError, match="(?s)failed 3 times.*no such robot"):
        env.reset(seed=0)
    if workers:
        name = FRAIL.replace(":make", ":slow_start")
        with opened(name, workers=1, start_timeout_s=0.7) as env, pytest.raises(RuntimeError, match="killed.*timeout"):
            env.reset(seed=0)
        name = FRAIL.replace(":make", ":dies_at_start_once")
        with opened(name, workers=1, settings={"flag": str(tmp_path / "flag")}) as env, opened() as calm:
            assert same(walk(env, 4), walk(calm, 4)) and env.restarts == 1 and env.dropped == 0


def test_a_start_that_raises_gives_way_to_another_of_the_same_task() -> None:
    """In all slots of its group alike, whichever process has them; before, the same seed was tried three times."""
    how: dict[str, Any] = {"num_envs": 8, "group_size": 2, "tasks": ("left", "right")}
    name = FRAIL.replace(":make", ":Picky")
    with opened(name, **how) as env, opened(name, workers=2, **how) as other, opened(**how) as calm:
        shown, wanted = walk(env, 4), walk(calm, 4)
        assert same(walk(other, 4), shown) and env.dropped == 0
        starts, plain = shown[0][:, 0], wanted[0][:, 0]
        assert (starts[::2] == starts[1::2]).all() and 0 < (starts != plain).sum() < 8
        assert env.task_description == calm.task_description


@pytest.mark.parametrize("workers", [0, 1])
def test_misuse_is_told_at_once(workers: int) -> None:
    def fails(text: str, name: str = FRAIL, **how: Any) -> None:
        with opened(name, workers=workers, **how) as env, pytest.raises(ValueError, match=text):
            env.reset(seed=0)
            env.step(np.zeros((4, 2, env.action_dim), dtype=np.float32))

    fails("no 'success' in its info.*set environment.success_key", success_key="success")
    fails("returned 4 values: gymnasium's returns observation, reward, terminated", FRAIL.replace(":make", ":Old"))
    fails("has no 'missing'", FRAIL.replace(":make", ":missing"))
    fails("file 'nowhere.py' does not exist", "nowhere.py:make")


def test_what_cannot_be_and_wrong_calls_are_refused() -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("minitabel", {}, "nearest is 'minitable'"),
        (FRAIL, {"num_envs": 3, "group_size": 2}, "groups complete"),
        (FRAIL, {"timeout_s": 0}, "timeouts"),
        ("metaworld", {"settings": {"camera": "top"}}, "metaworld has no settings"),
        ("minitable", {"goals": 3}, "not for minitable"),
        ("minitable", {"tasks": ("push",)}, "no task 'push'"),
    ]
    for name, how, message in refused:
        with pytest.raises(ValueError, match=message):
            open_environment(Simulation(name, **{"num_envs": 2, "chunk": 2} | how))
    with opened() as env:
        with pytest.raises(RuntimeError, match="call reset"):
            env.step(actions(*[FINE] * 4))
        with pytest.raises(RuntimeError, match="after the first reset"):
            _ = env.action_dim
        env.reset(seed=0)
        with pytest.raises(ValueError, match=r"must have shape \[4, 2, 2\], got \[4, 2, 3\]"):
            env.step(np.zeros((4, 2, 3), dtype=np.float32))
        with pytest.raises(ValueError, match=r"slots \[2\] are not finite"):
            env.step(actions(FINE, FINE, np.nan, FINE))
        with pytest.raises(ValueError, match="episodes must be"):
            env.reset(options={"episodes": [1, 2]})


class Walker(Leads):
    """A policy of fixed actions; `modes` says for every decision how each slot fails."""

    horizon, action_dim, image_size = 2, 2, 0
    inputs = (STATE,)

    def __init__(self, modes: list[tuple[float, ...]], move: float = 0.1) -> None:
        self.modes, self.move = list(modes), move

    def tokenise(self, instructions) -> torch.Tensor:
        raise AssertionError("is not asked for words")

    def encode(self, observation):
        modes = self.modes.pop(0) if self.modes else (FINE,) * len(observation[STATE])
        chunk = torch.from_numpy(actions(*modes, move=self.move))
        return {"chunk": chunk, "state": observation[STATE]}


def collected(env: Environment, modes: list[tuple[float, ...]], **how: Any) -> ChunkRollout:
    given = {"decisions": 7, "seed": 0, "iteration": 0} | how
    return collect(env, Walker(modes), FlowSteps(noise_level=1e-6), RolloutPlan(**given))


@given(st.lists(st.tuples(*[st.sampled_from([FINE, FINE, FINE, RAISE])] * 4), min_size=7, max_size=7))
@settings(max_examples=15)
def test_whatever_fails_when(modes: list[tuple[float, ...]]) -> None:
    """Slots that never fail are untouched; of one that does, rows are valid if and only if their episode is whole."""
    with opened() as env:
        try:
            rollout = collected(env, list(modes))
        except RuntimeError as error:
            assert "failed 3 times" in str(error)
            return
        calm = collected(env, [])
    begun = torch.cat([torch.zeros(1, 4, dtype=torch.bool), rollout.done[:-1]])  # rows in which a slot only resets
    for slot in range(4):
        if all(mode[slot] == FINE for mode in modes):
            assert torch.equal(rollout.observations[STATE][:, slot], calm.observations[STATE][:, slot])
            assert torch.equal(rollout.valid[:, slot], calm.valid[:, slot])
        for episode in rollout.episode[:, slot].unique():
            rows = (rollout.episode[:, slot] == episode) & ~begun[:, slot]
            assert bool((rollout.valid[rows, slot] != rollout.dropped[rows, slot].any()).all())
        assert not rollout.valid[begun[:, slot], slot].any()
    assert torch.equal(rollout.dropped & rollout.truncated & (rollout.n_executed == 0), rollout.dropped)
    assert (rollout.n_executed[rollout.valid] > 0).all()
