"""Backward passes and steps of named groups: rates, clipping, guards, schedule."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genrl.config.sections import EMA, Optimizer
from genrl.runtime.loop.guards import NonFiniteError, read_dump
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.weights.optimization import Schedule, _norm, scheduled
from tests.runtime.loop.loops import METHOD, RATES, Settings, backward, loop, model, moved, values


class TestStep:
    def test_moves_by_the_rate_of_its_group_and_sums_what_was_added(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        backward(one, policy=1.0)
        backward(one, policy=0.5, critic=2.0)
        assert one.optimization.step() == pytest.approx({"policy": 1.5 * math.sqrt(3), "critic": 2 * math.sqrt(2)})
        two = model(one)
        torch.testing.assert_close(two.policy.data, torch.tensor([1.0, -2.0, 3.0]) - 0.1 * 1.5)
        torch.testing.assert_close(two.critic.data, torch.tensor([[4.0, 5.0]]) - 0.5 * 2.0)
        assert one.updates == one.optimizer_steps == 1
        assert two.policy.grad is None and two.critic.grad is None

    def test_the_average_is_renewed_as_often_as_it_says(self, tmp_path: Path) -> None:
        one = loop(tmp_path, Settings(ema=EMA(decay=0.75, every=3)))
        start, ends = values(one), []
        for _ in range(7):
            backward(one, policy=1.0, critic=1.0)
            one.optimization.step()
            ends.append(values(one))
        for name, value in start.items():
            wanted = 0.75 * (0.75 * value + 0.25 * ends[2][name]) + 0.25 * ends[5][name]
            torch.testing.assert_close(one.weights.snapshots["average"][name], wanted)

    def test_norms_are_float32_and_sums_of_each_precision(self, tmp_path: Path) -> None:
        """A policy in bfloat16 beside a critic in float32, of two equal processes."""
        optimization, of_policy = loop(tmp_path).optimization, torch.ones(257, dtype=torch.bfloat16)
        two: Any = SimpleNamespace(num_processes=2, reduce=lambda tensor, reduction: 2 * tensor)
        summed = replace(optimization, accelerator=two)._summed([of_policy, torch.tensor([3.0])])
        assert [g.dtype for g in summed] == [torch.bfloat16, torch.float32] and summed[1].item() == 6.0
        assert float(_norm([of_policy])) == pytest.approx(math.sqrt(257), rel=1e-6)  # 16 in bfloat16

    def test_a_divisor_and_a_loss_scale_leave_the_gradient_of_the_mean(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        one.optimization.loss_scale = 64.0
        losses = torch.stack([model(one).policy.sum(), 3 * model(one).policy.sum()])
        one.optimization.backward(METHOD, {"loss": losses}, Recorded(None, {}), divisor=8.0)
        assert model(one).policy.grad.tolist() == [32.0] * 3  # type: ignore[union-attr]
        assert one.optimization.step(["policy"]) == pytest.approx({"policy": 0.5 * math.sqrt(3)})
        torch.testing.assert_close(model(one).policy.data, torch.tensor([1.0, -2.0, 3.0]) - 0.1 * 0.5)

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
    def test_only_the_named_groups(self, tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
        """What the others had been given is forgotten: it does not come back with the next step."""
        one = loop(tmp_path, kind=kind, weight_decay=0.1)
        before = values(one)
        backward(one, policy=1.0, critic=1.0)
        assert set(one.optimization.step(["critic"])) == {"critic"}
        assert moved(one, before) == {"critic"} and model(one).policy.grad is None
        assert not one.optimizer.state.get(one.weights.named["policy"])
        backward(one, policy=1.0)
        assert one.optimization.step(["policy"]) == pytest.approx({"policy": math.sqrt(3)})

    def test_each_group_warms_up_by_its_own_steps(self, tmp_path: Path) -> None:
        """A critic that is trained alone at first does not use up the policy's warm-up; a checkpoint knows both."""
        settings = Settings(optimizer=Optimizer(lr=0.1, warmup_steps=4))
        one = loop(tmp_path, settings)
        for groups in (["critic"], ["critic"], ["policy", "critic"]):
            backward(one, policy=1.0, critic=1.0)
            one.optimization.step(groups)
        rates = [group["lr"] for group in one.optimizer.param_groups]
        assert rates == pytest.approx([RATES["policy"] / 4, RATES["critic"] * 3 / 4])
        one.save()
        again = loop(tmp_path, settings)
        again.restore(one.process.run.checkpoints / "step-000000")
        assert [group["steps"] for group in again.optimizer.param_groups] == [1, 3]

    def test_each_group_is_clipped_by_itself(self, tmp_path: Path) -> None:
        settings = Settings(optimizer=Optimizer(lr=0.1, max_grad_norm=1.0))
        one = loop(tmp_path, settings)
        start = values(one)
        backward(one, policy=10.0, critic=0.1)
        norms = one.optimization.step(["policy", "critic"])
        assert norms == pytest.approx({"policy": 10 * math.sqrt(3), "critic": 0.1 * math.sqrt(2)})  # as they were
        steps = {name: (start[name] - value) / RATES[name] for name, value in values(one).items()}
        assert float(steps["policy"].norm()) == pytest.approx(1.0, rel=1e-5)
        torch.testing.assert_close(steps["critic"], torch.full((1, 2), 0.1))  # never up

    @pytest.mark.parametrize(("kind", "more"), [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})])
    def test_nothing_moves_without_a_gradient(self, tmp_path: Path, kind: Any, more: dict[str, Any]) -> None:
        """Neither by momentum nor by decay: a minibatch in which no decision counted."""
        one = loop(tmp_path, kind=kind, weight_decay=0.1, **more)
        backward(one, policy=1.0, critic=1.0)
        one.optimization.step(["policy", "critic"])
        before = values(one)
        backward(one, critic=1.0)
        assert one.optimization.step(["policy", "critic"])["policy"] == 0.0
        assert moved(one, before) == {"critic"}
        before = values(one)
        one.optimization.backward(METHOD, {"loss": torch.zeros(())}, Recorded(None, {}))  # a loss that hangs on nothing
        assert one.optimization.step(["policy", "critic"]) == {"policy": 0.0, "critic": 0.0}
        assert moved(one, before) == set()
        assert one.updates == 2 and one.optimizer_steps == 3

    def test_another_optimiser_stands_still_where_nothing_counted(self, tmp_path: Path) -> None:
        """Else Adam's momentum would move the parameters by a gradient of 0."""
        one, parameter = loop(tmp_path), torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        parameter.grad = torch.tensor([3.0, 4.0])
        assert one.optimization.step_other(optimizer) == 5.0
        assert one.optimization.other_updates == 1 and parameter.tolist() == pytest.approx([0.9, 1.9])
        assert one.updates == 0
        after = parameter.detach().clone()
        for gradient in (None, torch.zeros(2)):
            parameter.grad = gradient
            assert one.optimization.step_other(optimizer) == 0.0
            assert torch.equal(parameter, after) and one.optimization.other_updates == 1


class TestSchedule:
    def test_follows_the_iterations_and_warms_up_by_steps(self, tmp_path: Path) -> None:
        """Warm-up 3 of the first steps, then linear over the 4 iterations, whatever number of steps they have."""
        settings = Settings(optimizer=Optimizer(lr=0.1, schedule="linear", warmup_steps=3))
        one, seen = loop(tmp_path, settings), []
        for iteration in one.iterations():
            for _ in range(2 + iteration):
                backward(one, policy=1.0, critic=1.0)
                one.optimization.step(["policy", "critic"])
                seen.append({group["name"]: group["lr"] for group in one.optimizer.param_groups} | {"run": one.lr})
            one.finish({})
        shares = [1 / 3, 2 / 3, 1.0, 0.75, 0.75, *[0.5] * 4, *[0.25] * 5]
        assert [row["policy"] for row in seen] == [row["run"] for row in seen]
        assert [row["policy"] for row in seen] == pytest.approx([0.1 * share for share in shares])
        assert [row["critic"] for row in seen] == pytest.approx([0.5 * share for share in shares])

    def test_cosine_and_never_below_zero(self) -> None:
        cosine = [scheduled(0.1, Optimizer(lr=0.1, schedule="cosine"), k, 4) for k in range(4)]
        assert cosine == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 4)) for k in range(4)])
        assert scheduled(1.0, Optimizer(lr=1.0, schedule="linear"), 12, 10) == 0.0
        assert scheduled(1.0, Optimizer(lr=1.0, schedule="cosine", schedule_iterations=10), 18, 10) == 0.1

    @pytest.mark.parametrize("steps", [None, 8])
    def test_a_longer_run_keeps_the_course_of_its_first_iterations(self, steps: int | None) -> None:
        """It falls over 2 of 4 iterations, of 2 steps each where the schedule follows steps."""
        settings = Optimizer(lr=1.0, schedule="linear", schedule_iterations=2)
        course = Schedule(settings, {"policy": 1.0}, 4, steps)
        result = [course.rate("policy", group_steps=0, all_steps=2 * k, iteration=k) for k in range(4)]
        assert result == [1.0, 0.5, 0.1, 0.1]


class TestGuards:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_loss_that_is_not_finite(self, tmp_path: Path, value: float) -> None:
        """The first such micro-batch is what is dumped, whatever follows."""
        one = loop(tmp_path)
        before = values(one)
        loss = value * model(one).policy.sum()
        results = {"loss": loss, "ratio": torch.tensor([2.0])}
        one.optimization.backward(METHOD, results, Recorded(None, {"advantage": torch.tensor([3.0])}), divisor=4.0)
        backward(one, policy=1.0)
        with pytest.raises(NonFiniteError, match="stopped before the update of step 0") as stopped:
            one.optimization.step()
        assert moved(one, before) == set() and one.updates == 0
        assert stopped.value.dump is not None
        dump = read_dump(stopped.value.dump)
        assert dump.where == "loss" and not dump.checked["loss"].isfinite()
        assert dump.batch["advantage"].tolist() == [3.0] and dump.results["ratio"].tolist() == [2.0]
        info = {"settings": {"algorithm": "test"}, "divisor": 4.0, "loss_scale": 1.0, "optimizer_steps": 0}
        assert dump.info == info
        assert all(torch.equal(dump.batch[f"weights/{name}"], value) for name, value in before.items())
        assert f"genrl replay {stopped.value.dump}" in str(stopped.value)

    def test_a_gradient_that_is_not_finite(self, tmp_path: Path) -> None:
        one = loop(tmp_path)
        before = values(one)
        model(one).critic.register_hook(lambda gradient: gradient * math.nan)
        backward(one, policy=1.0, critic=1.0)
        with pytest.raises(NonFiniteError, match="gradient is not finite") as stopped:
            one.optimization.step(["policy", "critic"])
        assert moved(one, before) == set() and one.updates == one.optimizer_steps == 0
        assert "critic: 1 NaN" in str(stopped.value) and "policy:" not in str(stopped.value)
        assert stopped.value.dump is not None
        dump = read_dump(stopped.value.dump)
        assert dump.where == "gradient" and torch.equal(dump.batch["advantage"], torch.ones(2))
        assert dump.checked["gradient"].isfinite() and dump.checked["gradient/critic"].isnan()

    def test_a_group_that_is_not_stepped_is_not_looked_at(self, tmp_path: Path) -> None:
        """Nor does its micro-batch stand as the evidence in place of a later one of the group that is stepped."""
        one = loop(tmp_path)
        two = model(one)
        spoil = two.policy.register_hook(lambda gradient: gradient * math.nan)
        backward(one, policy=1.0, critic=1.0)
        assert set(one.optimization.step(["critic"])) == {"critic"}
        assert bool(two.policy.isfinite().all())
        backward(one, policy=1.0, critic=1.0)
        spoil.remove()
        two.critic.register_hook(lambda gradient: gradient * math.nan)
        later = Recorded(None, {"advantage": torch.tensor([7.0])})
        one.optimization.backward(METHOD, {"loss": two.critic.sum()}, later)
        with pytest.raises(NonFiniteError, match=r"critic: 1 NaN") as stopped:
            one.optimization.step(["critic"])
        assert stopped.value.dump is not None
        assert read_dump(stopped.value.dump).batch["advantage"].tolist() == [7.0]
