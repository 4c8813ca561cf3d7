"""Preferences among given answers: a step by hand, equal pairs, KTO's baseline, what data are refused, a whole run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError
from genrl.objectives.preferences import marked_loss, pair_loss
from genrl.vlm.methods.sft import train as sft
from genrl.vlm.rollout.data import Questions, tell
from genrl.vlm.run import AnswersRun
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import vlm_runs
from tests.vlm.by_hand import assert_same, naive_log_probs, watched

TASK = {"name": str(Path(__file__).resolve().parents[3] / "configs/vlm/preference_pairs.py") + ":pairs"}
TARGET = "<answer> {answer} </answer>"
DPO: dict[str, Any] = {
    "algorithm": "sft", "target": TARGET, "batch_size": 4,
    "preference": {"loss": "sigmoid", "rejected": "<answer> {rejected} </answer>"},
}  # fmt: skip
KTO = DPO | {"target": "<answer> {completion} </answer>", "preference": {"loss": "kto", "undesirable": 1.25}}


def moved(run: AnswersRun) -> None:
    """Let the policy be another one than before training."""
    torch.manual_seed(0)
    for parameter in run.policy.parameters:
        parameter.data.add_(0.02 * torch.randn_like(parameter))


def gains(run: AnswersRun, prompts: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """h of each answer, from whole logits."""
    assert run.reference is not None
    with torch.no_grad():
        new, old = (naive_log_probs(one, prompts, tokens, mask) for one in (run.policy, run.reference))
    return torch.stack([a.sum() - b.sum() for a, b in zip(new, old, strict=True)])


def test_a_step_is_that_of_its_pairs_however_it_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for micro in (None, 3):
        config = vlm_runs.config(tmp_path, task=TASK, trainer=DPO | {"micro_batch": micro})
        with vlm_runs.opened(config) as run:
            run.enter()
            moved(run)
            told = tell(run.policy, [run.questions[k] for k in range(4)], *run.settings.targets)
            h = gains(run, [*told.prompts, *told.prompts], told.tokens, told.mask)
            want = pair_loss("sigmoid", h[:4], h[4:], beta=0.1)
            gradients = watched(run, monkeypatch)
            figures = sft.update(run, run.settings, list(range(4)))
            seen.append((figures["loss"], gradients[0]))
            assert figures["loss"] == pytest.approx(float(want.loss.mean()), rel=1e-4)
            assert figures["preference/right"] == pytest.approx(float(want.correct.float().mean()))
            assert figures["preference/margin"] == pytest.approx(float(want.logit.mean()), abs=1e-4)
    assert seen[1][0] == pytest.approx(seen[0][0], rel=1e-6)
    assert_same(seen[1][1], seen[0][1], apart=1e-5)


def test_kto_compares_with_answers_to_other_questions(tmp_path: Path) -> None:
    with vlm_runs.opened(vlm_runs.config(tmp_path, task=TASK, trainer=KTO)) as run:
        run.enter()
        moved(run)
        questions = [run.questions[k] for k in range(4)]
        told = tell(run.policy, questions, run.settings.target)
        z = gains(run, told.prompts, told.tokens.roll(1, 0), told.mask.roll(1, 0)).mean().clamp(min=0)
        good = torch.tensor([row.columns["label"] for row in questions])
        found = marked_loss(gains(run, told.prompts, told.tokens, told.mask), good, z, beta=0.1).loss
        figures = sft.update(run, run.settings, list(range(4)))
        assert figures["preference/baseline"] == pytest.approx(float(z), abs=1e-4)
        assert figures["loss"] == pytest.approx(float((found * torch.where(good, 1.0, 1.25)).mean()), rel=1e-4)


def written(folder: Path, *lines: dict[str, Any]) -> str:
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps({'prompt': 'how many ?', **one})}\n" for one in lines))
    return str(folder / "pairs.jsonl")


PAIR = {"chosen": "2", "rejected": "3"}
SAID = {"chosen": [{"role": "assistant", "content": "2"}], "rejected": [{"role": "assistant", "content": "1"}]}


def of_file(folder: Path, *lines: dict[str, Any], **preference: Any) -> Any:
    task = {"name": None, "train": written(folder, *lines), "image": None}
    trainer = {"algorithm": "sft", "target": "chosen", "batch_size": 4, "preference": preference}
    return vlm_runs.config(folder, task=task, trainer=trainer, rewards=[])


def test_rows_are_counted_and_the_first_wrong_one_is_named(tmp_path: Path) -> None:
    equal = PAIR | {"rejected": "2"}
    config = of_file(tmp_path, PAIR, SAID, equal, loss="ipo")
    told = sft.survey(config.trainer, Questions(config, "train"))
    assert told == "2 pairs, and 1 of equal answers, which are left out"
    marked = of_file(tmp_path, PAIR | {"label": True}, PAIR | {"label": "False"}, PAIR | {"label": 0}, loss="kto")
    assert sft.survey(marked.trainer, Questions(marked, "train")) == "1 good answers and 2 bad ones"
    for lines, loss, text in (
        (
            (PAIR, {"chosen": "2"}, PAIR | {"rejected": " "}),
            "ipo",
            r"2 of 3 rows are no pairs; .*jsonl:2: .*'rejected'",
        ),
        ((PAIR, PAIR | {"rejected": {"a": 1}}), "ipo", r"1 of 2 rows are no pairs; .*jsonl:2: .*'rejected'"),
        ((equal, equal), "ipo", "none of 2 rows has two different answers"),
        ((PAIR | {"label": True}, PAIR | {"label": "good"}), "kto", r"1 of 2 rows are no marked answers; .*'good'"),
        ((PAIR | {"label": False},), "kto", "none of 1 rows has a good answer"),
    ):
        wrong = of_file(tmp_path, *lines, loss=loss)
        with pytest.raises(ValueError, match=text):
            sft.check(wrong, None)  # type: ignore[arg-type]


def test_equal_pairs_are_left_out_of_a_step(tmp_path: Path) -> None:
    """The mean is over the others, whatever the loss would have made of them."""
    config = of_file(tmp_path, PAIR, PAIR | {"rejected": "2"}, SAID, PAIR, loss="sppo_hard", beta=0.5)
    with vlm_runs.opened(config) as run:
        run.enter()
        figures = sft.update(run, run.settings, list(range(4)))
    assert figures["preference/equal"] == 0.25
    assert figures["loss"] == pytest.approx(2.0, rel=1e-4)  # (1 / (2 beta))^2, twice, of a model that has not moved


def test_a_run_learns_its_pairs(tmp_path: Path) -> None:
    """From log 2 downwards, and more of the held-out pairs are in order."""
    config = vlm_runs.config(tmp_path, task=TASK, trainer=DPO | {"batch_size": 16}, rewards=[], iterations=6,
                             optimizer={"lr": 1e-4}, evaluation={"every": 6, "questions": 32})  # fmt: skip
    found = rows(train(config))
    trained = [row for row in found if "loss" in row]
    assert trained[0]["loss"] == pytest.approx(math.log(2), rel=1e-3) and trained[-1]["loss"] < trained[0]["loss"]
    evaluated = [row["eval/preference_right"] for row in found if "eval/preference_right" in row]
    assert evaluated[0] == 0.5 and evaluated[-1] > 0.5


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    for trainer, text in (
        ({"preference": {"loss": "ipo", "smoothing": 0.1}}, "ipo has none"),
        ({"preference": {"loss": "robust", "smoothing": 0.5}}, "say nothing"),
        ({"preference": {"loss": "orpo"}}, "write 1"),
        ({"batch_size": 2, "preference": {"loss": "kto"}}, "write 4 or more"),
        ({"first_token_share": 0.1}, "likelihood of answers"),
    ):
        with pytest.raises(ConfigError, match=text):
            vlm_runs.config(tmp_path, task=TASK, trainer=DPO | trainer)
