"""A run that collapses: noticed, with no false alarm in healthy ones, and what is done about it."""

import math
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config.sections import EMA, Checkpoint, Monitor
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import read_metrics, truncate_metrics
from genrl.runtime.loop import collapse, state
from genrl.runtime.show.compare.statistics import wilson
from tests.run_folders import differences
from tests.runtime.loop.loops import Evaluation, Settings, loop, moved, values
from tests.runtime.loop.test_loop import Counter, train

SCORES = [0.5, 0.7, 0.4, 0.3, 0.2]
EVERY = 20


class Synthetic:
    """A history without a model: `length` iterations whose figures are drawn, judged as a run's are."""

    def __init__(self, kind: str, seed: int, *, broken: str = "", length: int = 400, evaluates: bool = True) -> None:
        """broken: what breaks from the middle on; "" = nothing."""
        self.draw, self.kind, self.broken, self.length = random.Random(f"{kind}{seed}"), kind, broken, length
        evaluation = SimpleNamespace(monitor=None, on_collapse="warn", every=EVERY if evaluates else 0)
        settings = {"evaluation": evaluation, "checkpoint": SimpleNamespace(every=EVERY), "idle_iterations": None}
        config = SimpleNamespace(iterations=length, **settings)
        self.loop: Any = SimpleNamespace(config=config, memory={}, iteration=0, is_main=False)
        self.noticed: dict[str, int] = {}
        for self.loop.iteration in range(length + 1):
            result = collapse.note(self.loop, self.row()) if self.loop.iteration else {}
            if evaluates and self.loop.iteration % EVERY == 0:
                result |= collapse.watch(self.loop, self.held_out())
            for key in result:
                if key.startswith("collapse/"):
                    self.noticed.setdefault(key, self.loop.iteration)

    def late(self, what: str) -> float:
        """How far the second half has gone, 0 to 1, where this breaks."""
        return max(0.0, 2 * self.loop.iteration / self.length - 1) if self.broken == what else 0.0

    def reward(self) -> float:
        learnt = 0.5 + 0.2 * (1 - math.exp(-4 * self.loop.iteration / self.length))
        return learnt - 0.4 * self.late("reward")

    def row(self) -> dict[str, float]:
        gauss, done = self.draw.gauss, self.loop.iteration / self.length
        # losses of policy gradients have any sign
        signed = {"pipeline": 2.0, "language": 0.0, "robot": -0.1}[self.kind]
        return {
            "loss": signed + gauss(0, 0.15) + 6 * self.late("loss"),
            "grad_norm": math.exp(gauss(0, 0.5)) * (1 + done) * math.exp(5 * self.late("grad_norm")),
            "kl": 0.02 * done * math.exp(gauss(0, 0.3)) * math.exp(6 * self.late("kl")),
            "reward/total_mean": self.reward() + gauss(0, 0.05),
        }

    def held_out(self) -> dict[str, float]:
        if self.kind == "pipeline":
            return {"eval/total_mean": self.reward() + self.draw.gauss(0, 0.02), "eval/total_se": 0.02}
        if self.kind == "language":
            return {"eval/total_mean": self.reward() + self.draw.gauss(0, 0.04), "eval/total_se": 0.04}
        right = sum(self.draw.random() < self.reward() for _ in range(200))
        low, high = wilson(right, 200)
        return {"eval/success_mean": right / 200, "eval/success_low": low, "eval/success_high": high}


KINDS = ("pipeline", "language", "robot")


@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm_in_thirty_healthy_runs(kind: str) -> None:
    for seed in range(30):
        run = Synthetic(kind, seed, evaluates=seed % 3 > 0)
        assert run.noticed == {}, seed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["reward", "loss", "grad_norm", "kl"])
def test_a_planted_collapse_is_noticed(kind: str, broken: str) -> None:
    """The reward falls by two standard errors of a difference in 30 iterations; two evaluations later it is said."""
    for seed in range(5):
        run = Synthetic(kind, seed, broken=broken)
        name = {"reward": "success" if kind == "robot" else "total"}.get(broken, broken)
        assert next(iter(run.noticed)) == f"collapse/{name}" and 200 < run.noticed[f"collapse/{name}"] <= 360


def test_a_history_that_was_left_is_said_and_one_low_evaluation_is_then_enough(tmp_path: Path) -> None:
    """Going back at once cost a sharpening policy its gains; waiting for two cost a collapsing one fifty iterations."""
    for outside, score, back in ((["loss"], 0.67, False), (["loss"], 0.62, True), ([], 0.62, False)):
        memory = {"figures": {"eval/total": {"best": [0, 0.7, 0.02], "low": 0}}, "histories": {}, "outside": outside}
        config = SimpleNamespace(evaluation=SimpleNamespace(monitor=None, on_collapse="stop"), idle_iterations=5)
        state: Any = SimpleNamespace(config=config, iteration=50, is_main=False)
        state.memory = {"collapse": memory | {"best": 0, "judge": "eval/total", "rate": 1.0, "ended": False}}
        row = {"eval/total_mean": score, "eval/total_se": 0.02}
        assert collapse.watch(state, row).get("collapse/stopped") == (0.0 if back else None)
        state.memory = {}
        collapse.watch(state, {"eval/loss": 0.5})
        assert collapse.best_score(state) == 0.5  # as it is logged


def test_without_evaluation_the_trained_reward_is_judged_and_a_long_history_is_thinned() -> None:
    run = Synthetic("pipeline", 0, broken="reward", evaluates=False)
    assert list(run.noticed) == ["collapse/total"]
    assert 0 < run.loop.memory["collapse"]["best"] < 300
    run = Synthetic("pipeline", 0, length=3000)
    history = run.loop.memory["collapse"]["histories"]["loss"]
    assert history["count"] == 3000 and len(history["values"]) < 2 * collapse.MOST and run.noticed == {}


def test_another_method_begins_a_history_of_its_own(tmp_path: Path) -> None:
    one, counts = loop(tmp_path), []
    one.ends = (2, 4)
    for _ in one.ends:
        for _ in one.iterations():
            one.finish({"loss": 1.0})
        counts.append(one.memory["collapse"]["histories"]["loss"]["count"])
    assert counts == [2, 2]


def judged(folder: Path, settings: Settings, scores: list[float] | None = None) -> tuple[Any, list[dict[str, Tensor]]]:
    """A loop that is scored by the list, and its weights at the evaluations."""
    result: list[dict[str, Tensor]] = []

    def judge(iteration: int) -> dict[str, float]:
        result.append(values(one))
        return {"eval/success_mean": (scores or SCORES)[iteration]}

    one = loop(folder, settings, evaluate=judge, kind=torch.optim.AdamW)
    return one, result


MONITOR = Monitor(reward="success", tolerance=0.05)


class TestActing:
    @pytest.mark.parametrize("monitor", [None, MONITOR], ids=["own", "monitor"])
    def test_stop_ends_the_run_as_it_is(self, tmp_path: Path, monitor: Any) -> None:
        """A second scorer is watched by the same rule, with a tolerance of its own."""
        settings = Settings(iterations=9, ema=EMA(decay=0.5), evaluation=Evaluation(1, monitor, "stop"))
        one, result = judged(tmp_path, settings)
        train(one, Counter())
        assert one.is_complete and one.iteration == 3 and moved(one, result[1])
        rows = read_metrics(one.process.run.metrics)
        assert [row["eval/below_best"] for row in rows] == pytest.approx([0.0, 0.0, 0.3, 0.4])
        assert rows[3]["collapse/stopped"] == 1.0 and rows[3]["collapse/success"] == pytest.approx(0.4)
        assert list(one.iterations()) == []
        one.save()
        assert checkpoint.best_step(one.process.run.checkpoints) == 1

    def test_warn_says_it_once_and_back_may_go_to_the_model_before_training(self, tmp_path: Path) -> None:
        one, _ = judged(tmp_path, Settings(iterations=4, evaluation=Evaluation(1)))
        train(one, Counter())
        rows = read_metrics(one.process.run.metrics)
        assert [row["step"] for row in rows if "collapse/success" in row] == [3] and len(rows) == 5
        one, _ = judged(
            tmp_path / "b", Settings(iterations=3, evaluation=Evaluation(1, None, "back")), [0.9, 0.1, 0.1, 0.1]
        )
        train(one, Counter())
        assert read_metrics(one.process.run.metrics)[2]["collapse/back"] == 0.0
        with pytest.raises(ValueError, match="training has not bettered the model"):
            checkpoint.best_step(one.process.run.checkpoints)

    @pytest.mark.parametrize(("score", "goes_back"), [(0.1, True), (0.5, False)])
    def test_an_idle_run_goes_back_before_it_is_given_up(self, tmp_path: Path, score: float, goes_back: bool) -> None:
        """Pictures that are all confetti have one reward, so a collapsed run may be idle before its next evaluation."""
        settings = Settings(iterations=9, idle_iterations=2, evaluation=Evaluation(9, None, "back"))
        one, _ = judged(tmp_path, settings, [0.5, 0.5, score])
        steps = one.iterations()
        next(steps)
        one.finish({})
        next(steps)
        with nullcontext() if goes_back else pytest.raises(RuntimeError, match="changed no weight"):
            one.finish({})
        assert (read_metrics(one.process.run.metrics)[2].get("collapse/back") == 0.0) == goes_back
        assert (collapse.IDLE in one.memory) != goes_back

    def test_back_goes_on_from_the_best_with_half_the_rate(self, tmp_path: Path) -> None:
        scores = [0.5, 0.7, 0.4, 0.3, 0.6, 0.75, 0.74]
        settings = Settings(iterations=6, evaluation=Evaluation(1, on_collapse="back"), ema=EMA(decay=0.5))
        settings.checkpoint = Checkpoint(every=1, keep=9)
        one, _ = judged(tmp_path / "one", settings, scores)
        counter = Counter()
        one.keep("counter", counter)
        seen: list[tuple[int, dict[str, Tensor], int]] = []
        one.before_iteration = lambda: seen.append((one.iteration, values(one), counter.seen))
        train(one, counter)
        rows = read_metrics(one.process.run.metrics)
        assert rows[3]["collapse/back"] == 1.0 and len(rows) == 7 and one.memory["sum"] == sum(range(6))
        iteration, weights, count = seen[3]
        assert iteration == 3 and count == 1
        assert all(torch.equal(value, seen[1][1][name]) for name, value in weights.items())
        rates = [group["lr"] for group in one.optimizer.param_groups]
        assert rates == [pytest.approx(0.05), pytest.approx(0.25)]
        for done in (2, 3, 4):
            two, _ = judged(tmp_path / str(done), settings, scores)
            run, again = two.process.run, Counter()
            shutil.copytree(one.process.run.folder, run.folder)
            truncate_metrics(run.metrics, done)
            for step in range(done + 1, 7):
                shutil.rmtree(run.checkpoints / f"step-{step:06d}")
            two.restore(run.checkpoints / f"step-{done:06d}")
            two.keep("counter", again)
            train(two, again)
            assert again.seen == counter.seen
            assert differences(one.process.run.folder, run.folder) == []
        one.weights.snapshot("reference"), one.weights.snapshot("following")
        state.go_back(one, 1)
        assert one.weights.snapshots.keys() == {"reference", "average"}  # what was taken later goes


def test_the_best_checkpoint_stays_on_disk(tmp_path: Path) -> None:
    settings = Settings(iterations=8, evaluation=Evaluation(1), checkpoint=Checkpoint(every=4, keep=1))
    one, _ = judged(tmp_path, settings, [0.5, 0.6, 0.7, 0.7, 0.6, 0.7, 0.65, 0.6, 0.6])
    train(one, Counter())
    kept = sorted(path.name for path in one.process.run.checkpoints.glob("step-*"))
    assert kept == ["step-000002", "step-000008"] and checkpoint.best_step(one.process.run.checkpoints) == 2
