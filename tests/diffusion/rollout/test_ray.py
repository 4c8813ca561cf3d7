"""Samples that Ray actors draw and rewards that they hold: the run of one process, to the bit, whoever dies."""

import importlib.util
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from genrl.diffusion.config.schema import Config
from genrl.diffusion.forward.noising import solved
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout import ray_rollouts
from genrl.diffusion.rollout.forest import Samples
from genrl.diffusion.rollout.ray_rewards import RewardPool
from genrl.diffusion.rollout.ray_rollouts import Order, RayRollouts, packed, unpacked
from genrl.diffusion.rollout.rollout import Job, Sheet, Worker, jobs_of
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import check_processes, train
from genrl.runtime.folder.run import Run, read_metrics
from genrl.runtime.loop.ray_cluster import room_for
from genrl_rewards.failures import RewardFailed
from genrl_rewards.service.remote import ServerRaised
from tests import ray_nodes
from tests.diffusion import runs


def needs_ray(test: Any) -> Any:
    missing = importlib.util.find_spec("ray") is None
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="pip install 'genrl-diffusion[ray]'")(test))


SAMPLING = {"num_inference_steps": 4, "guidance_scale": 2.0, "prompts_per_iteration": 3, "group_size": 4}
GRPO = {"algorithm": "flow_grpo", "window": {"size": 2, "low": 0, "high": 3}, "clip_range": 1e-2, "kl_weight": 0.01}
GRPO["updates_per_iteration"] = 2
NFT = {"algorithm": "diffusion_nft", "old_policy_decay": "ramp", "updates_per_iteration": 2}
REWARDS = """

def spread(images, group):
    means = images.mean((1, 2, 3))
    return ((means - means.mean()) / len(set(group))).tolist()


class Ill:
    def __init__(self, device="cpu"):
        raise ValueError("no such checkpoint")

    def __call__(self, images):
        return [0.0] * len(images)


class Odd(Exception):
    pass


def raises(images):
    raise Odd("nothing to see")


def slow(images):
    import time

    time.sleep(60)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes of one CPU each."""
    with ray_nodes.connected(cpus=1):
        import ray

        yield ray


def engine(drawing: int, scoring: int = 0) -> dict[str, Any]:
    return {"rollout_workers": drawing, "reward_workers": scoring}


def config(folder: Path, model: Path, trainer: dict[str, Any], *names: str, **changes: Any) -> Config:
    """A run of three iterations by these rewards of `REWARDS`, or by brightness."""
    with (folder / "rewards.py").open("a") as file:
        file.write(REWARDS)
    rewards = [runs.reward(folder, name) for name in names or ("brightness",)]
    common: dict[str, Any] = {"trainer": trainer, "sampling": SAMPLING, "rewards": rewards, "iterations": 3}
    return runs.config(folder, model, **common | changes)


@needs_ray
def test_drawn_elsewhere(cluster: Any, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two actors draw, of which one is killed in the first iteration and another hangs in the second."""
    here = train(config(folder, model, GRPO, output=str(folder / "here")))
    struck: list[int] = []
    hand_out = RayRollouts._hand_out

    def strike(far: RayRollouts, waiting: deque[Job], order: Order) -> None:
        """The first that is free in an iteration: killed with work just begun; or stopped, so that it begins none."""
        seat = next((seat for seat in far.seats if seat.awaited is None), None)
        if seat is None or not waiting or order.version - 1 != len(struck) or len(struck) == 2:
            return hand_out(far, waiting, order)
        hangs = len(struck) == 1
        struck.append(ray_nodes.process_of(seat.actor))
        if hangs:
            os.kill(struck[-1], signal.SIGSTOP)
        hand_out(far, waiting, order)
        if hangs:
            seat.since -= 1e6  # as if it had been silent for so long
        else:
            os.kill(struck[-1], signal.SIGKILL)

    monkeypatch.setattr(RayRollouts, "_hand_out", strike)
    there = train(config(folder, model, GRPO, output=str(folder / "there"), engine=engine(2)))
    assert runs.differences(here, there) == []
    rows = read_metrics(Run(there).metrics)[1:]
    assert rows[-1]["workers/lost"] == len(struck) == 2
    assert all(0.0 <= row["workers/idle"] <= 1.0 and row["timing/push_s"] > 0.0 for row in rows)
    assert all(row["model_calls/sample"] > 0 for row in rows)


@needs_ray
def test_scored_elsewhere(cluster: Any, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples and groups drawn an iteration ahead; the actor that scores is killed before the second iteration."""
    older = {"sampling": SAMPLING | {"staleness": 1}}
    here = train(config(folder, model, NFT, "redness", "spread", output=str(folder / "here"), **older))
    struck: list[int] = []
    collect = DiffusionRun.collect

    def strike(run: DiffusionRun, *given: Any, **options: Any) -> Any:
        pool = run.scorers.pool
        assert pool is not None
        if run.iteration == 1 and not struck:
            struck.append(ray_nodes.process_of(pool.seats[0].actor))
            os.kill(struck[0], signal.SIGKILL)
        return collect(run, *given, **options)

    monkeypatch.setattr(DiffusionRun, "collect", strike)
    there = train(
        config(folder, model, NFT, "redness", "spread", output=str(folder / "there"), engine=engine(1, 1), **older)
    )
    assert runs.differences(here, there) == []
    assert read_metrics(Run(there).metrics)[-1]["workers/lost"] == 1.0


def broken(policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None]) -> Samples:
    raise ArithmeticError(f"slots {slots}")


@needs_ray
def test_what_is_wrong_with_drawing_is_told(cluster: Any, folder: Path, model: Path, monkeypatch: Any) -> None:
    """Other weights, a draw that raises or cannot be sent, lost actors, too many workers, other packages."""
    settings = config(folder, model, NFT, engine=engine(1))
    with runs.opened(settings) as run:
        assert run.far is not None
        sheet = Sheet.of(run.config, run.prompts, 0)
        jobs = list(jobs_of(run.config, sheet, Worker()))
        named, rest = run.weights.named, (Worker(), lambda calls: None)
        with pytest.raises(ValueError, match=r"how diffusion_nft draws cannot be sent .*\(.{1,200}\); draw by a func"):
            run.far.order(lambda *_, beat, run=run: run, named, Worker())
        with pytest.raises(ArithmeticError, match="slots"):
            next(run.far.draw(run.far.order(broken, named, Worker()), jobs, *rest))
        order = run.far.order(solved, named, Worker())
        assert [position for position, _ in run.far.draw(order, jobs, *rest)] == [job.position for job in jobs]
        with pytest.raises(RuntimeError, match=r"by the weights of version 2, not of 3"):
            run.far._check_version(order.version, order.version + 1)  # of an actor that missed an update
    with pytest.raises(ValueError, match="99 actors of one CPU each for a process, and the Ray cluster has 2"):
        room_for(99, "cpu").__enter__()
    with pytest.raises(ValueError, match="this process computes on a GPU, and the Ray cluster has none"):
        room_for(1, "cuda").__enter__()
    with room_for(1, "cpu") as options:
        far = RayRollouts(settings, 1, options)
        far._timeout_s = 0.01  # no time to load in
        jobs = [ray_rollouts.Job(0, [0], Batch([], [], {}))]
        with pytest.raises(RuntimeError, match="3 rollout workers were lost in a row.*distributed.timeout_s"):
            list(far.draw(far.order(broken, {}, Worker()), jobs, Worker(), lambda calls: None))
        far.close()
    monkeypatch.setattr("genrl.runtime.loop.ray_cluster.version", lambda name: "9.9")
    with pytest.raises(ValueError, match=r"torch 2\S* there and 9.9 here"), room_for(1, "cpu") as options:
        RayRollouts(settings, 1, options)


@needs_ray
def test_what_is_wrong_with_scoring_is_told(cluster: Any, folder: Path, model: Path) -> None:
    """A reward that cannot be loaded or raises there, lost actors; a run that is to end waits for none."""
    with pytest.raises(ValueError, match="engine.reward_workers: .*no such checkpoint"), room_for(1, "cpu") as options:
        RewardPool(config(folder, model, NFT, "Ill", engine=engine(1, 1)), 1, options)
    settings = config(folder, model, NFT, "raises", "slow", engine=engine(1, 1))
    ended: list[bool] = []
    with room_for(1, "cpu") as options:
        pool = RewardPool(settings, 1, options, lambda: bool(ended))
        raises, slow = settings.reward_labels
        with pytest.raises(ServerRaised, match="Odd: nothing to see, in a reward worker"):  # of a class of that file
            pool.score(raises, {"images": [0.0]})
        assert pool.lost == 0
        pool._timeout_s = 0.0
        with pytest.raises(RewardFailed, match="3 reward workers were lost in a row, .*nothing was heard"):
            pool.score(slow, {"images": [0.0]})
        ended.append(True)
        assert all(map(math.isnan, pool.score(slow, {"images": [0.0, 1.0]})[0]))
        pool.close()


@needs_ray
def test_a_cluster_of_the_run_ends_with_it(folder: Path, model: Path) -> None:
    """Started by the run, ended with it by SIGTERM, and again by the resumed run at its end; to the bit."""
    train(config(folder, model, GRPO, output=str(folder / "here")))
    config(folder, model, GRPO, output=str(folder / "far"), engine=engine(1))
    log, file, run = folder / "far.log", str(folder / "tiny.yaml"), Run(folder / "far")
    where = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "300000", "RAY_worker_niceness": "0"}
    process = runs.start(runs.train_file, file, log=log, environment=where)
    while process.is_alive() and not (run.metrics.exists() and len(read_metrics(run.metrics)) > 1):
        time.sleep(0.05)
    group = children(process.pid)
    process.terminate()
    assert runs.wait([process], 300) == [143], log.read_text()[-3000:]
    until = time.monotonic() + 60  # a worker that was just being started ends a moment later
    while (left := [pid for pid in group if Path(f"/proc/{pid}/exe").exists()]) and time.monotonic() < until:
        time.sleep(0.2)
    assert group and not left
    process = runs.start(runs.train_file, file, str(run.folder), log=log, environment=where)
    assert runs.wait([process], 500) == [0], log.read_text()[-3000:]
    assert runs.differences(folder / "here", run.folder) == []


def children(pid: int | None) -> list[int]:
    """Of a process, and theirs."""
    result = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return result + [below for child in result for below in children(child)]


@needs_ray
def test_two_processes_with_a_worker_each(folder: Path, model: Path) -> None:
    common: dict[str, Any] = {"trainer": GRPO, "sampling": SAMPLING}
    for name, more in (("here", {}), ("far", {"engine": engine(2)})):
        runs.finish(runs.written(folder, model, name, **common, **more), 2, runs.train_file)
    assert runs.differences(folder / "here" / "run", folder / "far" / "run") == []


def test_what_cannot_be_held_there_is_refused(folder: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="engine.rollout_workers: 3 processes have as many each.*write 3"):
        check_processes(config(folder, model, GRPO, engine=engine(2)), 3)


class Pair(NamedTuple):
    one: Tensor
    two: Any


@dataclass(frozen=True)
class Held:
    pair: Pair
    by_step: dict[int, Tensor]


def test_what_is_sent_is_no_larger_than_it_is() -> None:
    """Views of larger tensors are copied, what stands twice stays one, and all else is as it was."""
    whole = torch.arange(12.0).view(3, 4)
    held = Held(Pair(whole[1:2], [1, "a", None]), {0: whole, 1: whole})
    sent = packed(held)
    assert torch.equal(sent.pair.one, whole[1:2]) and sent.pair.one.untyped_storage().nbytes() == 16
    assert sent.pair.two == [1, "a", None] and sent.by_step[0] is sent.by_step[1] is whole
    back = unpacked(sent, torch.device("meta"))
    assert back.by_step[0] is whole and back.pair.one is sent.pair.one  # what was on the CPU stays there
    far = unpacked({0: ray_rollouts.OnDevice(whole)}, torch.device("meta"))
    assert far[0].device.type == "meta"
