"""A reward that raises for some answers: they have no score, teach nothing, are counted, and too many end the run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from genrl.vlm import tasks
from genrl.vlm.evaluate import figures, judge
from genrl.vlm.methods.extras import counted
from genrl.vlm.methods.policy_loss import estimate
from genrl.vlm.recipe.advantages import CriticAdvantage, Hierarchical, SemiOnline, TurnLeaveOneOut
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.surrogates import KlCov
from genrl.vlm.recipe.weights import ClipCov
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import greedy_label, totals
from genrl.vlm.rollout.token_batch import TokenBatch
from genrl.vlm.tasks import Row
from genrl.vlm.train import train
from genrl_rewards.failures import RewardFailed
from genrl_rewards.scorers.texts.completions import BROKEN, score_completions
from tests.run_folders import rows
from tests.vlm import vlm_runs
from tests.vlm.methods.test_policy_loss import loss_and_gradient
from tests.vlm.rollout.test_vlm_data import pixels
from tests.vlm.rollouts import PROMPTS, preset, rollout

REWARD = """
def picky(completions, answer):
    if any(text == "?" for text in answer):
        raise KeyError("unanswerable")
    return [float(len(text)) for text in completions]
"""


def data(folder: Path, unanswerable: int, number: int = 8) -> dict[str, object]:
    """A task with so many questions whose answer is "?"."""
    lines = []
    for k in range(number):
        row = tasks.row("count", "train", k)
        Image.fromarray(pixels(row)).save(folder / f"{k}.png")
        answer = "?" if k < unanswerable else row.columns["answer"]
        lines.append(json.dumps({"prompt": row.columns["question"], "image": f"{k}.png", "answer": answer}))
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.jsonl").write_text("\n".join(lines))
    (folder / "picky.py").write_text(REWARD)
    return {"name": None, "train": str(folder / "a.jsonl"), "eval": str(folder / "b.jsonl")}


def config(folder: Path, unanswerable: int, limit: float = 0.2, **changes: object) -> object:
    given = [{"name": f"{folder}/picky.py:picky", "max_failed": limit}, {"name": "tag_format"}]
    made = {"prompts_per_iteration": 8, "group_size": 4, "max_new_tokens": 12}
    return vlm_runs.config(folder, task=data(folder, unanswerable), rewards=given, generation=made, **changes)


def test_one_row_gives_no_score_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = config(tmp_path, 1, evaluation={"every": 1, "blind": False})
    with vlm_runs.opened(settings) as run:
        answers, row = run.draw()
        bad = [name.columns["answer"] == "?" for name in answers.rows for _ in range(4)]
        assert sum(bad) == 4 and row["reward/picky_failed"] == 4.0
        total = totals(settings, answers.scores)
        assert total.isnan().tolist() == bad, "tag_format alone says nothing about an answer"
        result = run.estimate(answers)
        advantage = result.batch.advantage[result.batch.extra["row"].argsort()]
        assert advantage.isfinite().all()
        assert (advantage[torch.tensor(bad)] == 0).all() and (advantage[~torch.tensor(bad)] != 0).any()
    train(config(tmp_path, 1, evaluation={"every": 1, "blind": False}, output=str(tmp_path / "whole")))
    assert [one["eval/picky_failed"] for one in rows(tmp_path / "whole")] == [1.0, 1.0]


def test_too_many_end_the_run_with_the_first_row(tmp_path: Path) -> None:
    with pytest.raises(RewardFailed, match=r"(?s)'picky' raised for \d+ of \d+ samples.*a\.jsonl:\d.*unanswerable"):
        train(config(tmp_path, 4))
    train(config(tmp_path, 4, limit=1.0, output=str(tmp_path / "other")))
    settings = config(tmp_path, 4)
    with vlm_runs.opened(settings) as run:  # and an evaluation says so, too
        result = judge(run.policy, settings, run.opened, Questions(settings, "eval"), range(8))
    assert [sum(map(math.isnan, result.scores[name])) for name in ("picky", "tag_format")] == [4, 0]
    with pytest.raises(RewardFailed, match=r"b\.jsonl:1"):
        figures(settings, result)


def test_rows_are_scored_apart_once_a_call_raised() -> None:
    calls: list[int] = []

    def picky(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        if "bad" in completions:
            raise KeyError("bad")
        return [float(len(text)) for text in completions]

    result = score_completions(picky, prompts=["q"] * 3, completions=["a", "bad", "ccc"])
    assert [result.values[0], result.values[2]] == [1.0, 3.0] and math.isnan(result.values[1])
    assert [failure.rows for failure in result.failures] == [(1,)] and calls == [3, 1, 1, 1]
    calls.clear()
    whole = score_completions(picky, prompts=["q"] * 99, completions=["bad"] * 99)
    assert whole.failed == 99 and len(calls) == 1 + BROKEN, "a reward that is broken is not asked for every row"
    calls.clear()
    texts, group = ["bad"] * 6 + ["a"] * 12, [0] * 6 + [1] * 6 + [2] * 6
    mixed = score_completions(picky, prompts=["q"] * 18, completions=texts, group=group)
    assert mixed.failed == 6, "all answers to one question fail alike"


def test_a_reward_of_groups_is_called_for_groups() -> None:
    def picky(completions: list[str], group: list[int]) -> list[float]:
        assert len(completions) % 2 == 0, "whole groups"
        if "bad" in completions:
            raise KeyError("bad")
        return [1.0] * len(completions)

    result = score_completions(picky, prompts=["q"] * 4, completions=["a", "bad", "c", "d"], group=[0, 0, 1, 1])
    assert [math.isnan(value) for value in result.values] == [True, True, False, False]
    assert [failure.rows for failure in result.failures] == [(0, 1)]


JUDGE = """
import itertools

calls = itertools.count()


def judge(completions):
    \"\"\"No score for the most probable answer to the second question.\"\"\"
    if len(completions) > 8:
        return [0.5] * len(completions)
    return [None if k == 1 else 0.25 for k in range(len(completions))]
"""


def test_a_baseline_that_the_judge_gave_no_score_leaves_its_group_without_one(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    given = [{"name": f"{tmp_path}/judge.py:judge"}, {"name": "tag_format"}]
    made = {"prompts_per_iteration": 4, "group_size": 3, "max_new_tokens": 12}
    settings = vlm_runs.config(tmp_path, rewards=given, generation=made, trainer={"preset": "remax"})
    with vlm_runs.opened(settings) as run:
        answers, _ = run.draw()
        assert answers.scores[greedy_label("judge")].isnan().tolist() == [3 <= k < 6 for k in range(12)]
        assert totals(settings, answers.scores).isnan().tolist() == [3 <= k < 6 for k in range(12)]
        result = run.estimate(answers)
        advantage = result.batch.advantage[result.batch.extra["row"].argsort()]
        assert advantage.isfinite().all() and (advantage[3:6] == 0).all() and (advantage[6:] != 0).all()


def broken(folder: Path, number: int) -> None:
    """So many of the pictures of `data` are cut off, not the first, which is looked at before a run starts."""
    for k in range(1, number + 1):
        whole = (folder / f"{k}.png").read_bytes()
        (folder / f"{k}.png").write_bytes(whole[: len(whole) // 2])


def test_a_picture_that_cannot_be_opened_gives_no_score_and_too_many_end_the_run(tmp_path, caplog) -> None:
    settings = config(tmp_path, 0)
    broken(tmp_path, 1)
    with vlm_runs.opened(settings) as run:
        answers, row = run.draw()
        bad = [one.name.endswith("a.jsonl:2") for one in answers.rows for _ in range(4)]
        assert sum(bad) == 4 and totals(settings, answers.scores).isnan().tolist() == bad
        assert row["reward/picky_failed"] == row["reward/tag_format_failed"] == 4.0
        assert run.estimate(answers) is not None
    assert "a.jsonl:2: picture" in caplog.text and "its answers have no score" in caplog.text
    broken(tmp_path, 4)
    says = r"(?s)16 of 32 samples.*a\.jsonl:\d: picture .*cannot be read"
    with vlm_runs.opened(settings) as run, pytest.raises(RewardFailed, match=says):
        run.draw()


# -- A row without a score: with every preset it has no gradient, and the other rows learn as if it were not there
MISSING = 5
OTHERS = torch.tensor([k for k in range(12) if k != MISSING])
CREDITED = CriticAdvantage | Hierarchical | SemiOnline | TurnLeaveOneOut
JUDGED = sorted(name for name, one in PRESETS.items() if not isinstance(one.advantage, CREDITED) and one.output is None)
"""Presets whose advantages come from a reward of the row."""
OF_TEXTS = {"vppo", "q_hawkeye", "grpo_care"}
"""They read something of every row that is no score: pictures, numbers in the text, confidence."""


def unscored(seed: int = 0) -> TokenBatch:
    batch = rollout(seed, masked=True)
    rewards, components = batch.rewards.clone(), batch.extra["components"].clone()
    rewards[MISSING], components[MISSING] = torch.nan, torch.nan
    return replace(batch, rewards=rewards, extra={**batch.extra, "components": components})


def gradient(name: str, batch: TokenBatch) -> Tensor:
    """Of the loss without regularisers, by log-probabilities."""
    loss, result = loss_and_gradient(replace(preset(name), regularisers=()), batch)
    assert loss.isfinite() and result.isfinite().all()
    return result


@pytest.mark.parametrize("name", JUDGED)
def test_it_has_no_gradient(name: str) -> None:
    result = gradient(name, unscored())
    assert (result[MISSING] == 0).all(), "teaches"
    assert (result[OTHERS] != 0).any()


@pytest.mark.parametrize("name", [name for name in JUDGED if name not in OF_TEXTS])
def test_the_others_have_the_advantages_they_have_without_it(name: str) -> None:
    """GPG and RLPR make up for rows that add nothing, and it is one."""
    batches = unscored(), unscored().select(OTHERS)
    result, alone = (estimate(preset(name), batch, prompts=PROMPTS).batch.advantage for batch in batches)
    more = 12 / 11 if name in ("gpg", "rlpr") else 1
    assert torch.allclose(result[OTHERS], alone * more) and (result[MISSING] == 0).all()


def test_group_losses_leave_it_out() -> None:
    """The sums over rows and groups are those of the other rows; only the divisor counts it."""
    for name in ("reg_grpo", "real"):
        result, alone = gradient(name, unscored()), gradient(name, unscored().select(OTHERS))
        divisor = 12 / 11 if name == "reg_grpo" else 1.0
        assert torch.allclose(result[OTHERS] * divisor, alone)
    nothing = replace(unscored(), rewards=torch.full((12,), torch.nan, dtype=torch.float64))
    assert all((gradient(name, nothing) == 0).all() for name in ("reg_grpo", "real", "dpo"))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_among_those_of_scored_rows(name: str) -> None:
    batch = unscored()
    chosen = preset(name)
    if name == "clip_cov":
        chosen = replace(chosen, weights=(ClipCov(share=0.1, low=0.0, high=100.0),))
    else:
        chosen = replace(chosen, surrogate=KlCov(share=0.3))
    ready = estimate(chosen, batch).batch
    alone = estimate(chosen, batch.select(OTHERS)).batch
    pick = (lambda one: one.weight) if name == "clip_cov" else (lambda one: one.extra["kl_cov"])
    assert torch.equal(pick(ready)[OTHERS], pick(alone))
    assert pick(ready)[MISSING].unique().tolist() == [1.0 if name == "clip_cov" else 0.0]


def test_the_draws_of_clip_cov_do_not_depend_on_how_far_answers_are_padded() -> None:
    def draw(width: int) -> Tensor:
        answers: Any = SimpleNamespace(size=2, rows=[Row("a", PROMPTS[0], {})], mask=torch.ones(2, width))
        config: Any = SimpleNamespace(seed=0)
        return counted(answers, {"draw"}, config, 1)["draw"]

    assert torch.equal(draw(5)[:, :3], draw(3))
