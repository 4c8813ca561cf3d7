"""On-policy distillation of language models: who reads what, what is learnt, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genrl.config import ConfigError
from genrl.objectives.tokens.token_distillation import generalised_divergence
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.answers import train as answering
from genrl.vlm.methods.opd.teaching import Teachers, divergence
from genrl.vlm.methods.opd.train import loss, taught
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import vlm_runs

TOLD = "{question} i see {answer} ."


def config(place: Path, changes: dict[str, Any] | None = None, **more: Any) -> VLMConfig:
    return vlm_runs.config(place, trainer={"algorithm": "opd", "preset": "dapo", **(changes or {})}, **more)


def test_a_model_that_teaches_itself_has_nothing_to_say(tmp_path: Path) -> None:
    for estimator in ("sampled", "distribution"):
        own = {"output": str(tmp_path / estimator)}
        (row,) = rows(train(config(tmp_path, {"estimator": estimator, "top": None}, **own)))
        assert abs(row["teacher/gap"]) < 1e-6 and abs(row["loss"]) < 1e-6 and row["grad_norm"] < 1e-4


def test_each_question_has_its_own_teacher_and_comes_nearer_to_it(tmp_path: Path) -> None:
    teachers = [{"name": "red", "prompt": TOLD}, {"name": "other", "path": str(vlm_runs.MODEL)}]
    changes = {"teachers": teachers, "route": "whose", "estimator": "distribution", "top": 6, "epochs": 8}
    settings = config(tmp_path, changes, optimizer={"lr": 3e-4})
    method: Any = settings.trainer
    with vlm_runs.opened(settings) as run:
        answers, _ = run.draw()
        for number, row in enumerate(answers.rows):
            row.columns["whose"] = ("red", "other")[number % 2]
        ready = run.estimate(answers)
        assert ready is not None
        teaching = Teachers(run, method)
        assert set(run.loop.memory["teachers"]) == {"red", "other"}
        found, figures = taught(run, method, teaching, answers, ready)
        batch = found.batch
        assert batch.old_log_prob is not None and bool((batch.advantage == 0).all())
        ids, said = batch.extra["teacher_ids"], batch.extra["teacher_rows"]
        mask, other = answers.mask.bool(), answers.group % 2 == 1
        # the second teacher is the model itself: its rows are the student's own, and at no distance
        options = {"group": answers.group, "temperature": 1.0}
        now = run.policy.log_probs(answers.prompts, answers.tokens, answers.mask, **options)
        far = divergence(method, run.policy, now.states, answers.mask, ids, said, 1.0)
        assert float(far[other].abs().max()) < 1e-6 < float(far[~other].max())
        # of the first, the distance by six tokens and the rest is no more than that by all
        head = run.policy.model.get_output_embeddings()
        mine = head(now.states).index_fill(-1, run.policy.forbidden, -1e30).log_softmax(-1)
        prompts = teaching.prompts(answers, teaching.names(answers))
        theirs = head(run.policy.log_probs(prompts, answers.tokens, answers.mask, **options).states)
        whole = generalised_divergence(mine, theirs.index_fill(-1, run.policy.forbidden, -1e30).log_softmax(-1), 1.0)
        assert bool((far <= whole + 1e-5)[mask].all()) and float(far[~other].sum() / whole[mask].sum()) > 0.5
        assert figures["teacher/k3"] > 0
        answering.learn(run, answers, found, loss)
        nearer = run.policy.log_probs(answers.prompts, answers.tokens, answers.mask, **options).states
        after = divergence(method, run.policy, nearer, answers.mask, ids, said, 1.0)
        assert float(after[~other].sum()) < 0.9 * float(far[~other].sum())
        run.loop.memory["teachers"]["other"] = "another"
        with pytest.raises(ValueError, match="other: the checkpoint was taught by other weights"):
            Teachers(run, method)
        answers.rows[0].columns["whose"] = "nobody"
        with pytest.raises(ValueError, match="whose: 'nobody', which is none of the teachers red, other"):
            teaching.names(answers)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"teachers": [{"name": "a"}, {"name": "b"}]}, "which of 2 teaches a question"),
        ({"beta": 0.001}, "the distance vanishes"),
        ({"preset": "gspo"}, "takes one advantage per answer"),
        ({"preset": "poad"}, "trainer.preset"),
    ],
)
def test_what_cannot_be_taught_is_said_before(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        config(tmp_path, changes)
