"""Addresses at which no Ray cluster answers, and versions that differ: told in a bounded time, with what to do."""

import importlib.util
import os
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from genrl.runtime.loop import ray_cluster
from tests.ports import free_port

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'genrl-diffusion[ray]'", allow_module_level=True)


def test_nobody_there_and_somebody_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=rf"^RAY_ADDRESS: no Ray cluster answers at {address} .*ray start --head"):
        ray_cluster.connected()
    monkeypatch.setattr(ray_cluster, "PATIENCE_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ValueError, match="silent for 3 s"):
            ray_cluster.connected(f"127.0.0.1:{silent.getsockname()[1]}")


def test_other_versions_are_named() -> None:
    ray_cluster.check_versions(ray_cluster.versions())
    theirs = ray_cluster.versions() | {"torch": "1.0", "python": "3.0"}
    with pytest.raises(ValueError, match="python 3.0 there and 3.*, torch 1.0 there and 2"):
        ray_cluster.check_versions(theirs)


@pytest.mark.slow
def test_signals_stay_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has a handler of its own for SIGTERM, which would end a run without saving."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        ray = ray_cluster.connected("local")  # else Ray may join one of another test, which then ends
        assert ray.cluster_resources()["CPU"] >= 1 and ray_cluster.gpu_share(2) >= 0.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(5.0)
        assert ray_cluster.connected("127.0.0.1:1") is ray  # who is connected stays it
    finally:
        signal.signal(signal.SIGTERM, before)
        if ray_cluster.is_connected():
            ray.shutdown()


def test_every_actor_finds_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    shares = {(0, 2): 0.0, (4, 2): 1.0, (1, 3): 0.3333, (2, 3): 0.5, (4, 6): 0.5, (1, 6): 0.1666}
    for (gpus, actors), share in shares.items():
        cluster = SimpleNamespace(cluster_resources=lambda gpus=gpus: {"GPU": gpus})
        monkeypatch.setattr(ray_cluster, "connected", lambda cluster=cluster: cluster)
        assert ray_cluster.gpu_share(actors) == share
        assert not share or gpus * int(1 / share) >= actors


@pytest.mark.parametrize(
    ("visible", "trainers", "left"), [("0,1,2,3", 2, ["2", "3"]), ("5,7", 1, ["7"]), ("0", 1, []), ("0,1", 2, [])]
)
def test_workers_have_gpus_of_their_own_where_there_are_some(
    monkeypatch: Any, visible: str, trainers: int, left: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    assert ray_cluster.gpus_of_workers() == left
    with ray_cluster.seeing(left):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == (",".join(left) or visible)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
