"""Whole tiny runs: the gradient of an update by hand, every preset, which groups are trained on, evaluation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config import check_files
from genrl.objectives.groups import group_advantages
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.answers.train import learn
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.rollout.rollout import Answers, order, sample, totals
from genrl.vlm.run import AnswersRun
from genrl.vlm.train import train
from genrl_rewards.scorers.texts.verifiable import answer_in
from tests.run_folders import rows, tiered
from tests.vlm import vlm_runs
from tests.vlm.by_hand import assert_same, gradients, naive_log_probs, watched

OF_EPISODES = ("vl_dac", "poad", "token_ppo", "ma_rlhf", "ui_s1", "trloo")
RUNS = [name for name, one in PRESETS.items() if one.output is None and name not in OF_EPISODES]

QUICK = ("vppo", "tw_grpo", "q_hawkeye", "reg_grpo")  # others are in test_resumed.py


def an_update(run: AnswersRun, monkeypatch: pytest.MonkeyPatch) -> tuple[Answers, dict[str, Tensor]]:
    """The answers of the first iteration, and the gradient of its first optimiser step."""
    seen = watched(run, monkeypatch)
    answers, _ = run.draw()
    ready = run.estimate(answers)
    learn(run, answers, ready)
    return answers, seen[0]


def wanted_loss(preset: str, answers: Answers, log_prob: Tensor) -> Tensor:
    """The loss whose gradient the first update is to have: at ratio 1 the surrogate is A times the log-probability,
    and the gradient of the KL to the same weights is 0."""
    reward = (answers.scores["exact"] + 0.2 * answers.scores["tag_format"]).view(4, 4)
    centred = reward - reward.mean(1, keepdim=True)
    length = answers.mask.sum(1)
    if preset == "grpo":  # arXiv 2402.03300: z-scores of the group, the mean of each answer's tokens, their mean
        advantage = (centred / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        return -(advantage * log_prob.sum(1) / length).mean()
    if preset == "dr_grpo":  # arXiv 2503.20783: no division by spread or length, but by the longest allowed
        return -(centred.flatten() * log_prob.sum(1)).sum() / (16 * 12)
    others = (reward.sum(1, keepdim=True) - reward) / 3  # rloo: the mean of the other three
    return -((reward - others).flatten() * log_prob.sum(1) / length).mean()


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo"])
def test_the_gradient_of_the_first_update_is_that_of_the_formula(preset: str, tmp_path, monkeypatch) -> None:
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer={"preset": preset})) as run:
        answers, result = an_update(run, monkeypatch)
        prompts = [answers.prompts[k] for k in answers.group.tolist()]
        own = naive_log_probs(run.policy, prompts, answers.tokens, answers.mask)
        log_prob = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        wanted_loss(preset, answers, log_prob).backward()
        assert_same(result, gradients(run))


def test_one_update_of_the_present_weights_needs_no_pass_before_it(tmp_path, monkeypatch) -> None:
    """From the second iteration on: the same gradient, ratios of 1, and how far the sampler is off."""
    with vlm_runs.opened(vlm_runs.config(tmp_path, iterations=2)) as run:
        answers, seen = run.draw()[0], watched(run, monkeypatch)
        figures = []
        for run.loop.iteration in (0, 1):
            ready = run.estimate(answers)
            assert ready is not None and (ready.batch.old_log_prob is None) == (run.loop.iteration == 1)
            figures.append(learn(run, answers, ready))
    assert figures[1]["ratio/mean"] == figures[1]["ratio/max"] == 1.0 and figures[1]["ratio/drift"] == 0.0
    assert 0 < figures[1]["sampler/gap_mean"] < 1e-5 and "sampler/gap_mean" not in figures[0]
    assert_same(seen[1], seen[0], apart=2e-7)


@pytest.mark.parametrize(
    "changes", [{"trainer": {"preset": "dapo", "micro_batch": 5}}, {"vlm": {"gradient_checkpointing": True}}]
)
def test_what_saves_memory_changes_nothing_but_rounding(changes: dict[str, Any], tmp_path, monkeypatch) -> None:
    result = []
    for own in ({"trainer": {"preset": changes.get("trainer", {}).get("preset", "grpo")}}, changes):
        with vlm_runs.opened(vlm_runs.config(tmp_path, **own)) as run:
            assert bool(run.policy.checkpointed) == ("vlm" in own)
            result.append(an_update(run, monkeypatch)[1])
    assert_same(result[1], result[0])


@pytest.mark.parametrize("preset", tiered(RUNS, QUICK))
def test_every_preset_trains(preset: str, tmp_path: Path) -> None:
    (row,) = rows(train(vlm_runs.config(tmp_path, trainer={"preset": preset, "epochs": 2})))
    # a clip range of 3e-4 may leave the second update no gradient
    assert row["updates"] == 2 or (row["updates"] == 1 and preset in ("gspo", "gspo_token", "luspo"))
    assert row["sampler/gap_max"] < 1e-4 and row["grad_norm"] > 0
    assert all(value is not None for value in row.values())


def test_weights_that_score_otherwise_than_they_drew_are_reported(tmp_path: Path) -> None:
    with vlm_runs.opened(vlm_runs.config(tmp_path)) as run:
        answers, _ = run.draw()
        ready = run.estimate(answers)
        next(iter(run.loop.weights.named.values())).data.add_(0.1)
        with pytest.raises(RuntimeError, match="before the first update"):
            learn(run, answers, ready)
        with pytest.raises(RuntimeError, match="the trainer and the sampler assign different log-probabilities"):
            run.estimate(replace(answers, sampler_log_prob=answers.sampler_log_prob - 1.0))


def test_groups_without_spread_are_drawn_again_and_without_any_nothing_changes(tmp_path: Path) -> None:
    trainer = {"preset": "dapo", "filter": "spread", "resample": 4}
    (row,) = rows(train(vlm_runs.config(tmp_path, trainer=trainer)))
    assert row["rollout/rounds"] > 1 and row["rollout/kept"] == pytest.approx(1 / row["rollout/rounds"])
    assert row["zero_std_ratio"] == 0
    constant = tmp_path / "constant.py"
    constant.write_text("def one(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    own = {"rewards": [{"name": f"{constant}:one"}], "output": str(tmp_path / "constant")}
    (row,) = rows(train(vlm_runs.config(tmp_path, trainer={"filter": "spread"}, **own)))
    assert row["updates"] == 0 and row["rollout/kept"] == 0 and "loss" not in row


def test_evaluation_says_what_is_right_and_what_can_be_guessed(tmp_path: Path) -> None:
    first, _ = rows(train(vlm_runs.config(tmp_path, evaluation={"every": 1, "questions": 48})))
    assert first["eval/accuracy_low"] < first["eval/accuracy_mean"] < first["eval/accuracy_high"]
    assert first["eval/accuracy_blind"] < first["eval/accuracy_mean"] - 0.1  # the embedded model sees
    assert (tmp_path / "run" / "samples" / "step-000001.jsonl").is_file()


def test_every_pass_asks_every_question_once() -> None:
    result = order(7, 3, 0, 14)
    assert sorted(result[:7]) == sorted(result[7:]) == list(range(7)) and result[:7] != result[7:]
    assert order(7, 3, 5, 4) == result[5:9]


def test_remax_compares_with_the_greedy_answer_to_the_same_question(tmp_path: Path) -> None:
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer={"preset": "remax"})) as run:
        answers, _ = run.draw()
        ready = run.estimate(answers)
        total = answers.scores["exact"] + 0.2 * answers.scores["tag_format"]
        base = answers.scores["exact/greedy"] + 0.2 * answers.scores["tag_format/greedy"]
        assert torch.equal(ready.batch.advantage, total - base)
        assert bool((base.view(4, 4) == base.view(4, 4)[:, :1]).all())
        made = sample(run.policy, run.config, answers.prompts, 1, 0.0, [("any", k) for k in range(4)])
        for k, text in enumerate(made.texts):
            right = float(answer_in(text) == answers.rows[k].columns["answer"])
            assert float(answers.scores["exact/greedy"].view(4, 4)[k, 0]) == right


def test_tempo_pays_the_branches_of_the_answers_themselves(tmp_path: Path) -> None:
    """From the group, worth 0 in z-scores, to an answer that no other equals, worth its own: what its tokens get beside
    GRPO's z adds up to z."""
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer={"preset": "tempo"})) as run:
        answers, _ = run.draw()
        result = run.estimate(answers).batch.advantage
    z = group_advantages(totals(run.config, answers.scores), answers.group, scale="group", eps=1e-4, ddof=1)
    said = [(k // 4, *answers.tokens[k][answers.mask[k]].tolist()) for k in range(16)]
    alone = torch.tensor([said.count(one) == 1 for one in said])
    torch.testing.assert_close(result.sum(1)[alone], ((answers.mask.sum(1) + 1) * z)[alone])
    assert z[alone].abs().max() > 0.8


def test_a_task_without_its_column_is_found_by_check(tmp_path: Path) -> None:
    wrong = vlm_runs.config(tmp_path, trainer={"preset": "g2rpo", "advantage": {"task": "task"}})
    with pytest.raises(ValueError, match="the column task is to name"):
        check_files(wrong, {})
    trainer = {"preset": "g2rpo", "advantage": {"task": "question"}}
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer=trainer)) as run:
        answers, _ = run.draw()
        ready = run.estimate(answers)
        questions = [row.columns["question"] for row in answers.rows for _ in range(4)]
        numbers = ready.batch.extra["task"].tolist()
        assert len(set(zip(questions, numbers, strict=True))) == len(set(numbers)) == len(set(questions))


# -- Answers of a group that are trained on
ECONOMY = {"keep": 2}


def economical(place: Path, **changes: Any) -> VLMConfig:
    return vlm_runs.config(place, **{"economy": ECONOMY, "task": {"rows": 12}, **changes})


def test_the_answers_with_most_variance_are_trained_on(tmp_path: Path) -> None:
    with vlm_runs.opened(economical(tmp_path)) as run:
        for _ in run.loop.iterations():
            answers, row = run.draw()
            assert answers.size == 2 and len(answers.texts) == 2 * len(answers.rows) == 8
            ready = run.estimate(answers)
            chosen = ready.estimate.batch
            assert torch.equal(chosen.rewards, totals(run.config, answers.scores)) and len(chosen.group.unique()) == 4
            assert row["reward/total_mean"] != pytest.approx(float(chosen.rewards.mean())), "metrics are of all answers"
            break
