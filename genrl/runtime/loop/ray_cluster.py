"""A Ray cluster, that runs already or is started on this machine for the length of a run."""

from __future__ import annotations

import math
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from genrl.runtime.folder.contents import DISTRIBUTIONS
from genrl_rewards.extras import install

PATIENCE_S = 60.0
"""How long a cluster may take to answer."""
START_S = 300.0
"""How long the first actors may take to be placed and to import genrl."""


def connected(address: str | None = None) -> Any:
    """The ray module, connected: to HOST:PORT, or to RAY_ADDRESS, or to a cluster of this machine that `ray start` has
    started; else to one that is started here and ends with this process. `local`: to the last, whatever runs here.

    Raises ValueError where Ray is not installed, and for an address that does not answer, or of another version.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(f"Ray is not installed: {install('ray')}") from error
    if is_connected():
        return ray
    address_asked = address or os.environ.get("RAY_ADDRESS")
    if address_asked is not None and ":" in address_asked and "://" not in address_asked:
        _must_answer(address_asked)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of clusters that are started here: nothing is sent anywhere
    before = signal.getsignal(signal.SIGTERM)
    try:
        with seeing(gpus_of_workers()):
            ray.init(address=address_asked, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except Exception as error:  # of no kind of its own; of another version of Ray or Python it names both
        raise ValueError(
            f"RAY_ADDRESS: {address_asked or 'no cluster could be started on this machine'}: {error}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's own would end the run without saving
    return ray


def is_connected() -> bool:
    """Whether this process is."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _must_answer(address: str) -> None:
    """Raise ValueError where no cluster answers; in another process, since Ray waits for long and then ends its own."""
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    problem = ""
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
        completed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        problem = completed.stderr.strip().rpartition("\n")[2] if completed.returncode else ""
    except (OSError, ValueError) as error:
        problem = str(error)
    except subprocess.TimeoutExpired:
        problem = f"silent for {PATIENCE_S:g} s"
    if problem:
        raise ValueError(
            f"RAY_ADDRESS: no Ray cluster answers at {address} ({problem}); start one there by `ray start "
            f"--head --port {port}`, and join it on this machine by `ray start --address {address}`; "
            "or unset it: one is started"
        )


@contextmanager
def cluster(accelerator: Accelerator) -> Iterator[Any]:
    """Within the block all processes of a run are connected to one cluster: at RAY_ADDRESS, or one that the main
    process starts and ends. Who is connected before stays it."""
    leaves = not is_connected()
    # without an address a new one, whatever else runs on this machine
    address = None if "RAY_ADDRESS" in os.environ else "local"
    if accelerator.is_main_process:
        address = connected(address).get_runtime_context().gcs_address
    if accelerator.num_processes > 1:
        address, mode = broadcast_object_list([address, os.environ.get("RAY_AUTH_MODE")])
        if mode is not None:  # Ray sets it where it starts a cluster, and its children alone have it
            os.environ["RAY_AUTH_MODE"] = mode
    ray = connected(address)
    try:
        yield ray
        accelerator.wait_for_everyone()  # the cluster may be this process's
    finally:
        if leaves:
            ray.shutdown()


def gpus_of_workers() -> list[str]:
    """GPUs of this machine on which no process of the run trains."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return gpus[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :]


@contextmanager
def seeing(gpus: list[str]) -> Iterator[None]:
    """Within the block processes that are started see these GPUs; where there are none, those of this process."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def room_for(actors: int, device: str) -> Iterator[dict[str, Any]]:
    """Within the block there is room on the cluster for so many actors of this process, which computes on `device`: a
    CPU for each, and where that is a GPU a share of one, on as many nodes as can be. Yields Ray's options for each.

    Raises ValueError where the cluster is too small, has no GPU, or is used by others.
    """
    ray = connected()
    cpus = int(ray.cluster_resources().get("CPU", 0)) // int(os.environ.get("WORLD_SIZE", "1"))
    if actors > cpus:
        raise ValueError(
            f"engine: {actors} actors of one CPU each for a process, and the Ray cluster has {cpus}; write fewer, or "
            "let more nodes join"
        )
    each = {"CPU": 1.0}
    if device == "cuda":
        each["GPU"] = gpu_share(actors)
        if not each["GPU"]:
            raise ValueError("engine: this process computes on a GPU, and the Ray cluster has none: it would round")
    group = ray.util.placement_group([each] * actors, strategy="SPREAD")  # all or none: two runs cannot starve
    try:
        if not group.wait(PATIENCE_S):
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ValueError(
                f"engine: no room for {actors} actors of {each} after {PATIENCE_S:g} s: others use the Ray cluster, "
                f"of which {free} is free; wait for them, write fewer, or let more nodes join"
            )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        taken = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0.0)}
        yield taken | {"max_restarts": 0, "scheduling_strategy": strategy}
    finally:
        ray.util.remove_placement_group(group)


def gpu_share(actors: int) -> float:
    """Share of a GPU for each of so many actors of every process of the run; 0 where the cluster has none."""
    gpus = int(connected().cluster_resources().get("GPU", 0.0))
    if not gpus:
        return 0.0
    each = math.ceil(actors * int(os.environ.get("WORLD_SIZE", "1")) / gpus)  # on a GPU, so that all find room
    return math.floor(10_000 / each) / 10_000


def versions() -> dict[str, str]:
    """What has to be the same wherever numbers are to be the same."""
    packages = ("genrl", "torch", "diffusers", "transformers", "peft")
    return {"python": platform.python_version()} | {name: version(DISTRIBUTIONS.get(name, name)) for name in packages}


def check_versions(theirs: Mapping[str, str]) -> None:
    """Raise ValueError where a worker's versions are not those of this process."""
    ours = versions()
    if odd := [name for name in ours if theirs.get(name) != ours[name]]:
        differences = ", ".join(f"{name} {theirs.get(name)} there and {ours[name]} here" for name in odd)
        raise ValueError(
            f"engine: a Ray worker has other versions: {differences}; install the same on all nodes, or its samples "
            "would be others"
        )
