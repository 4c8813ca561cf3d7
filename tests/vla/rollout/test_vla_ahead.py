"""Rollouts of earlier weights: which, what is learned from them; and that it is one run, whoever acts."""

import math
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.runtime.loop import running
from genrl.vla.rollout import ray_rollout, scores
from genrl.vla.rollout.collect import RolloutPlan, training_rows
from genrl.vla.rollout.sampling import Acting
from genrl.vla.rollout.scores import actor_loss, decisions, recorded_decisions, score, weighed
from genrl.vla.run import VLARun
from genrl.vla.simulators import ray_workers
from genrl.vla.simulators.workers import Worker, WorkerLost, messages
from genrl.vla.train import train
from tests.run_folders import assert_one_run
from tests.vla import vla_runs
from tests.vla.test_resume import straight_and_stopped


class Near(Worker):
    """An acting actor without Ray: its host is here; what would cross the network is pickled."""

    def start(self) -> None:
        self.host: Any = None

    def do(self, work: Any) -> Iterator[Any]:
        if self.host is None:
            self.host = self.description.host(len(self.slots))
        for message in messages(self.host, pickle.loads(pickle.dumps(work))):  # noqa: S301
            if self.host is None:
                raise WorkerLost("it was killed")
            yield pickle.loads(pickle.dumps(message))  # noqa: S301

    def kill(self) -> None:
        self.host = None

    close = kill


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with `environment.workers: ray` act, and are evaluated, by one of these."""
    ray: Any = SimpleNamespace(get_gpu_ids=list, get=pickle.loads, put=pickle.dumps)
    monkeypatch.setattr(ray_rollout, "connected", lambda: ray)
    monkeypatch.setattr(ray_rollout, "room", lambda wanted: 1)
    monkeypatch.setattr(ray_rollout, "Actor", Near)
    monkeypatch.setattr(ray_workers, "actors", lambda wanted: 1)
    monkeypatch.setattr(ray_workers, "Actor", Near)


METHODS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dppo": {"sampler": "diffusion"},  # at this rate ratios pass the largest float32
    "grpo": vla_runs.GRPO,
}


def changes(name: str, staleness: int, **environment: Any) -> dict[str, Any]:
    own = METHODS[name]
    where = own.get("environment", {}) | environment | {"staleness": staleness}
    return {"iterations": 3, "checkpoint": {"keep": 3}, **own, "environment": where}


@pytest.mark.parametrize(
    ("name", "staleness"), [("ppo", 2), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("dppo", "grpo"))]
)
def test_one_run_whoever_acts_and_wherever_it_ends(tmp_path: Path, name: str, staleness: int, monkeypatch: Any) -> None:
    here = train(vla_runs.config(tmp_path, output=str(tmp_path / "here"), **changes(name, staleness)))
    install(monkeypatch)
    far = train(vla_runs.config(tmp_path, output=str(tmp_path / "far"), **changes(name, staleness, workers="ray")))
    assert vla_runs.differences(here, far) == []
    rows = vla_runs.rows(far)
    assert [row["staleness"] for row in rows] == [float(min(k, staleness)) for k in range(3)]
    assert "importance/mean" not in rows[0]  # acted by the present weights
    assert all(row["importance/max_abs_dev"] > 1e-4 and row["rollout/log_prob_off"] == 0 for row in rows[1:])
    assert_one_run(train, far, tmp_path)
    kept = checkpoint.load(checkpoint.latest(Run(far).checkpoints) or far).tensors["kept-drawing"]
    assert {key.split("/")[0] for key in kept} == {str(k) for k in range(2 - staleness, 3)}


def test_which_weights_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after i - 2 iterations; what is kept of log-probabilities is of those before the first update."""
    before: list[dict[str, Tensor]] = []
    acting: list[dict[str, Tensor]] = []
    here, collect = VLARun._here, VLARun.collect

    def noted(run: VLARun, plan: RolloutPlan) -> Any:
        before.append(vla_runs.weights(run.policy))
        with run.drawing():
            acting.append(vla_runs.weights(run.policy))
        return here(run, plan)

    def watched(run: VLARun, settings: Any) -> Any:
        rollout = collect(run, settings)
        rows = training_rows(rollout, rollout.valid.flatten().nonzero()[:, 0])
        context = scores.context_of(run.policy, rows.observation, rows.context)
        proximal = rollout.sampler.replay(run.policy, context, rows.states, rows.next_states, rows.step_index).log_prob
        torch.testing.assert_close(proximal.detach(), rows.log_prob, rtol=1e-5, atol=1e-5)
        return rollout

    monkeypatch.setattr(VLARun, "_here", noted)
    monkeypatch.setattr(VLARun, "collect", watched)
    train(vla_runs.config(tmp_path, **changes("ppo", 2)))
    assert any(not torch.equal(value, before[1][name]) for name, value in before[0].items())
    for iteration, used in enumerate(acting):
        assert all(torch.equal(value, used[name]) for name, value in before[max(0, iteration - 2)].items())


@contextmanager
def begun(tmp_path: Path, **changes: Any) -> Iterator[VLARun]:
    with vla_runs.opened(vla_runs.config(tmp_path, **changes)) as run:
        run.begin(None)
        next(iter(run.loop.iterations()))
        yield run


def test_a_loss_and_importance_by_hand(tmp_path: Path) -> None:
    """Two decisions: the surrogate is that of w A; one of weight 0 teaches nothing."""
    with begun(tmp_path) as run:
        settings, rollout = run.settings, run.collect(run.settings)
        ones = torch.ones(rollout.valid.shape)
        chosen = decisions(rollout, ones, ones, ones).chosen(torch.arange(2))
        importance = torch.ones(*rollout.valid.shape, 1)
        importance.view(-1)[chosen.row] = torch.tensor([0.5, 0.0])
        given = recorded_decisions(rollout._replace(importance=importance), chosen, total=2, policy=True, critic=False)
        again = actor_loss(settings, score(settings, Acting(run.policy, rollout.sampler), given), given)
        assert float(again.loss) == pytest.approx(-(0.5 + 0.0) / 2, abs=1e-5)  # -w A r, r = 1
        # what acted had a log-probability higher by ln 2, and lower by ln 6: weights of 1/2, and of 1
        shifted, first = rollout.log_prob.clone(), rollout.valid.flatten().nonzero()[:2, 0]
        flat = shifted.flatten(0, 1)
        flat[first[0], 0, 0, 0] += math.log(2)
        flat[first[1], 0, 0, 0] -= math.log(6)
        again = weighed(run.policy, rollout._replace(log_prob=flat.view(shifted.shape)), run.settings, run.loop.fitting)
        torch.testing.assert_close(again.log_prob, rollout.log_prob, rtol=1e-5, atol=1e-5)
        assert again.importance is not None
        weights = again.importance.flatten()
        assert weights[first].tolist() == pytest.approx([0.5, 1.0], abs=1e-3)
        number = int(rollout.valid.sum())
        figures = scores.importance_figures(again)
        assert figures["importance/mean"] == pytest.approx((number - 0.5) / number, abs=1e-3)
        assert figures["importance/max_abs_dev"] == pytest.approx(0.5, abs=1e-3)
        settings = run.settings.model_copy(update={"importance": "none"})
        without = weighed(run.policy, rollout._replace(log_prob=flat.view(shifted.shape)), settings, run.loop.fitting)
        assert without.importance is None and torch.equal(without.log_prob, again.log_prob)


@pytest.mark.slow
def test_stopped_while_it_waits_and_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(running, "POLL_S", 0.001)
    places = [("acting", 0), ("training", 1), ("training", 2)]
    runs = straight_and_stopped(tmp_path, monkeypatch, places, **changes("ppo", 1, workers="ray"))
    assert vla_runs.differences(*runs) == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ahead")]
