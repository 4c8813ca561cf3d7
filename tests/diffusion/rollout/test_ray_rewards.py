"""Rewards that Ray actors hold: the scores of the run that scores itself, to the bit, whoever dies."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from genrl.config import ConfigError
from genrl.diffusion.rollout.ray_rewards import RewardPool
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime.ray_cluster import room_for
from genrl.runtime.run import Run, read_metrics
from rewards.failures import RewardFailed
from rewards.service.remote import ServerRaised
from tests.diffusion import runs
from tests.ray_nodes import process_of

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'genrl-diffusion[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ENGINE = {"kind": "ray", "rollout_workers": 1, "reward_workers": 1}
MORE = """

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


def changes(folder: Path, *names: str) -> dict[str, Any]:
    with (folder / "rewards.py").open("a") as file:
        file.write(MORE)
    return {
        "trainer": {"algorithm": "diffusion_nft", "updates_per_iteration": 2},
        "sampling": {"num_inference_steps": 3, "prompts_per_iteration": 3, "group_size": 4},
        "rewards": [{"name": f"{folder / 'rewards.py'}:{name}"} for name in names],
        "iterations": 3,
    }


def test_the_run_that_scores_itself(cluster: Any, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of samples and of groups; the actor is killed before the second iteration's scores are asked for."""
    more = changes(folder, "redness", "spread")
    here = train(runs.config(folder, model, output=str(folder / "here"), **more))
    struck: list[int] = []
    collect = DiffusionRun.collect

    def strike(run: DiffusionRun, *given: Any, **options: Any) -> Any:
        pool = run.scorers.pool
        assert pool is not None
        if run.iteration == 1 and not struck:
            struck.append(process_of(pool.seats[0].actor))
            os.kill(struck[0], signal.SIGKILL)
        return collect(run, *given, **options)

    monkeypatch.setattr(DiffusionRun, "collect", strike)
    there = train(runs.config(folder, model, output=str(folder / "there"), engine=ENGINE, **more))
    assert runs.differences(here, there) == []
    assert [row["workers/lost"] for row in read_metrics(Run(there).metrics)[1:]] == [0.0, 1.0, 1.0]


def test_what_is_wrong_is_told(cluster: Any, folder: Path, model: Path) -> None:
    """A reward that cannot be loaded there, one that raises there, actors that are lost again and again; a run that is
    to end waits for none."""
    settings = runs.config(folder, model, engine=ENGINE, **changes(folder, "Ill"))
    with pytest.raises(ValueError, match="engine.reward_workers: .*no such checkpoint"), room_for(1, "cpu") as options:
        RewardPool(settings, 1, options)
    settings = runs.config(folder, model, engine=ENGINE, **changes(folder, "raises", "slow"))
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


def test_what_cannot_be_held_there_is_refused(folder: Path, model: Path) -> None:
    more = changes(folder, "redness")
    entry = more["rewards"][0]
    for changed, says in (
        ({"rewards": [{"name": "shapes", "remote": "http://127.0.0.1:1"}]}, "all rewards are on servers"),
        ({"rewards": [entry | {"offload": True}]}, r"rewards\.0\.offload.*the model is in another process"),
        ({"rewards": [entry | {"args": {"device": "cuda:1"}}]}, "Ray gives each worker its device"),
        ({"rewards": [entry | {"isolate": True, "outage": {"policy": "pause"}}]}, "a reward worker that is silent is"),
        ({"engine": ENGINE | {"reward_workers": 99}}, "99 workers, but micro-batches for"),
        ({"rewards": [{"name": "a.py:b", "remote": ["http://a", "http://a"]}]}, "names a server twice"),
        ({"rewards": [{"name": "a.py:b", "remote": ["http://a", "http://b"], "cache": 9}]}, "ask one server at a time"),
    ):
        with pytest.raises(ConfigError, match=says):
            runs.config(folder, model, **({"engine": ENGINE} | more | changed))
