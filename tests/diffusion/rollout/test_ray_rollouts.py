"""Samples that Ray actors draw: the run that one process does alone, to the bit, whoever dies."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from genrl.config import load
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout import ray_rollouts
from genrl.diffusion.rollout.forest import Drawn
from genrl.diffusion.rollout.ray_rollouts import Order, RayRollouts, packed, unpacked
from genrl.diffusion.rollout.rollout import Job, Sheet, Worker, jobs_of
from genrl.diffusion.train import check_processes, train
from genrl.runtime import ray_cluster
from genrl.runtime.ray_cluster import room_for
from genrl.runtime.run import Run, read_metrics
from tests.diffusion import runs
from tests.ray_nodes import process_of

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'genrl-diffusion[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORKERS = {"kind": "ray", "rollout_workers": 2}
SAMPLING = {"num_inference_steps": 4, "guidance_scale": 2.0, "prompts_per_iteration": 3, "group_size": 4}
GRPO = {"algorithm": "flow_grpo", "window": {"size": 2, "low": 0, "high": 3}, "clip_range": 1e-2}
METHODS: dict[str, dict[str, Any]] = {
    "flow_grpo": {**GRPO, "kl_weight": 0.01, "updates_per_iteration": 2},
    "diffusion_nft": {"algorithm": "diffusion_nft", "old_policy_decay": "ramp", "updates_per_iteration": 2},
    "trees": {**GRPO, "tree": {"ways": 2, "at": "window"}},
}


def changes(name: str) -> dict[str, Any]:
    return {"trainer": METHODS[name], "sampling": SAMPLING, "iterations": 3}


@pytest.mark.parametrize("name", METHODS)
def test_the_run_that_one_process_does_alone(
    cluster: Any, folder: Path, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, weights, optimiser and snapshots; in flow_grpo's run two actors draw, one is killed in the first
    iteration and another hangs in the second. How one is handed its work is the same for all methods."""
    here = train(runs.config(folder, model, output=str(folder / "here"), **changes(name)))
    struck: list[int] = []
    hand_out = RayRollouts._hand_out

    def strike(far: RayRollouts, waiting: deque[Job], order: Order) -> None:
        """The first that is free in an iteration: killed with work just begun; or stopped, so that it begins none."""
        seat = next((seat for seat in far.seats if seat.awaited is None), None)
        if seat is None or not waiting or order.version - 1 != len(struck) or len(struck) == 2:
            return hand_out(far, waiting, order)
        hangs = len(struck) == 1
        struck.append(process_of(seat.actor))
        if hangs:
            os.kill(struck[-1], signal.SIGSTOP)
        hand_out(far, waiting, order)
        if hangs:
            seat.since -= 1e6  # as if it had been silent for so long
        else:
            os.kill(struck[-1], signal.SIGKILL)

    engine = WORKERS if name == "flow_grpo" else {**WORKERS, "rollout_workers": 1}
    if name == "flow_grpo":
        monkeypatch.setattr(RayRollouts, "_hand_out", strike)
    there = train(runs.config(folder, model, output=str(folder / "there"), engine=engine, **changes(name)))
    assert runs.differences(here, there) == []
    rows = read_metrics(Run(there).metrics)[1:]
    assert [row["workers/lost"] for row in rows][-1] == len(struck) == (2 if name == "flow_grpo" else 0)
    assert all(0.0 <= row["workers/idle"] <= 1.0 and row["timing/push_s"] > 0.0 for row in rows)
    assert all(row["model_calls/sample"] > 0 for row in rows)


def broken(policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None]) -> Drawn:
    raise ArithmeticError(f"slots {slots}")


def test_what_is_wrong_is_told(cluster: Any, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the weights, a draw that raises there, one that cannot be sent; too many workers; packages of
    another version."""
    settings = runs.config(folder, model, engine={**WORKERS, "rollout_workers": 1}, **changes("diffusion_nft"))
    with runs.opened(settings) as run:
        assert run.far is not None
        sheet = Sheet.of(run.config, run.prompts, 0, leaves=1, roots_together=None)
        jobs = list(jobs_of(run.config, sheet, Worker()))
        named, rest = run.weights.named, (Worker(), lambda calls: None)
        with pytest.raises(
            ValueError,
            match=r"how diffusion_nft draws cannot be sent to rollout workers \(.{1,200}\); draw by a function",
        ):
            run.far.order(lambda *_, beat, run=run: run, named, Worker())
        with pytest.raises(ArithmeticError, match="slots"):
            next(run.far.source(run.far.order(broken, named, Worker()), *rest)(jobs))
        from genrl.diffusion.methods.noising import solved

        order = run.far.order(solved, named, Worker())
        assert [position for position, _ in run.far.source(order, *rest)(jobs)] == [job.position for job in jobs]
        with pytest.raises(RuntimeError, match=r"by the weights of version 2, not of 3"):
            run.far._check_version(order.version, order.version + 1)  # of an actor that missed an update
    with pytest.raises(ValueError, match="99 actors of one CPU each for a process, and the Ray cluster has 2"):
        room_for(99, "cpu").__enter__()
    with pytest.raises(ValueError, match="this process computes on a GPU, and the Ray cluster has none"):
        room_for(1, "cuda").__enter__()
    monkeypatch.setattr("genrl.runtime.ray_cluster.version", lambda name: "9.9")
    with pytest.raises(ValueError, match=r"torch 2\S* there and 9.9 here"), room_for(1, "cpu") as options:
        RayRollouts(settings, 1, options)


def test_actors_that_are_lost_again_and_again(cluster: Any, folder: Path, model: Path) -> None:
    """Nothing waits for ever: here there is no time to load in."""
    settings = runs.config(folder, model, engine={**WORKERS, "rollout_workers": 1}, **changes("diffusion_nft"))
    with room_for(1, "cpu") as options:
        far = RayRollouts(settings, 1, options)
        far._timeout_s = 0.01
        source = far.source(far.order(broken, {}, Worker()), Worker(), lambda calls: None)
        with pytest.raises(RuntimeError, match="3 rollout workers were lost in a row.*distributed.timeout_s"):
            list(source([ray_rollouts.Job(0, [0], Batch([], [], {}))]))
        far.close()


def test_room_that_others_have(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All actors of a run have room at the same time, on as many nodes as can be, or it is told at the start."""
    monkeypatch.setattr(ray_cluster, "PATIENCE_S", 2.0)
    with room_for(2, "cpu") as options:
        there = [cluster.remote(Somebody).options(**options).remote() for _ in range(2)]
        assert len(set(cluster.get([actor.node.remote() for actor in there]))) == 2
        with pytest.raises(ValueError, match=r"no room for 1 actors .* others use the Ray cluster"):
            room_for(1, "cpu").__enter__()
    with room_for(2, "cpu"):
        pass


class Somebody:
    def node(self) -> str:
        return str(ray_cluster.connected().get_runtime_context().get_node_id())


def test_a_cluster_of_the_run_ends_with_it(folder: Path, model: Path) -> None:
    """Started by the run, ended with it by SIGTERM, and again by the resumed run at its end; to the bit."""
    common = changes("flow_grpo")
    train(runs.config(folder, model, output=str(folder / "here"), **common))
    runs.config(folder, model, output=str(folder / "far"), engine={**WORKERS, "rollout_workers": 1}, **common)
    log, file, run = folder / "far.log", str(folder / "tiny.yaml"), Run(folder / "far")
    where = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "300000", "RAY_worker_niceness": "0"}
    process = runs.start(runs.train_file, file, log=log, environment=where)
    while process.is_alive() and not (run.metrics.exists() and len(read_metrics(run.metrics)) > 1):
        time.sleep(0.05)
    group = children(process.pid)
    process.terminate()
    assert runs.wait([process], 300) == [143], log.read_text()[-3000:]
    assert group and not [pid for pid in group if Path(f"/proc/{pid}/exe").exists()]
    process = runs.start(runs.train_file, file, str(run.folder), log=log, environment=where)
    assert runs.wait([process], 500) == [0], log.read_text()[-3000:]
    assert runs.differences(folder / "here", run.folder) == []


def children(pid: int | None) -> list[int]:
    """Of a process, and theirs."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return found + [below for child in found for below in children(child)]


def test_two_processes_with_a_worker_each(folder: Path, model: Path) -> None:
    """As two processes without, to the bit."""
    for name, engine in (("here", {}), ("far", {"engine": WORKERS})):
        runs.config(folder, model, output=str(folder / name), **changes("flow_grpo"), **engine)
        file = (folder / "tiny.yaml").rename(folder / f"{name}.yaml")
        processes = runs.start_ranks(2, runs.train_file, str(file), log=folder / f"{name}.log")
        assert runs.wait(processes, 500) == [0, 0], "\n".join(p.read_text()[-3000:] for p in folder.glob("*.log"))
    assert runs.differences(folder / "here", folder / "far") == []
    with pytest.raises(ValueError, match="engine.rollout_workers: 3 processes have as many each.*write 3"):
        check_processes(load(folder / "far.yaml"), 3)


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
