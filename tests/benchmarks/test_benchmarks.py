"""All of them: what they say of themselves, and the kernels' without a GPU."""

import gc
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as every
from benchmarks import common, end_to_end, kernels, memory, model_calls, one_step, overhead, scaling
from benchmarks.common import Parts, Seconds
from genrl.config import load


@pytest.mark.parametrize("name", [*every.BRIEF, "compiled", "reward_cost", "vla_throughput"])
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    said = capsys.readouterr().out
    assert f"python -m benchmarks.{name}" in said and "--out" in said and f"{name}.json" in said


def test_a_kernel_that_is_wrong_is_not_timed() -> None:
    case = kernels.cases("joint_attention", "cpu", kernels.torch.float32, tiny=True)["tiny"]
    wrong = case._replace(ours=lambda *given: 1.001 * case.definition(*given))
    with pytest.raises(RuntimeError, match="joint_attention, tiny: .* times the error of its definition"):
        kernels.measure("joint_attention", "tiny", wrong, 1, "cpu")


# -- What the benchmarks share: the clock by parts, and loops that take turns
def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part within another is not counted twice, and a part that ends by an error is counted."""
    now = [0.0]
    monkeypatch.setattr(common, "clock", lambda: Seconds(now[0], now[0] / 2))
    parts = Parts()
    parts.enter("one")
    with parts.part("outer"):
        now[0] += 2.0
        with pytest.raises(KeyError), parts.part("inner"):
            now[0] += 1.0
            raise KeyError
    parts.enter("two")
    clock = SimpleNamespace(wait=lambda seconds: now.__setitem__(0, now[0] + seconds))
    parts.wrap(clock, "wait", "waiting")
    clock.wait(4.0)
    actual = {key: spent for key, spent in parts.take().items() if spent.wall}
    wanted = {("one", "outer"): 2.0, ("one", "inner"): 1.0, ("two", "waiting"): 4.0}
    assert actual == {key: Seconds(wall, wall / 2) for key, wall in wanted.items()}
    assert not any(spent.wall for spent in parts.take().values())


# -- An iteration over its bare calls
TINY = (
    *("sampling.prompts_per_iteration=1", "sampling.group_size=4", "sampling.batch_size=4"),
    *("sampling.num_inference_steps=3", "trainer.window={size: 1, high: 2}"),
    *("evaluation.every=0", "trackers=[]", "checkpoint.every=100", "iterations=3"),
)


@pytest.mark.slow
def test_the_bare_loop_makes_the_calls_of_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sampling calls and a decoding without gradient, one call of training with it; parts add up to phases."""
    made: list[list[tuple[str, bool]]] = []
    bare = overhead.bare

    def counted(calls: list[Any]) -> dict[str, Seconds]:
        made.append([(phase, call[3]) for phase, call in calls])
        return bare(calls)

    monkeypatch.setattr(overhead, "bare", counted)
    result = overhead.measure(load("configs/flow_grpo.yaml", TINY))  # type: ignore[arg-type]
    sampling = [("sample", False)] * 3 + [("decode", False)]
    gate = ("train", False)  # once in a run: whether replay gives what was recorded
    assert made == [[*sampling, gate, ("train", True)], *[[*sampling, ("train", True)]] * 2]
    whole = result["all"]
    assert len(whole["ratios"]) == 2 and whole["ratio"] > 0.5
    parts = {part: seconds for part, seconds in result["parts"].items() if part not in ("score", "outside")}
    assert sum(parts.values()) == pytest.approx(whole["iteration_s"], rel=0.1)  # medians of two
    assert min(parts[name] for name in ("forward", "backward", "pipeline", "optimizer")) > 0


# -- The ring's score is that of its density, and the table's figures are of what they say
def test_the_teachers_score_is_the_gradient_of_the_rings_density() -> None:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    sigma = torch.tensor([[0.05], [0.2], [0.4], [0.6], [0.8], [0.95]]).double()
    variance = (1 - sigma) ** 2 * one_step.VARIANCE + sigma**2
    away = x[:, None] - (1 - sigma)[:, None] * one_step.CENTRES
    density = torch.logsumexp(one_step.CAPTION - away.square().sum(-1) / (2 * variance), 1)
    expected = torch.autograd.grad(density.sum(), x)[0]
    torch.testing.assert_close(one_step.teacher(x, sigma, one_step.CAPTION), expected, rtol=1e-5, atol=1e-6)


# -- The counter against the closed form
def test_formulas_by_hand() -> None:
    for row, sampling, training in (
        ("chain, all steps", 8.0, 7.0),
        ("chain, guidance, KL", 16.0, 28.0),
        ("window, guidance, none in training", 16.0, 6.0),  # the old log-probabilities anew, once
        ("diffusion_nft", 8.0, 2.0),
    ):
        config = model_calls.small(row)
        result = model_calls.expected(config)
        assert [calls / config.sampling.images_per_iteration for calls in result] == [sampling, training]


# -- Peaks, to the byte
MB = 2**20 // 4


def test_a_peak_is_that_of_what_lives_together() -> None:
    """4 MiB, then 6 beside them while a product of 1 is made, then 2: at most 11 MiB over what was there before; a
    storage counts once."""

    def work() -> None:
        first = torch.ones(4 * MB)
        second = torch.ones(6 * MB)
        views = [second[1:], second.view(2, -1), torch.ones(MB, device="meta")]
        product = second[:MB] * 2
        del first, second, views, product
        torch.ones(2 * MB)

    gc.collect()
    before = memory.live_bytes()
    assert memory.peak_of(work) - before == pytest.approx(11 * 2**20, abs=4096)


# -- What several processes make of an iteration
def test_an_iteration_waits_for_the_slowest_between_two_collectives() -> None:
    """Work 3 and 1, then 1 and 2: mean 3.5, critical path 5; collectives .1 and .2 by whoever came last."""
    one = {"work": [3.0, 1.0], "collectives": [0.4], "bytes": {"all_reduce": 12}, "wall": 9.0}
    other = {"work": [1.0, 2.0], "collectives": [0.1], "bytes": {"all_reduce": 12}, "wall": 8.0}
    wanted = {"work": 3.5, "waiting": 1.5, "collectives": 0.1, "iteration": pytest.approx(5.1), "wall": 9.0}
    wanted |= {"number_of_collectives": 1.0, "bytes": {"all_reduce": 12}}
    assert scaling.summary([[one], [other]]) == wanted


def test_whole_runs_by_hand() -> None:
    """0.2 in two minutes; a run on another scorer, or of unknown cost, is left out."""
    run: dict[str, Any] = {"cpu_s": 120.0, "trained": ["shapes"], "logged": ["clipscore"]}
    run["curve"] = {"kcalls": [0, 9, 10], "eval/shapes_mean": [0.4, 0.9, 0.6], "eval/clipscore_mean": [0.5, None, 0.4]}
    others = {"jpeg-0": run | {"trained": ["jpeg"]}, "awm-0": run | {"cpu_s": None}}
    result = end_to_end.whole_runs({"crd-1": run, "crd-0": run, **others})
    assert list(result) == ["crd"] and result["crd"] == [pytest.approx([0.1, -0.05])] * 2
