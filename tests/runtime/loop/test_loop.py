"""What every training loop does: evaluations, saving and going on, leaving, undoing, smaller micro-batches."""

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config.sections import EMA, Checkpoint, Optimizer
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop import frame
from genrl.runtime.loop.loop import Interrupted, Loop, MemoryRanOut
from genrl.runtime.loop.updating import descend
from genrl.runtime.weights import weights as runtime_weights
from genrl.runtime.weights.weights import put_back
from tests.run_folders import differences
from tests.runtime.loop.loops import METHOD, RECORDED, Evaluation, Settings, backward, loop, model, moved, values

ADAMW: dict[str, Any] = {"kind": torch.optim.AdamW}


@dataclass
class Counter:
    """A thing with a state: tensors, numbers, both."""

    mean: Tensor = field(default_factory=lambda: torch.zeros(2))
    seen: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen = state["mean"], state["seen"]


def train(one: Loop, counter: Counter) -> None:
    """Adam on gradients that depend on the iteration, a thing beside the model, and a memory."""
    for _ in one.iterations():
        learn(one, counter)


def learn(one: Loop, counter: Counter, *, leave: bool = False) -> None:
    """One iteration. leave: after its first update, as a process does that is asked to end."""
    iteration = one.iteration
    backward(one, policy=1.0 + iteration, critic=0.5 * iteration)
    one.optimization.step(["policy", "critic"])
    counter.mean, counter.seen = counter.mean + 0.1 * iteration, counter.seen + 1
    one.memory["sum"] = one.memory.get("sum", 0) + iteration
    if leave:
        one.process.stop.signal = signal.SIGTERM
    backward(one, critic=1.0)
    one.optimization.step(["critic"])
    one.finish({"loss": float(model(one).policy.detach().sum())})


def same_end(one: Loop, other: Loop) -> None:
    """The newest checkpoints and the losses, to the bit."""
    first, second = (x.process.run.folder for x in (one, other))
    assert differences(first, second) == []
    rows = [[row["loss"] for row in read_metrics(x.process.run.metrics)] for x in (one, other)]
    assert rows[0] == rows[1]


class TestSaving:
    def test_only_when_due_and_at_the_end_and_weights_of_another_model_are_named(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        with pytest.raises(ValueError, match=r"where holds the weights of another model: critic, policy"):
            put_back(one.weights.named, {}, Path("where"))
        one = loop(tmp_path, Settings(iterations=5, checkpoint=Checkpoint(every=2, keep=9)))
        train(one, Counter())
        steps = sorted(path.name for path in one.process.run.checkpoints.glob("step-*"))
        assert steps == ["step-000002", "step-000004", "step-000005"]


class TestEvaluation:
    def test_it_is_of_the_average_where_the_run_keeps_one(self, tmp_path: Path) -> None:
        seen: list[dict[str, Tensor]] = []

        def judge(iteration: int) -> dict[str, float]:
            seen.append(values(one))
            return {"eval/success_mean": 0.0}

        one = loop(tmp_path, Settings(iterations=1, ema=EMA(decay=0.75), evaluation=Evaluation(1)), evaluate=judge)
        start = values(one)
        train(one, Counter())
        end = values(one)
        assert all(torch.equal(seen[0][name], value) for name, value in start.items())
        for name, value in one.weights.snapshots["average"].items():
            assert torch.equal(seen[1][name], value) and not torch.equal(value, end[name])
        assert moved(one, start) == {"policy", "critic"}

    def test_one_that_was_left_is_done_again_and_its_row_is_written_once(self, tmp_path: Path) -> None:
        armed = [True]

        def judge(iteration: int) -> dict[str, float]:
            if iteration == 2 and armed:
                armed.clear()
                one.process.stop.signal = signal.SIGTERM
            one.check_stop()
            return {"eval/success_mean": iteration / 10}

        settings = Settings(evaluation=Evaluation(2))
        one = loop(tmp_path, settings, evaluate=judge)
        train(one, Counter())
        assert [row["step"] for row in read_metrics(one.process.run.metrics)] == [0, 1]
        assert one.iteration == 2 and one.unfinished_row is not None
        saved = checkpoint.latest(one.process.run.checkpoints)
        assert saved is not None and saved.name == "step-000002"
        one = loop(tmp_path, settings, evaluate=judge)
        one.restore(saved)
        train(one, Counter())
        rows = read_metrics(one.process.run.metrics)
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert rows[2]["eval/success_mean"] == 0.2 and "loss" in rows[2]

    @pytest.mark.parametrize(("every", "wanted"), [(2, [0, 2, 4, 5]), (0, [])])
    def test_when_it_is_due(self, tmp_path: Path, every: int, wanted: list[int]) -> None:
        asked: list[int] = []

        def judge(iteration: int) -> dict[str, float]:
            asked.append(iteration)
            return {"eval/success_mean": iteration / 10}

        one = loop(tmp_path, Settings(iterations=5, evaluation=Evaluation(every)), evaluate=judge)
        train(one, Counter())
        assert asked == wanted
        rows = {row["step"]: row for row in read_metrics(one.process.run.metrics)}
        assert list(rows) == [*([0] if every else []), 1, 2, 3, 4, 5]
        assert [step for step, row in rows.items() if "eval/success_mean" in row] == wanted
        if every:
            assert rows[4]["eval/success_mean"] == 0.4 and rows[4]["updates"] == 2 and "timing/eval_s" in rows[4]


class TestLeaving:
    def test_before_anything_was_changed(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        one.process.stop.signal = signal.SIGTERM
        with pytest.raises(Interrupted):
            one.check_stop()
        with pytest.raises(Interrupted):
            descend(one, METHOD, None, [RECORDED], lambda part: part, lambda *_: {"loss": model(one).policy.sum()})

    def test_an_iteration_that_cannot_be_undone_is_finished(self, tmp_path: Path, monkeypatch: Any) -> None:
        """Where weights are too large for a copy of them in every iteration."""
        monkeypatch.setattr(runtime_weights, "LARGEST_COPY", 4)
        one, counter = loop(tmp_path), Counter()
        for _ in one.iterations():
            learn(one, counter, leave=True)
        assert one.iteration == 1 and counter.seen == 1

    def test_one_that_was_left_after_an_update_is_undone_and_done_again(self, tmp_path: Path) -> None:
        """Weights, average, optimiser, memory, what is kept beside them, to the bit, as if nothing had been; data made
        once is not copied."""
        settings = Settings(optimizer=Optimizer(lr=0.1, schedule="cosine", warmup_steps=5), ema=EMA(decay=0.5))

        def begun(folder: str, saved: Path | None = None) -> tuple[Loop, Counter, Counter]:
            one, counter, data = loop(tmp_path / folder, settings, **ADAMW), Counter(), Counter(seen=7)
            if saved is not None:
                with torch.no_grad():
                    model(one).policy += 100.0
                one.restore(saved)
            one.keep("counter", counter)
            one.keep("data", data, changes=False)
            return one, counter, data

        straight, counted, _ = begun("a")
        train(straight, counted)
        first, counter, data = begun("b")
        for iteration in first.iterations():
            if iteration == 2:
                before, memory = values(first), dict(first.memory)
                with pytest.raises(Interrupted):
                    learn(first, counter, leave=True)
                data.load_state_dict = None  # type: ignore[assignment, method-assign]  # it is not put back
                first.undo()
                assert moved(first, before) == set() and first.memory == memory and counter.seen == 2
                assert first.updates == 0 and first.optimizer_steps == 4 and model(first).forgotten == 1
                break
            learn(first, counter)
        first.save()
        saved = first.process.run.checkpoints / "step-000002"
        assert (saved / "exported").read_text() == str(model(first).policy.tolist())
        second, after, _ = begun("b", saved)
        assert (after.seen, second.iteration, second.optimizer_steps) == (2, 2, 4)
        assert second.memory["sum"] == 1 and moved(second, values(first)) == set()
        train(second, after)
        same_end(straight, second)
        kept = checkpoint.load(second.process.run.checkpoints / "step-000004").tensors
        assert kept.keys() == {"weights", "optimizer", "kept-counter", "kept-data", "snapshot-average"}

    def test_global_generators_are_seeded_by_the_iteration(self, tmp_path: Path) -> None:
        """A user's simulator may draw from them; the same iteration draws the same numbers in a resumed run."""

        def numbers(start: int) -> list[float]:
            one, result = loop(tmp_path), []
            one.iteration = start
            for _ in one.iterations():
                result.append(torch.rand(()).item())
                one.iteration += 1
            return result

        whole = numbers(0)
        assert len(set(whole)) == 4 and numbers(2) == whole[2:]


def full(one: Loop) -> None:
    """A pass in which memory runs out."""
    with one.fitting():
        raise torch.OutOfMemoryError("CUDA out of memory")


class TestMemory:
    def test_the_iteration_is_left_where_it_can_be_undone(self, tmp_path: Path, monkeypatch: Any) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            full(loop(tmp_path))
        for largest, error in ((runtime_weights.LARGEST_COPY, MemoryRanOut), (4, torch.OutOfMemoryError)):
            monkeypatch.setattr(runtime_weights, "LARGEST_COPY", largest)
            one = loop(tmp_path, retries=True)
            for _ in one.iterations():
                backward(one, policy=1.0)
                one.optimization.step()
                with pytest.raises(error):
                    full(one)
                break

    def test_shrinking_forgets_gradients_and_is_remembered(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        backward(one, policy=1.0)
        frame.shrink(one, "lower this")
        assert model(one).size == one.memory["batch_size"] == 4 and model(one).policy.grad is None
        model(one).size = 1
        with pytest.raises(RuntimeError, match="micro-batch of 1 samples does not fit .*: lower this"):
            frame.shrink(one, "lower this")
        assert frame.halvings(24, 1) == [24, 12, 6, 3, 1] and frame.halvings(5, 1) == [5, 2, 1]
        assert frame.halvings(24, 6) == [24, 12, 6] and frame.halvings(18, 6) == [18, 6]
