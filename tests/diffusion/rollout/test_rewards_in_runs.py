"""Whole runs on rewards that are combined, scored beside sampling, or served: equal to plain ones, outages included."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import genrl_rewards
from genrl.diffusion.train import train
from tests import servers
from tests.diffusion import runs
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("unproven")


def run(folder: Path, model: Path, name: str, **changes: Any) -> Path:
    return train(runs.config(folder, model, output=str(folder / name), **{**runs.QUIET, **changes}))


def remote(name: str, port: int, **outage: Any) -> list[dict[str, Any]]:
    return [{"name": name, "remote": f"http://127.0.0.1:{port}", "outage": outage}]


def test_combined_rewards_are_scored_beside_and_survive_a_stop(folder: Path, model: Path) -> None:
    """In the background to the bit, also of rewards that draw from the global generators; running statistics go on."""
    gate = {"reward": "brightness", "at_least": 0.45, "otherwise": -1}
    scheduled = {"schedule": [[0, 0.0], [4, 1.0]], "normalize": "running"}
    three = [
        runs.reward(folder, "redness", gate=gate, **scheduled),
        runs.reward(folder, "brightness", normalize="group"),
        runs.reward(folder, "Interrupt", args={"number": 0, "call": 10**9}),
    ]
    changes: dict[str, Any] = {"rewards": three, "iterations": 3, "checkpoint": {"every": 1, "keep": 5}}
    one = run(folder, model, "here", **changes)
    two = run(folder, model, "beside", sampling={"score_in_background": True}, **changes)
    assert runs.differences(one, two) == []
    assert runs.differences(one, runs.resumed(one, folder, 2)) == []
    assert runs.last_state(one).state["memory"]["scores"]["redness"]["count"] == 12  # 3 iterations of 4 samples
    rows = runs.rows(one)
    assert [row["used/redness_weight"] for row in rows] == [0.0, 0.25, 0.5]
    assert all(0 <= row["used/redness_gated"] <= 1 and row["used/brightness_mean"] == pytest.approx(0) for row in rows)


def test_a_served_reward_trains_the_same_model_also_when_its_server_goes_and_comes_back(
    folder: Path, model: Path
) -> None:
    name, port = f"{folder / 'rewards.py'}:brightness", free_port()
    reward = genrl_rewards.load(name)
    here = run(folder, model, "here", rewards=[{"name": name}], iterations=3)
    calls: list[float] = []

    def counted(images: Any) -> Any:
        calls.append(time.monotonic())
        return reward(images)

    back: list[float] = []
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        server.enter_context(servers.live(counted, name, port=port))

        def outage() -> None:
            while len(calls) < 3:
                time.sleep(0.01)
            server.close()
            time.sleep(1.0)
            stack.enter_context(servers.live(counted, name, port=port))
            back.append(time.monotonic())

        thread = threading.Thread(target=outage)
        thread.start()
        try:
            entries = remote(name, port, policy="stop", deadline_s=60.0, timeout_s=0.5)
            there = run(folder, model, "there", rewards=entries, iterations=3)
        finally:
            thread.join()
    assert len(calls) == 6 and calls[-1] > back[0]  # 3 iterations of 2 micro-batches, the last after the outage
    assert runs.differences(here, there) == []


@pytest.mark.parametrize("policy", ["drop", "stop"])
def test_a_server_that_is_gone_for_good(folder: Path, model: Path, policy: str) -> None:
    name, port = f"{folder / 'rewards.py'}:brightness", free_port()
    reward, gone, calls = genrl_rewards.load(name), threading.Event(), iter(range(9))

    def counted(images: Any) -> Any:
        if next(calls) == 1:
            gone.set()
        return reward(images)

    with ExitStack() as server:
        server.enter_context(servers.live(counted, name, port=port))
        thread = threading.Thread(target=lambda: (gone.wait(60), time.sleep(0.1), server.close()))
        thread.start()
        entries = remote(name, port, policy=policy, deadline_s=0.5, timeout_s=0.5)
        if policy == "stop":
            with pytest.raises(genrl_rewards.RewardFailed, match="'brightness': reward server http.* is not available"):
                run(folder, model, "run", rewards=entries, iterations=50)
        else:
            run(folder, model, "run", rewards=entries, iterations=5, idle_iterations=None)
        thread.join()
    first, *_, last = runs.rows(folder / "run")
    assert first["reward/brightness_failed"] == 0
    if policy == "drop":
        assert last["reward/brightness_failed"] == 4 and last["reward/brightness_mean"] is None  # nothing, not zero
        assert last["reward/total_mean"] is None and last["zero_std_ratio"] == 1
