"""Answers that earlier weights drew: which, what is learned from them, and that it is one run wherever it stops."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.episodes.run import EpisodesRun
from genrl.vlm.methods.policy_loss import estimate, policy_loss
from genrl.vlm.recipe.weights import EngineMismatch
from genrl.vlm.rollout.token_batch import TokenBatch
from genrl.vlm.run import AnswersRun
from genrl.vlm.train import train
from tests.run_folders import assert_one_run, rows
from tests.vlm import fake_vllm, vlm_runs
from tests.vlm.methods.episodes import agent_runs, test_sub_agents

METHODS: dict[int, dict[str, Any]] = {  # by their staleness
    1: {"trainer": {"preset": "dapo", "filter": "spread", "resample": 1}},
    2: {"trainer": {"preset": "gspo", "updates": 2}, "vlm": {"lora": {"rank": 4}}},
}


def changes(staleness: int, **further: Any) -> dict[str, Any]:
    return {"iterations": 4, "checkpoint": {"keep": 4}, **further, "generation": {"staleness": staleness}}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", METHODS)
def test_one_run_wherever_it_stops(tmp_path: Path, staleness: int) -> None:
    run = train(vlm_runs.config(tmp_path, **changes(staleness, **METHODS[staleness])))
    result = rows(run)
    assert [row["staleness"] for row in result] == [float(min(k, staleness)) for k in range(4)]
    assert "importance/mean" not in result[0]  # drawn by the present weights
    assert all(row["importance/max_abs_dev"] > 1e-5 for row in result[1:])
    assert_one_run(train, run, tmp_path)
    kept = checkpoint.load(checkpoint.latest(Run(run).checkpoints) or run).tensors["kept-drawing"]
    assert {key.split("/")[0] for key in kept} == {str(k) for k in range(3 - staleness, 4)}


def episodes(place: Path, **changes: Any) -> VLMConfig:
    """Of a main agent and sub-agents. In groups of two, an engine may give one without spread."""
    generation = {**agent_runs.TWO_BY_TWO, "group_size": 4, **changes.pop("generation")}
    return test_sub_agents.crops(place, generation=generation, **changes)


@pytest.mark.parametrize(
    ("kind", "names", "config", "vllm"),
    [
        (AnswersRun, ("draw", "_ask"), vlm_runs.config, None),
        pytest.param(AnswersRun, ("draw", "_ask"), vlm_runs.config, {}, marks=pytest.mark.slow),
        pytest.param(EpisodesRun, ("act", "_groups"), episodes, {}, marks=pytest.mark.slow),
    ],
)
def test_which_weights_draw(kind: Any, names: tuple[str, str], config: Any, vllm: Any, tmp_path, monkeypatch) -> None:
    """Those after i - 2 iterations, which give the recorded log-probabilities; the trainer's are the present ones'."""
    fake_vllm.install(monkeypatch)
    asked = test_sub_agents.looking(monkeypatch)
    before: list[dict[str, Tensor]] = []
    used: list[dict[str, Tensor]] = []
    gaps: list[float] = []
    draw, ask, estimated = getattr(kind, names[0]), getattr(kind, names[1]), kind.estimate

    def weights(run: Any) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in run.loop.weights.named.items()}

    def asking(run: Any, *arguments: Any, **named: Any) -> Any:
        used.append(weights(run))
        return ask(run, *arguments, **named)

    def sampled(run: Any) -> Any:
        before.append(weights(run))
        result = draw(run)
        now = weights(run)
        assert all(torch.equal(value, now[name]) for name, value in before[-1].items())
        if kind is AnswersRun:
            with run.drawing():
                gaps.append(estimated(run, result[0]).estimate.metrics["sampler_gap_max"])
        return result

    monkeypatch.setattr(kind, names[0], sampled)
    monkeypatch.setattr(kind, names[1], asking)
    run = train(config(tmp_path, generation={"staleness": 2, "vllm": vllm}, iterations=4, optimizer={"lr": 1e-3}))
    assert any(not torch.equal(value, before[1][name]) for name, value in before[0].items())
    for iteration, those in enumerate(used):
        assert all(torch.equal(value, those[name]) for name, value in before[max(0, iteration - 2)].items())
    assert max(gaps, default=0.0) < 1e-4  # by the weights that drew; by the present ones:
    assert all(gap > 1e-3 for gap in [row["sampler/gap_max"] for row in rows(run) if "sampler/gap_max" in row][1:])
    assert kind is AnswersRun or len(asked) >= 4, "sub-agents answer, too"


def test_a_loss_by_hand(tmp_path: Path) -> None:
    """Two answers of two tokens: w = p_old / p_drawn of each, 0 above 5, times the surrogate."""
    config = vlm_runs.config(tmp_path, **changes(1, trainer={"preset": "dapo"}))
    preset = config.trainer.recipe(config)
    old = torch.full((2, 2), -1.0)
    sampled = old - torch.tensor([[math.log(2.0), math.log(6.0)], [0.0, -math.log(4.0)]])
    batch = TokenBatch(
        mask=torch.ones(2, 2, dtype=torch.bool),
        group=torch.zeros(2, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        old_log_prob=old,
        sampler_log_prob=sampled,
    )
    result = estimate(preset, batch)
    weights = [2.0, 0.0, 1.0, 0.25]
    assert result.batch.weight.flatten().tolist() == pytest.approx(weights)
    high, low = result.batch.advantage.tolist()
    loss = policy_loss(preset, result.batch.with_log_prob(old)).metrics["loss/policy"]
    assert float(loss) == pytest.approx(-(2.0 * high + 0.0 * high + 1.0 * low + 0.25 * low) / 4)
    assert result.metrics["importance_mean"] == pytest.approx(sum(weights) / 4)
    assert result.metrics["importance_left_out"] == 0.25
    assert result.metrics["importance_max_abs_dev"] == pytest.approx(1.0)
    icepop = EngineMismatch(level="token", mode="mask", low=0.5, high=5.0)  # leaves out tokens on both sides
    result = estimate(replace(preset, weights=(icepop,)), batch)
    assert result.batch.weight.flatten().tolist() == pytest.approx([2.0, 0.0, 1.0, 0.0])
    assert result.metrics["importance_left_out"] == result.metrics["sampler_corrected"] == 0.5


def test_the_weight_is_there_once(tmp_path: Path) -> None:
    """Of answers of older weights, and of an engine's rounding, which it serves, too; what is written stays."""
    for staleness, trainer, expected in (
        (1, {"preset": "dapo"}, EngineMismatch(level="token", mode="mask", high=5.0)),
        (1, {"preset": "gspo"}, EngineMismatch(level="sequence_geo", mode="mask", high=5.0)),
        (1, {"preset": "dapo", "weights": ["top_entropy"]}, EngineMismatch(level="token", mode="mask", high=5.0)),
        (1, {"weights": [{"name": "engine_mismatch", "high": 2.0}]}, EngineMismatch(high=2.0)),
        (0, {}, EngineMismatch()),
        (0, {"preset": "vppo"}, EngineMismatch()),
        (0, {"preset": "para_grpo"}, EngineMismatch(level="token", high=5.0)),
        (0, {"weights": []}, None),
    ):
        for vllm in (None, {}):
            generation = {"staleness": staleness, "vllm": vllm}
            config = vlm_runs.config(tmp_path, trainer=trainer, iterations=4, generation=generation)
            *others, last = [None, *config.trainer.recipe(config).weights]
            written = trainer.get("preset") == "para_grpo"  # which has it of its own
            wanted = expected if staleness or written or vllm is not None else None
            assert last == wanted if isinstance(last, EngineMismatch) else wanted is None
            assert not any(isinstance(one, EngineMismatch) for one in others)
