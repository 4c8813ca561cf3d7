"""Supervised fine-tuning: any split of a step into passes is the same step, stages, resume, epochs, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.sft import train as sft
from genrl.vlm.policies.processor import Prompt, answer_ids
from genrl.vlm.rollout.data import Questions, target_of, tell
from genrl.vlm.tasks import Row
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import vlm_runs
from tests.vlm.by_hand import assert_same, naive_log_probs, watched

TARGET = "<think> i see {answer} </think> <answer> {answer} </answer>"
SFT: dict[str, Any] = {"algorithm": "sft", "target": TARGET, "batch_size": 8}


def test_passes_and_packing_change_nothing_but_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loss is the mean over the tokens of all answers, from whole logits."""
    found = []
    for micro, packing in ((None, False), (3, False), (3, True)):
        config = vlm_runs.config(tmp_path, trainer=SFT | {"micro_batch": micro}, vlm={"packing": packing})
        with vlm_runs.opened(config) as run:
            run.enter()
            seen = watched(run, monkeypatch)
            found.append((sft.update(run, run.settings, list(range(8)))["loss"], seen[0]))
            if len(found) == 1:
                told = tell(run.policy, [run.questions[k] for k in range(8)], TARGET)
                with torch.no_grad():
                    own = torch.cat(naive_log_probs(run.policy, told.prompts, told.tokens, told.mask))
                assert found[0][0] == pytest.approx(-float(own.double().mean()), rel=1e-5)
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert_same(gradient, found[0][1], apart=1e-5)


def test_epochs_are_passes_over_all_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vlm_runs.config(tmp_path, trainer=SFT | {"updates": None}, task={"rows": 20}, iterations=2)
    asked: list[str] = []
    own = Questions.__getitem__

    def noted(self: Questions, number: int) -> Row:
        asked.append(own(self, number).name)
        return own(self, number)

    with vlm_runs.opened(config) as run:
        monkeypatch.setattr(Questions, "__getitem__", noted)
        sft.train(run, run.settings)
        assert run.loop.optimizer_steps == 6, "of 8, 8 and 4 questions"
    assert len(asked) == 40 and len(set(asked[:20])) == len(set(asked[20:])) == 20 and asked[:20] != asked[20:]


STAGES = [
    {"iterations": 2, "trainer": SFT, "optimizer": {"lr": 1e-3, "schedule": "linear"}},
    {"iterations": 1, "task": {"name": "count"}, "optimizer": {"lr": 1e-4}},
    {"iterations": 1, "trainer": {"preset": "dr_grpo"}},
]


def staged(place: Path, **changes: Any) -> VLMConfig:
    place.mkdir(exist_ok=True)
    return vlm_runs.config(place, stages=STAGES, iterations=4, **changes)


def test_stages_have_methods_and_rates_of_their_own(tmp_path: Path) -> None:
    found = rows(train(staged(tmp_path)))
    assert ["target/padding" in row for row in found] == [True, True, False, False]
    assert ["ratio/mean" in row for row in found] == [False, False, True, True]
    assert [row["lr"] for row in found] == pytest.approx([1e-3, 5e-4, 1e-4, 1e-4])


def test_the_optimizer_of_a_stage_begins_anew(tmp_path: Path) -> None:
    with vlm_runs.opened(staged(tmp_path)) as run:
        run.loop.optimizer.state[run.policy.parameters[0]]["step"] = torch.tensor(7.0)
        run.loop.iteration = 1
        run.enter()
        assert run.loop.optimizer.state, "inside of a stage it goes on"
        run.loop.iteration = 2
        run.enter()
        assert not run.loop.optimizer.state and run.config.trainer.preset == "grpo"


class TestTargets:
    def row(self, **columns: Any) -> Row:
        return Row("data.jsonl:3", Prompt(("why ?",)), columns)

    def test_a_column_or_a_text_with_columns(self) -> None:
        assert target_of(self.row(answer=7), "answer") == "7"
        assert target_of(self.row(answer="7", why="3 plus 4"), "{why} so {answer}") == "3 plus 4 so 7"

    @pytest.mark.parametrize("columns", [{}, {"answer": None}, {"answer": " "}])
    def test_a_row_without_an_answer_is_named(self, columns: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="data.jsonl:3: the column 'answer' is to be the answer"):
            target_of(self.row(**columns), "answer")

    def test_tokens_are_those_that_the_sampler_would_choose(self, tmp_path: Path) -> None:
        with vlm_runs.opened(vlm_runs.config(tmp_path)) as run:
            answers, _ = run.draw()
            policy, whole = run.policy, 0
            for text, tokens, kept, number in zip(
                answers.texts, answers.tokens, answers.mask, answers.group.tolist(), strict=True
            ):
                if not bool(answers.cut[whole]):
                    prompt = answers.rows[number].prompt
                    assert answer_ids(prompt, text, policy.processor, policy.stop_ids).tolist() == tokens[kept].tolist()
                    whole += 1
            assert whole > 8
            with pytest.raises(ValueError, match="the answer holds '<image>'"):
                answer_ids(answers.rows[0].prompt, "an <image>", policy.processor, policy.stop_ids)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    grpo = {"preset": "grpo"}
    for stage, text in (
        ({"trainer": {"preset": "dapo", "epochs": 0}}, "stages.0.trainer.epochs"),
        ({"trainer": {"algorithm": "episodes"}}, "stages.0.trainer.algorithm.*learns from episodes"),
    ):
        with pytest.raises(ConfigError, match=text):
            vlm_runs.config(tmp_path, stages=[{"iterations": 1, **stage}])
    for changes, text in (
        ({"generation": {"group_size": 1}, "stages": [{"iterations": 1, "trainer": grpo}]}, "answers of a group"),
        ({"rewards": []}, "answers are worth nothing"),
        ({"vlm": {"packing": True, "prefix_attention": "sdpa"}}, "share no prompts"),
    ):
        with pytest.raises(ConfigError, match=text):
            vlm_runs.config(tmp_path, **changes)


def test_without_rewards_the_loss_is_evaluated_alone(tmp_path: Path) -> None:
    """And falls: what is taught is learnt."""
    config = vlm_runs.config(tmp_path, trainer=SFT, rewards=[], evaluation={"every": 1})
    found = rows(train(config))
    assert found[1]["eval/loss"] < found[0]["eval/loss"] and "eval/accuracy_mean" not in found[1]
