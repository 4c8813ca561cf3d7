"""What a run of a language model has beside its method: average, monitor, undone iterations, smaller micro-batches."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genrl.config import ConfigError, load
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.runtime.loop import updating
from genrl.runtime.loop.loop import Loop
from genrl.vlm.evaluate import judge
from genrl.vlm.policies.folder import load_trained
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.shaping import ConsistencyBonus
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import open_rewards
from genrl.vlm.run import AnswersRun
from genrl.vlm.train import train
from tests.run_folders import differences, last_state, rows
from tests.vlm import fake_vllm, vlm_runs
from tests.vlm.methods.episodes import agent_runs

EVALUATED: dict[str, Any] = {"every": 1, "questions": 4, "blind": False}
AVERAGED: dict[str, Any] = {"ema": {"decay": 0.5}, "optimizer": {"lr": 1e-2}, "iterations": 2}
SCORES = [0.5, 0.7, 0.4, 0.3, 0.2]
TWICE = {"preset": "grpo", "epochs": 2}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def copied(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in loop.weights.named.items()}


def test_evaluation_and_result_are_of_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, seen = AnswersRun.evaluate, []

    def watched(self: AnswersRun, iteration: int) -> dict[str, float]:
        seen.append(copied(self.loop))
        return evaluate(self, iteration)

    monkeypatch.setattr(AnswersRun, "evaluate", watched)
    config = vlm_runs.config(tmp_path, evaluation=EVALUATED, **AVERAGED)
    run = train(config)
    tensors = last_state(run).tensors
    average = tensors["snapshot-average"]
    assert len(seen) == 3 and equal(seen[-1], average) and not equal(average, tensors["weights"])
    for policy in (Policy(str(run / "model")), load_trained(config, run)):
        found = dict(policy.model.named_parameters())
        assert all(torch.equal(found[name], value) for name, value in average.items())


@pytest.mark.slow
def test_an_engine_with_weights_of_its_own_evaluates_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on with the trained ones."""
    fake_vllm.install(monkeypatch)
    config = vlm_runs.config(
        tmp_path,
        trainer={"preset": "grpo", "weights": []},
        generation={"engine": "vllm", "vllm": {"sleep": False}},
        evaluation=EVALUATED,
        **AVERAGED,
    )
    run = train(config)
    assert all(row["sampler/gap_max"] < 1e-4 for row in rows(run)[1:])
    lines = (run / "samples" / "step-000002.jsonl").read_text().splitlines()
    found = judge(Policy(str(run / "model")), config, open_rewards(config), Questions(config, "eval"), range(4))
    assert [json.loads(line)["answer"] for line in lines] == found.texts


def left_in(place: Path, monkeypatch: pytest.MonkeyPatch, call: int, config: Any) -> tuple[Path, Path, int]:
    """The run in one go, and asked to end before its `call`-th backward pass (from 0) and resumed; after how many
    iterations it ended. config: of the name of a run folder."""
    straight = train(config("straight"))
    backward, calls = updating._backward, iter(range(10**6))

    def watched(*arguments: Any) -> None:
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        backward(*arguments)

    stopped = place / "stopped"
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(updating, "_backward", watched)
        train(config("stopped"))
    after = last_state(stopped).step
    train(load(Run(stopped).config), stopped)  # type: ignore[arg-type]
    return straight, stopped, after


@pytest.mark.slow
def test_an_iteration_left_between_two_updates_is_undone_and_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GRPO-CARE's average and the run's own, to the bit."""
    monkeypatch.setattr(ConsistencyBonus, "average", (0.995, 1))
    changes: dict[str, Any] = {
        "trainer": {"preset": "grpo_care", "epochs": 2},
        "task": {"rows": 6},
        "ema": {"decay": 0.5},
        "checkpoint": {"every": 9},
        "iterations": 2,
    }

    def config(name: str) -> Any:
        return vlm_runs.config(tmp_path, output=str(tmp_path / name), **changes)

    straight, stopped, after = left_in(tmp_path, monkeypatch, 3, config)
    assert after == 1 and differences(straight, stopped) == []


@pytest.mark.slow
def test_an_agents_iteration_goes_back_to_the_episodes_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic, which is trained beside the model, too."""
    changes: dict[str, Any] = {"iterations": 2, "checkpoint": {"every": 9}}

    def config(name: str) -> Any:
        return agent_runs.config(tmp_path, "vl_dac", trainer={"epochs": 2}, output=str(tmp_path / name), **changes)

    straight, stopped, after = left_in(tmp_path, monkeypatch, 3, config)
    assert after == 1 and differences(straight, stopped) == []


def test_a_run_whose_answers_get_worse_is_stopped_with_its_best_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found: list[dict[str, torch.Tensor]] = []

    def scripted(self: AnswersRun, iteration: int) -> dict[str, float]:
        found.append(copied(self.loop))
        return {"eval/tag_format_mean": SCORES[iteration]}

    monkeypatch.setattr(AnswersRun, "evaluate", scripted)
    watched = {"reward": "tag_format", "tolerance": 0.05, "patience": 2}
    changes = {**AVERAGED, "iterations": 4, "evaluation": {**EVALUATED, "monitor": watched, "on_collapse": "stop"}}
    run = train(vlm_runs.config(tmp_path, **changes))
    assert [row["eval/below_best"] for row in rows(run)] == pytest.approx([0.0, 0.0, 0.3, 0.4])
    assert len(found) == 4 and not equal(last_state(run).tensors["weights"], found[1])
    best = Policy(str(run / "model-best"))
    assert all(torch.equal(a, b) for a, b in zip(best.parameters, found[1].values(), strict=True))
    assert f"the best by more than noise is 1 (0.700): {run / 'model-best'}" in capfd.readouterr().err


def test_what_cannot_be_watched(tmp_path: Path) -> None:
    for monitor, every, message in (
        ({"reward": "exakt"}, 1, "did you mean 'exact'.* exact, tag_format, accuracy"),
        ({"reward": "accuracy"}, 0, "nothing can be watched"),
        ({"reward": "exact", "patience": 3}, 1, "only 2 evaluations follow the first"),
    ):
        evaluation = {**EVALUATED, "every": every, "monitor": {"tolerance": 0.1, **monitor}}
        with pytest.raises(ConfigError, match=message):
            vlm_runs.config(tmp_path, iterations=2, evaluation=evaluation)
    episodes = {"every": 1, "monitor": {"reward": "success", "tolerance": 0.1, "patience": 1}}
    agent_runs.config(tmp_path, "grpo", evaluation=episodes)
    episodes["monitor"] = {**episodes["monitor"], "reward": "exact"}
    with pytest.raises(ConfigError, match="they are: success"):
        agent_runs.config(tmp_path, "grpo", evaluation=episodes)


def room_for(most: int, monkeypatch: pytest.MonkeyPatch, first: int = 1) -> list[int]:
    """A device that holds so many answers in a pass of training, after so many passes; the sizes that are tried."""
    log_probs, tried = Policy.log_probs, []

    def full(policy: Policy, prompts: Any, answers: torch.Tensor, *rest: Any, **options: Any) -> Any:
        tried.append(len(answers))
        if len(tried) > first and len(answers) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return log_probs(policy, prompts, answers, *rest, **options)

    monkeypatch.setattr(Policy, "log_probs", full)
    return tried


def test_an_iteration_that_runs_out_of_memory_is_done_again_in_smaller_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """After an update: to the bit the run that has the smaller pieces from the start. A resumed run keeps them."""
    by_hand = {**TWICE, "micro_batch": 4}
    wanted = train(vlm_runs.config(tmp_path, iterations=2, trainer=by_hand, output=str(tmp_path / "by hand")))
    with monkeypatch.context() as patched:
        tried = room_for(7, patched)
        found = train(vlm_runs.config(tmp_path, trainer={**TWICE, "fit_batch": True}))
    said = capsys.readouterr().err
    assert "memory ran out in iteration 1 with 16 samples in a micro-batch: it is done again, with 8" in said
    assert "with 8 samples in a micro-batch: it is done again, with 4 from here on" in said
    assert tried[:3] == [16, 16, 8] and set(tried[3:]) == {4}
    train(vlm_runs.config(tmp_path, iterations=2, trainer={**TWICE, "fit_batch": True}), found)
    first, second = last_state(found), last_state(wanted)
    assert first.state["memory"].pop("batch_size") == 4 and first.state == second.state
    assert all(equal(tensors, second.tensors[stem]) for stem, tensors in first.tensors.items())
    assert rows(found) == rows(wanted)


@pytest.mark.parametrize(("updates", "sizes"), [(1, [8, 4, 2, 1]), (8, [4, 2, 1])])
def test_a_process_begins_with_what_a_pass_can_have(tmp_path: Path, updates: int, sizes: list[int]) -> None:
    """Its own share of the answers, or all of one update: with more, the first halvings would change nothing."""
    trainer = {"preset": "grpo", "updates": updates}
    config = vlm_runs.config(tmp_path, generation={"prompts_per_iteration": 8, "group_size": 4}, trainer=trainer)
    process = SimpleNamespace(accelerator=SimpleNamespace(num_processes=4))
    run: Any = AnswersRun.__new__(AnswersRun)  # of which no more than these is looked at
    run.present, run.process, run.preset = config, process, None
    assert run.micro_batch_sizes() == sizes


@pytest.mark.slow
def test_memory_may_run_out_before_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the answers are scored, here of an agent, whose episodes are played again."""
    tried = room_for(6, monkeypatch, first=0)
    found = train(agent_runs.config(tmp_path, "vl_dac", trainer={"fit_batch": True}))
    assert tried[0] == 12 and max(tried[1:]) <= 6
    wanted = train(agent_runs.config(tmp_path, "vl_dac", trainer={"micro_batch": 6}, output=str(tmp_path / "by hand")))
    state = checkpoint.load(checkpoint.latest(Run(found).checkpoints)).tensors  # type: ignore[arg-type]
    assert equal(state["weights"], last_state(wanted).tensors["weights"])


def test_without_the_key_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(7, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(vlm_runs.config(tmp_path, trainer=TWICE))
    assert "micro-batches of 16 samples do not fit: lower trainer.micro_batch" in error.value.__notes__[0]
