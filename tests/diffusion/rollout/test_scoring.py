"""The rewards of a run: whole groups, one order, models that move; whole runs on combined and served rewards."""

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState

import genrl_rewards
from genrl.data.prompts import Prompt
from genrl.diffusion.rollout.scoring import Scored, Scorers, Scoring, open_scorers, plain, score
from genrl.diffusion.train import train
from genrl_rewards.compose import Component, Gate
from tests import servers
from tests.diffusion import runs
from tests.run_folders import start_ranks, wait

IMAGES = torch.rand(12, 3, 5, 4, generator=torch.Generator().manual_seed(0))
ROWS = [Prompt(f"prompt {k // 4}", {"style": k}) for k in range(12)]
GROUP = [k // 4 for k in range(12)]
PIECES = [[5, 6, 7], [0, 1, 2], [11], [8, 9, 10], [3, 4]]  # groups lie across micro-batches


def pieces() -> list[tuple[list[int], torch.Tensor]]:
    return [(slots, IMAGES[slots]) for slots in PIECES]


def brightness(images: torch.Tensor) -> Any:
    means = images.mean((1, 2, 3))
    return means, {"red": images[:, 0].mean((1, 2))}


def noisy(images: torch.Tensor, style: list[int]) -> Any:
    return torch.rand(len(images)) + torch.tensor(style)


def rank(images: torch.Tensor, group: list[int]) -> list[float]:
    assert len(set(group)) == 1 and len(group) == 4  # one whole group
    means = images.mean((1, 2, 3))
    return [float((means < m).sum()) for m in means]


def wins(images: torch.Tensor, pairs: list[tuple[int, int]]) -> list[float]:
    means = images.mean((1, 2, 3))
    return [float(means[i] > means[j]) for i, j in pairs]


def same(a: Scored, b: Scored) -> bool:
    return repr(a) == repr(b) and all(torch.equal(a.values[k].nan_to_num(), b.values[k].nan_to_num()) for k in a.values)


def scored_by(opened: dict[str, Any], *, background: bool = False, **more: Any) -> Scored:
    torch.manual_seed(0)
    with Scoring(plain(opened), ROWS, GROUP, background=background, **more) as scoring:
        for slots, images in pieces():
            torch.randn(1000, generator=torch.Generator().manual_seed(1))  # the sampler has generators of its own
            scoring.add(slots, images)
        return scoring.result()


def test_scores_stand_at_their_slots_and_rewards_of_groups_get_whole_ones() -> None:
    actual = score(plain({"b": brightness, "rank": rank, "wins": wins}), pieces(), ROWS, GROUP)
    assert torch.equal(actual.values["b"], IMAGES.mean((1, 2, 3)).double())
    assert torch.equal(actual.parts["b/red"], IMAGES[:, 0].mean((1, 2)).double())
    means = IMAGES.mean((1, 2, 3)).view(3, 4)
    expected = (means[:, None, :] < means[:, :, None]).sum(2).flatten().double()
    assert torch.equal(actual.values["rank"], expected)
    assert torch.allclose(actual.values["wins"], expected / 3)
    opened = {"noisy": noisy, "b": brightness, "rank": rank, "again": noisy}
    assert same(scored_by(opened, background=True), scored_by(opened))


@pytest.mark.parametrize("background", [False, True])
def test_memory_that_runs_out_is_told_to_all_processes(background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, for rewards of samples and of groups; and in another process."""

    def full(images: torch.Tensor) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def full_of_groups(images: torch.Tensor, group: list[int]) -> list[float]:
        return full(images)

    for reward in (full, full_of_groups):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            scored_by({"b": brightness, "full": reward}, background=background)
    everyone = "genrl.diffusion.rollout.scoring.gather_object"
    monkeypatch.setattr(everyone, lambda mine: [*mine, (True, [], [])] if mine[0][0] is False else mine)
    with pytest.raises(torch.OutOfMemoryError, match="another process"):
        scored_by({"b": brightness}, background=background)


@pytest.mark.parametrize("background", [False, True])
def test_a_reward_with_copies_is_asked_about_several_at_a_time(background: bool) -> None:
    two, three = threading.Barrier(2, timeout=20), threading.Barrier(3, timeout=20)

    def in_pairs(images: torch.Tensor) -> Any:
        if len(images) > 1:
            two.wait()
        return brightness(images)

    def all_groups(images: torch.Tensor, group: list[int]) -> list[float]:
        three.wait()
        return rank(images, group)

    opened = {"b": brightness, "many": in_pairs, "rank": all_groups}
    copies = Scorers(opened, plain(opened).components, copies={"many": 2, "rank": 3})
    with Scoring(copies, ROWS, GROUP, background=background) as scoring:
        for slots, images in pieces():
            scoring.add(slots, images)
        result = scoring.result()
    assert same(result, score(plain({"b": brightness, "many": brightness, "rank": rank}), pieces(), ROWS, GROUP))


def score_groups(file: str) -> None:
    """A process of two: it holds every other picture, and says which groups it was asked about."""
    state = PartialState(cpu=True)
    asked: list[tuple[int, list[float]]] = []

    def means(images: torch.Tensor, group: list[int]) -> list[float]:
        asked.append((group[0], images.mean((1, 2, 3)).tolist()))
        return [1.0] * len(images)

    slots = [s for s in range(12) if (s % 4 < 3) == (state.process_index == 0)]  # most of each group is on the first
    result = score(plain({"means": means}), [(slots, IMAGES[slots])], ROWS, GROUP)
    assert bool((result.values["means"] == 1).all())
    Path(f"{file}-{state.process_index}").write_text(json.dumps(asked))


@pytest.mark.slow
def test_a_group_is_scored_where_most_of_it_is_and_no_process_has_all(tmp_path: Path) -> None:
    processes = start_ranks(2, score_groups, str(tmp_path / "asked"), log=tmp_path / "log")
    assert wait(processes, 200) == [0, 0], (tmp_path / "log-rank-0").read_text()
    means = IMAGES.mean((1, 2, 3)).view(3, 4).tolist()
    asked = [json.loads((tmp_path / f"asked-{rank}").read_text()) for rank in range(2)]
    assert asked == [[[0, means[0]], [1, means[1]]], [[2, means[2]]]]


class Model:
    """Counts where it is, and refuses to score anywhere else."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        self.ended = 0

    def to(self, device: str) -> None:
        self.moves.append(device)

    def close(self) -> None:
        self.ended += 1

    def __call__(self, images: torch.Tensor) -> list[float]:
        assert self.moves[-1] == "meta"
        time.sleep(0.01)
        return [1.0] * len(images)


@pytest.mark.parametrize("background", [True, False])
def test_an_offloaded_model_is_on_its_device_while_it_scores(background: bool) -> None:
    """It goes back, and the thread ends, also where scoring is left early."""
    model = Model()
    scorers = Scorers({"m": model}, {"m": Component()}, {"m": "meta"})
    with Scoring(scorers, ROWS, GROUP, background=background) as scoring:
        for slots, images in pieces():
            scoring.add(slots, images)
        assert (scoring.result().values["m"] == 1).all()
    assert model.moves == ["meta", "cpu"]
    with pytest.raises(KeyboardInterrupt), Scoring(scorers, ROWS, GROUP, background=background) as scoring:
        scoring.add(*pieces()[0])
        raise KeyboardInterrupt
    assert not any(thread.name.startswith("scoring") for thread in threading.enumerate())
    assert model.moves == ["meta", "cpu"] * (2 if background else 1)
    scorers.close()
    assert model.ended == 1


def test_a_picture_that_is_not_finite_has_no_score() -> None:
    broken = IMAGES.clone()
    broken[4, 0, 0, 0] = math.nan
    result = score(plain({"style": lambda style: [1.0] * len(style)}), [([4, 5], broken[4:6])], ROWS, GROUP)
    assert math.isnan(result.values["style"][4]) and result.values["style"][5] == 1.0
    assert result.values["style"].isnan().sum() == 11  # what nobody drew has no score either
    assert score(plain({"b": brightness}), [], ROWS, GROUP).values["b"].isnan().all()  # in a process without samples


def test_a_reward_can_stop_the_run_however_few_samples_it_concerns() -> None:
    def gone(images: torch.Tensor) -> list[float]:
        if len(images) == 1:
            raise genrl_rewards.RewardFailed("the server is gone")
        return [0.0] * len(images)

    with pytest.raises(genrl_rewards.RewardFailed, match="'gone': the server is gone"):
        scored_by({"gone": gone})


MINE = """
class Typed:
    def __init__(self, device="cpu", dtype="float32"):
        self.seen = [device, dtype]
    def __call__(self, images):
        return images.mean((1, 2, 3))
    def to(self, device):
        self.seen.append(device)

def plain(images):
    return images.mean((1, 2, 3))
"""


def test_rewards_are_opened_as_the_configuration_says(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    entries = f"""\
  - {{name: '{mine}:Typed', args: {{dtype: bfloat16, device: meta}}, offload: true,
    batch_size: 2, cache: 5, normalize: group}}
  - {{name: '{mine}:plain', weight: 0.5, schedule: [[0, 0], [10, 1]], gate: {{reward: Typed, at_least: 0.5}}}}
"""
    mine.write_text(MINE)
    result = open_scorers(runs.unloaded(rewards=yaml.safe_load(entries)), "cpu")
    calls = result.rewards["Typed"]
    assert calls.reward.seen == ["meta", "bfloat16", "cpu"] and (calls.batch_size, calls.cache) == (2, 5)
    assert result.offloaded == {"Typed": "meta"}
    with result.placed():
        assert calls.reward.seen[-1] == "meta"
    assert result.components == {
        "Typed": Component(normalize="group"),
        "plain": Component(0.5, ((0, 0.0), (10, 1.0)), "none", Gate("Typed", 0.5)),
    }
    with pytest.raises(ValueError, match="rewards.0.offload: .*mine.py:plain' has no method to"):
        open_scorers(runs.unloaded(rewards=[{"name": f"{mine}:plain", "offload": True}]), "cpu")


pytestmark = pytest.mark.usefixtures("unproven")


def run(folder: Path, model: Path, name: str, **changes: Any) -> Path:
    return train(runs.config(folder, model, output=str(folder / name), **{**runs.QUIET, **changes}))


def test_combined_rewards_are_scored_beside_and_survive_a_stop(folder: Path, model: Path) -> None:
    """In the background to the bit, also of rewards that draw from the global generators; running statistics go on."""
    gate = {"reward": "brightness", "at_least": 0.45, "otherwise": -1}
    scheduled = {"schedule": [[0, 0.0], [4, 1.0]], "normalize": "running"}
    three = [
        runs.reward(folder, "redness", gate=gate, **scheduled),
        runs.reward(folder, "brightness", normalize="group"),
        runs.reward(folder, "noisy"),
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


def test_a_served_reward_trains_the_same_model(folder: Path, model: Path) -> None:
    """Outages, and servers that come back: tests/rewards/service/test_remote.py."""
    name = f"{folder / 'rewards.py'}:brightness"
    here = run(folder, model, "here", rewards=[{"name": name}])
    calls: list[int] = []
    reward = genrl_rewards.load(name)

    def counted(images: Any) -> Any:
        calls.append(len(images))
        return reward(images)

    with servers.live(counted, name) as url:
        there = run(folder, model, "there", rewards=[{"name": name, "remote": url}])
    assert calls == [2] * 4  # 2 iterations of 2 micro-batches
    assert runs.differences(here, there) == []
