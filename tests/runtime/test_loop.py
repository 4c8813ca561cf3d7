"""What every training loop does: steps of named groups, guards, schedule, evaluations, saving and going on."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from genrl.config.sections import Checkpoint, Optimizer
from genrl.runtime import checkpoint
from genrl.runtime.guards import NonFiniteError, read_dump
from genrl.runtime.loop import Abandoned, Loop, make_accelerator, put_back, scheduled
from genrl.runtime.metrics import MetricLogger
from genrl.runtime.progress import Progress
from genrl.runtime.run import Run, read_metrics
from genrl.runtime.signals import Stop, Watchdog

RATES = {"policy": 0.1, "critic": 0.5}


@dataclass
class Settings:
    iterations: int = 4
    seed: int = 0
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=0.1, weight_decay=0.0, max_grad_norm=1e9))
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint(every=100, keep=2))


class Two(nn.Module):
    """Two parameters that are trained, in groups of their own, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.critic = nn.Parameter(torch.tensor([[4.0, 5.0]]))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)


class Quiet(Watchdog):
    """One that bites nobody."""

    def beat(self, phase: str, step: int) -> None:
        self.phase, self.step = phase, step


def loop(
    folder: Path,
    settings: Settings | None = None,
    *,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    every: int = 0,
    evaluate: Callable[[int], dict[str, float]] = lambda iteration: {},
    **options: Any,
) -> Loop:
    settings = settings or Settings()
    run, model = Run(folder / "run"), Two()
    groups = [{"name": "policy", "params": [model.policy]}, {"name": "critic", "params": [model.critic]}]
    return Loop(
        settings=settings,
        accelerator=make_accelerator(60),
        model=model,
        optimizer=kind(groups, lr=1.0, **options),
        rates=RATES,
        run=run,
        log=MetricLogger(run),
        progress=Progress(settings.iterations, enabled=False),
        watchdog=Quiet(run, 600),
        stop=Stop(),
        every=every,
        evaluate=evaluate,
    )


def backward(one: Loop, *, policy: float = 0.0, critic: float = 0.0) -> None:
    """A loss with these gradients, the same for every number of a group."""
    loss = policy * one.model.policy.sum() + critic * one.model.critic.sum()
    one.backward(loss, evidence={"advantage": torch.ones(2)}, info={"why": "test"})


def weights(one: Loop) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in one.model.named_parameters()}


def moved(one: Loop, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in weights(one).items() if not torch.equal(value, before[name])}


class TestStep:
    def test_moves_by_the_rate_of_its_group_and_sums_what_was_added(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        backward(one, policy=1.0)
        backward(one, policy=0.5, critic=2.0)
        norms = one.step(["policy", "critic"])
        assert norms == pytest.approx({"policy": 1.5 * math.sqrt(3), "critic": 2 * math.sqrt(2)})
        torch.testing.assert_close(one.model.policy.data, torch.tensor([1.0, -2.0, 3.0]) - 0.1 * 1.5)
        torch.testing.assert_close(one.model.critic.data, torch.tensor([[4.0, 5.0]]) - 0.5 * 2.0)
        assert one.updates == one.optimizer_steps == 1
        assert one.model.policy.grad is None and one.model.critic.grad is None

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
    def test_only_the_named_groups(self, tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
        """What the others had been given is forgotten: it does not come back with the next step."""
        one = loop(tmp_path, kind=kind, weight_decay=0.1)
        before = weights(one)
        backward(one, policy=1.0, critic=1.0)
        assert set(one.step(["critic"])) == {"critic"}
        assert moved(one, before) == {"critic"} and one.model.policy.grad is None
        assert "policy" not in {
            name for name, p in one.model.named_parameters() if p in one.optimizer.state and one.optimizer.state[p]
        }
        backward(one, policy=1.0)
        assert one.step(["policy"]) == pytest.approx({"policy": math.sqrt(3)})

    def test_each_group_warms_up_by_its_own_steps(self, tmp_path: Path) -> None:
        """A critic that is trained alone at first does not use up the policy's warm-up; a checkpoint knows both."""
        settings = Settings(optimizer=Optimizer(lr=0.1, warmup_steps=4))
        one = loop(tmp_path, settings)
        for groups in (["critic"], ["critic"], ["policy", "critic"]):
            backward(one, policy=1.0, critic=1.0)
            one.step(groups)
        rates = [group["lr"] for group in one.optimizer.param_groups]
        assert rates == pytest.approx([RATES["policy"] / 4, RATES["critic"] * 3 / 4])
        one.save()
        again = loop(tmp_path, settings)
        again.restore(one.run.checkpoints / "step-000000")
        assert [group["steps"] for group in again.optimizer.param_groups] == [1, 3]

    def test_each_group_is_clipped_by_itself(self, tmp_path: Path) -> None:
        settings = Settings(optimizer=Optimizer(lr=0.1, max_grad_norm=1.0))
        one = loop(tmp_path, settings)
        start = weights(one)
        backward(one, policy=10.0, critic=0.1)
        norms = one.step(["policy", "critic"])
        assert norms == pytest.approx({"policy": 10 * math.sqrt(3), "critic": 0.1 * math.sqrt(2)})  # as they were
        steps = {name: (start[name] - value) / RATES.get(name, 1.0) for name, value in weights(one).items()}
        assert float(steps["policy"].norm()) == pytest.approx(1.0, rel=1e-5)
        torch.testing.assert_close(steps["critic"], torch.full((1, 2), 0.1))  # never up

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (torch.optim.AdamW, {"weight_decay": 0.1}),
            (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        ],
    )
    def test_nothing_moves_without_a_gradient(self, tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
        """Neither by momentum nor by decay: a minibatch in which no decision counted."""
        one = loop(tmp_path, kind=kind, **options)
        backward(one, policy=1.0, critic=1.0)
        one.step(["policy", "critic"])
        before = weights(one)
        backward(one, critic=1.0)
        assert one.step(["policy", "critic"])["policy"] == 0.0
        assert moved(one, before) == {"critic"}
        before = weights(one)
        one.backward(torch.zeros(()), evidence={}, info={})  # a loss that hangs on nothing
        assert one.step(["policy", "critic"]) == {"policy": 0.0, "critic": 0.0}
        assert moved(one, before) == set() and one.updates == 3

    def test_what_is_not_trained_is_not_the_loops(self, tmp_path: Path) -> None:
        assert set(loop(tmp_path).trained) == {"policy", "critic"}


class TestSchedule:
    def test_follows_the_iterations_and_warms_up_by_steps(self, tmp_path: Path) -> None:
        """Warm-up 3 of the first steps, then linear over the 4 iterations, whatever number of steps they have."""
        settings = Settings(optimizer=Optimizer(lr=0.1, schedule="linear", warmup_steps=3))
        one, seen = loop(tmp_path, settings), []
        for iteration in one.iterations():
            for _ in range(2 + iteration):
                backward(one, policy=1.0, critic=1.0)
                one.step(["policy", "critic"])
                seen.append({group["name"]: group["lr"] for group in one.optimizer.param_groups})
            one.finish({})
        shares = [1 / 3, 2 / 3, 1.0, 0.75, 0.75, *[0.5] * 4, *[0.25] * 5]
        assert [row["policy"] for row in seen] == pytest.approx([0.1 * share for share in shares])
        assert [row["critic"] for row in seen] == pytest.approx([0.5 * share for share in shares])

    def test_cosine(self, tmp_path: Path) -> None:
        one, seen = loop(tmp_path, Settings(optimizer=Optimizer(lr=0.1, schedule="cosine"))), []
        for _ in one.iterations():
            backward(one, policy=1.0)
            one.step(["policy"])
            seen.append(one.optimizer.param_groups[0]["lr"])
            one.finish({})
        assert seen == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 4)) for k in range(4)])

    def test_never_below_zero(self) -> None:
        assert scheduled(1.0, Optimizer(lr=1.0, schedule="linear"), 12, 10) == 0.0


class TestGuards:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_loss_that_is_not_finite(self, tmp_path: Path, value: float) -> None:
        one = loop(tmp_path)
        before = weights(one)
        with pytest.raises(NonFiniteError, match="stopped before the update of step 0") as stopped:
            backward(one, policy=value)
        assert moved(one, before) == set() and one.updates == 0
        assert stopped.value.dump is not None
        dump = read_dump(stopped.value.dump)
        assert dump.where == "loss" and not dump.checked["loss"].isfinite()
        assert torch.equal(dump.batch["advantage"], torch.ones(2)) and dump.info["why"] == "test"
        assert str(stopped.value.dump) in str(stopped.value) and "genrl replay" not in str(stopped.value)

    def test_a_gradient_that_is_not_finite(self, tmp_path: Path) -> None:
        """The loss was: its last decisions are what is looked at."""
        one = loop(tmp_path)
        before = weights(one)
        one.model.critic.register_hook(lambda gradient: gradient * math.nan)
        backward(one, policy=1.0, critic=1.0)
        with pytest.raises(NonFiniteError, match="gradient is not finite") as stopped:
            one.step(["policy", "critic"])
        assert moved(one, before) == set() and one.updates == one.optimizer_steps == 0
        assert "critic: 1 NaN" in str(stopped.value) and "policy:" not in str(stopped.value)
        assert stopped.value.dump is not None
        dump = read_dump(stopped.value.dump)
        assert dump.where == "gradient" and torch.equal(dump.batch["advantage"], torch.ones(2))

    def test_a_group_that_is_not_stepped_is_not_looked_at(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        one.model.policy.register_hook(lambda gradient: gradient * math.nan)
        backward(one, policy=1.0, critic=1.0)
        assert set(one.step(["critic"])) == {"critic"}
        assert bool(one.model.policy.isfinite().all())


@dataclass
class Counter:
    """A thing with a state: tensors, numbers, both."""

    mean: Tensor = field(default_factory=lambda: torch.zeros(2))
    seen: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen = state["mean"], state["seen"]


def train(one: Loop, counter: Counter, *, until: int = 10**9) -> None:
    """Adam on gradients that depend on the iteration, a thing beside the model, and a memory."""
    for iteration in one.iterations():
        backward(one, policy=1.0 + iteration, critic=0.5 * iteration)
        one.step(["policy", "critic"])
        counter.mean, counter.seen = counter.mean + 0.1 * iteration, counter.seen + 1
        one.memory["sum"] = one.memory.get("sum", 0) + iteration
        one.finish({"loss": float(one.model.policy.detach().sum())})
        if one.iteration == until:
            one.stop.signal = signal.SIGTERM


class TestSaving:
    def test_going_on_is_as_if_nothing_had_been(self, tmp_path: Path) -> None:
        settings = Settings(optimizer=Optimizer(lr=0.1, schedule="cosine", warmup_steps=2))
        straight, counted = loop(tmp_path / "a", settings, kind=torch.optim.AdamW), Counter()
        straight.keep("counter", counted)
        train(straight, counted)

        first, before = loop(tmp_path / "b", settings, kind=torch.optim.AdamW), Counter()
        first.keep("counter", before)
        train(first, before, until=2)
        first.save()
        saved = checkpoint.latest(first.run.checkpoints)
        assert saved is not None and saved.name == "step-000002"

        second, after = loop(tmp_path / "b", settings, kind=torch.optim.AdamW), Counter()
        with torch.no_grad():
            second.model.policy += 100.0
        second.restore(saved)
        second.keep("counter", after)
        assert (after.seen, second.iteration, second.optimizer_steps) == (2, 2, 2)
        assert second.memory == {"sum": 1} and moved(second, weights(first)) == set()
        train(second, after)
        assert moved(second, weights(straight)) == set()
        assert torch.equal(after.mean, counted.mean) and second.memory == straight.memory
        rows = [[(row["step"], row["loss"]) for row in read_metrics(one.run.metrics)] for one in (straight, second)]
        assert rows[0] == rows[1] and [step for step, _ in rows[0]] == [1, 2, 3, 4]
        last = [checkpoint.load(checkpoint.latest(one.run.checkpoints)) for one in (straight, second)]  # type: ignore
        assert last[0].step == last[1].step == 4
        assert last[0].tensors.keys() == last[1].tensors.keys() == {"weights", "optimizer", "kept-counter"}
        for stem, tensors in last[0].tensors.items():
            assert all(torch.equal(value, last[1].tensors[stem][name]) for name, value in tensors.items())

    def test_weights_of_another_model_are_named(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        with pytest.raises(ValueError, match=r"where holds the weights of another model: critic, policy"):
            put_back(one.trained, {}, Path("where"))

    def test_only_when_due_and_at_the_end(self, tmp_path: Path) -> None:
        one = loop(tmp_path, Settings(iterations=5, checkpoint=Checkpoint(every=2, keep=9)))
        train(one, Counter())
        steps = sorted(path.name for path in one.run.checkpoints.glob("step-*"))
        assert steps == ["step-000002", "step-000004", "step-000005"]


class TestEvaluation:
    def test_when_it_is_due(self, tmp_path: Path) -> None:
        asked: list[int] = []

        def judge(iteration: int) -> dict[str, float]:
            asked.append(iteration)
            return {"eval/success_mean": iteration / 10}

        one = loop(tmp_path, Settings(iterations=5), every=2, evaluate=judge)
        train(one, Counter())
        assert asked == [0, 2, 4, 5]
        rows = {row["step"]: row for row in read_metrics(one.run.metrics)}
        assert list(rows) == [0, 1, 2, 3, 4, 5]
        assert {step for step, row in rows.items() if "eval/success_mean" in row} == {0, 2, 4, 5}
        assert rows[4]["eval/success_mean"] == 0.4 and rows[4]["updates"] == 1 and "timing/eval_s" in rows[4]

    def test_one_that_was_left_is_done_again_and_its_row_is_written_once(self, tmp_path: Path) -> None:
        armed = [True]

        def judge(iteration: int) -> dict[str, float]:
            if iteration == 2 and armed:
                armed.clear()
                one.stop.signal = signal.SIGTERM
            one.leave_if_asked()
            return {"eval/success_mean": iteration / 10}

        one = loop(tmp_path, every=2, evaluate=judge)
        train(one, Counter())
        assert [row["step"] for row in read_metrics(one.run.metrics)] == [0, 1]
        assert one.iteration == 2 and one.unfinished_row is not None
        saved = checkpoint.latest(one.run.checkpoints)
        assert saved is not None and saved.name == "step-000002"
        one = loop(tmp_path, every=2, evaluate=judge)
        one.restore(saved)
        train(one, Counter())
        rows = read_metrics(one.run.metrics)
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert rows[2]["eval/success_mean"] == 0.2 and "loss" in rows[2]

    def test_never(self, tmp_path: Path) -> None:
        def judge(iteration: int) -> dict[str, float]:
            raise AssertionError("evaluated")

        one = loop(tmp_path, every=0, evaluate=judge)
        train(one, Counter())
        assert [row["step"] for row in read_metrics(one.run.metrics)] == [1, 2, 3, 4]


class TestStopping:
    def test_an_iteration_that_has_changed_something_is_finished(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        one.stop.signal = signal.SIGTERM
        with pytest.raises(Abandoned):
            one.leave_if_asked()
        backward(one, policy=1.0)
        one.step(["policy"])
        one.leave_if_asked()
        one.finish({})
        assert list(one.iterations()) == []

    def test_global_generators_are_seeded_by_the_iteration(self, tmp_path: Path) -> None:
        """A user's simulator may draw from them; the same iteration draws the same numbers in a resumed run."""

        def drawn(start: int) -> list[float]:
            one, found = loop(tmp_path), []
            one.iteration = start
            for _ in one.iterations():
                found.append(torch.rand(()).item())
                one.iteration += 1
            return found

        whole = drawn(0)
        assert len(set(whole)) == 4 and drawn(2) == whole[2:]
