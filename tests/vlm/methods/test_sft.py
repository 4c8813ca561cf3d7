"""Supervised fine-tuning: any split of a step into passes is the same step, stages, resume, epochs, what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from genrl.config import load
from genrl.objectives.preferences import marked_loss, pair_loss
from genrl.playground.tasks.pairs import write_pairs
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.sft import train as sft
from genrl.vlm.policies.processor import Prompt, answer_ids
from genrl.vlm.rollout.data import Questions, target_of, tell
from genrl.vlm.run import AnswersRun
from genrl.vlm.tasks import Row
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import tiny_checkpoints, vlm_runs
from tests.vlm.by_hand import assert_same, naive_log_probs, watched

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "vlm"
TARGET = "<think> i see {answer} </think> <answer> {answer} </answer>"
SFT: dict[str, Any] = {"algorithm": "sft", "target": TARGET, "batch_size": 8}


def test_passes_and_packing_change_nothing_but_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loss is the mean over the tokens of all answers, from whole logits."""
    result = []
    for micro, packing in ((None, False), (3, False), (3, True)):
        config = vlm_runs.config(tmp_path, trainer=SFT | {"micro_batch": micro}, vlm={"packing": packing})
        with vlm_runs.opened(config) as run:
            run.enter()
            seen = watched(run, monkeypatch)
            result.append((sft.update(run, run.settings, list(range(8)))["loss"], seen[0]))
            if len(result) == 1:
                lessons = tell(run.policy, [run.questions[k] for k in range(8)], TARGET)
                with torch.no_grad():
                    own = torch.cat(naive_log_probs(run.policy, lessons.prompts, lessons.tokens, lessons.mask))
                assert result[0][0] == pytest.approx(-float(own.double().mean()), rel=1e-5)
    for loss, gradient in result[1:]:
        assert loss == pytest.approx(result[0][0], rel=1e-6)
        assert_same(gradient, result[0][1], apart=1e-5)


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
    result = rows(train(staged(tmp_path)))
    assert ["target/padding" in row for row in result] == [True, True, False, False]
    assert ["ratio/mean" in row for row in result] == [False, False, True, True]
    assert [row["lr"] for row in result] == pytest.approx([1e-3, 5e-4, 1e-4, 1e-4])


def test_the_optimizer_of_a_stage_begins_anew(tmp_path: Path) -> None:
    with vlm_runs.opened(staged(tmp_path)) as run:
        run.loop.optimizer.state[run.policy.parameters[0]]["step"] = torch.tensor(7.0)
        run.loop.iteration = 1
        run.enter()
        assert run.loop.optimizer.state, "inside of a stage it goes on"
        run.loop.iteration = 2
        run.enter()
        assert not run.loop.optimizer.state and run.config.trainer.preset == "grpo"
        assert run.questions[0].name.startswith("count/")


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


def test_without_rewards_the_loss_is_evaluated_alone(tmp_path: Path) -> None:
    config = vlm_runs.config(tmp_path, trainer=SFT, rewards=[], evaluation={"every": 1})
    result = rows(train(config))
    assert result[1]["eval/loss"] < result[0]["eval/loss"] and "eval/accuracy_mean" not in result[1]


# -- Preferences among given answers: a step by hand, equal pairs, KTO's baseline, what data are refused, a whole run
TASK = {"name": f"{CONFIGS / 'preference_pairs.py'}:pairs"}
PREFERRED = "<answer> {answer} </answer>"
DPO: dict[str, Any] = {
    "algorithm": "sft", "target": PREFERRED, "batch_size": 4,
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
            lessons = tell(run.policy, [run.questions[k] for k in range(4)], *run.settings.targets)
            h = gains(run, [*lessons.prompts, *lessons.prompts], lessons.tokens, lessons.mask)
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
        lessons = tell(run.policy, questions, run.settings.target)
        z = gains(run, lessons.prompts, lessons.tokens.roll(1, 0), lessons.mask.roll(1, 0)).mean().clamp(min=0)
        good = torch.tensor([row.columns["label"] for row in questions])
        result = marked_loss(gains(run, lessons.prompts, lessons.tokens, lessons.mask), good, z, beta=0.1).loss
        figures = sft.update(run, run.settings, list(range(4)))
        assert figures["preference/baseline"] == pytest.approx(float(z), abs=1e-4)
        assert figures["loss"] == pytest.approx(float((result * torch.where(good, 1.0, 1.25)).mean()), rel=1e-4)
        for number in range(4):  # a single question has no other one's answer
            assert sft.update(run, run.settings, [number])["preference/baseline"] == 0


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
    counted = sft.survey(config.trainer, Questions(config, "train"))
    assert counted == "2 pairs, and 1 of equal answers, which are left out"
    marked = of_file(tmp_path, PAIR | {"label": True}, PAIR | {"label": "False"}, PAIR | {"label": 0}, loss="kto")
    assert sft.survey(marked.trainer, Questions(marked, "train")) == "1 good answers and 2 bad ones"
    for lines, loss, text in (
        ((PAIR, {"chosen": "2"}, PAIR | {"rejected": " "}), "ipo", r"2 of 3 rows are no pairs; .*:2: .*'rejected'"),
        ((PAIR, PAIR | {"rejected": {"a": 1}}), "ipo", r"1 of 2 rows are no pairs; .*jsonl:2: .*'rejected'"),
        ((equal, equal), "ipo", "none of 2 rows has two different answers"),
        ((PAIR | {"label": True}, PAIR | {"label": "good"}), "kto", r"1 of 2 rows are no marked answers; .*'good'"),
        ((PAIR | {"label": False},), "kto", "none of 1 rows has a good answer"),
    ):
        wrong = of_file(tmp_path, *lines, loss=loss)
        with pytest.raises(ValueError, match=text):
            sft.check(wrong, None)  # type: ignore[arg-type]


def test_equal_pairs_are_left_out_of_a_step(tmp_path: Path) -> None:
    config = of_file(tmp_path, PAIR, PAIR | {"rejected": "2"}, SAID, PAIR, loss="sppo_hard", beta=0.5)
    with vlm_runs.opened(config) as run:
        run.enter()
        figures = sft.update(run, run.settings, list(range(4)))
    assert figures["preference/equal"] == 0.25
    assert figures["loss"] == pytest.approx(2.0, rel=1e-4)  # (1 / (2 beta))^2, twice, of a model that has not moved


def test_a_run_learns_its_pairs(tmp_path: Path) -> None:
    config = vlm_runs.config(tmp_path, task=TASK, trainer=DPO | {"batch_size": 16}, rewards=[], iterations=6,
                             optimizer={"lr": 1e-4}, evaluation={"every": 6, "questions": 32})  # fmt: skip
    result = rows(train(config))
    trained = [row for row in result if "loss" in row]
    assert trained[0]["loss"] == pytest.approx(math.log(2), rel=1e-3) and trained[-1]["loss"] < trained[0]["loss"]
    evaluated = [row["eval/preference_right"] for row in result if "eval/preference_right" in row]
    assert evaluated[0] == 0.5 and evaluated[-1] > 0.5


# -- PaCo-Reward: the weight of the first token, and the recipe in tiny form on pairs of a user's own grids
def test_the_first_token_has_its_share() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    weights = sft.token_weights(mask, 0.1)
    assert weights[0].tolist() == pytest.approx([0.5, *[4.5 / 4] * 4])
    assert weights[1, :2].tolist() == pytest.approx([0.2, 1.8]) and weights[2, 0] == 1
    assert (weights * mask).sum(1).tolist() == pytest.approx([5, 2, 1]), "so many tokens as there are"


def test_the_loss_is_the_weighted_mean_over_the_tokens_of_all_answers(tmp_path: Path) -> None:
    trainer: dict[str, Any] = {"algorithm": "sft", "target": "{answer} i see {answer}", "batch_size": 4}
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer=trainer | {"first_token_share": 0.3})) as run:
        run.enter()
        lessons = tell(run.policy, [run.questions[k] for k in range(4)], run.settings.target)
        tokens = int(lessons.mask.sum())
        actual = sft.loss(run.settings, run.policy, sft.recorded(lessons, torch.arange(4), tokens=tokens))
        expected = 0.0
        for row, kept in zip(-actual["log_prob"].detach(), lessons.mask, strict=True):
            nats = row[kept]
            expected += len(nats) * float(0.3 * nats[0] + 0.7 * nats[1:].mean()) / tokens
    assert float(actual["loss"].detach()) == pytest.approx(expected, rel=1e-5)


def grids(place: Path) -> Path:
    """Six grids of four cells of one colour each, in three sets."""
    place.mkdir()
    lines = []
    for number in range(6):
        Image.new("RGB", (56, 56), (40 * number, 80, 200)).save(place / f"{number}.png")
        row = {"image": f"{number}.png", "grid": "2x2", "prompt": f"colour {number}", "set": number // 2}
        lines.append(json.dumps(row))
    (place / "grids.jsonl").write_text("\n".join(lines) + "\n")
    return place / "grids.jsonl"


def test_pairs_of_grids_are_right_and_held_out(tmp_path: Path) -> None:
    write_pairs(grids(tmp_path / "grids"), tmp_path / "pairs", 300, held_out=0.3)
    seen = {}
    for name, number in (("train", 210), ("eval", 90)):
        result = [json.loads(line) for line in (tmp_path / "pairs" / f"{name}.jsonl").read_text().splitlines()]
        assert len(result) == number
        for row in result:
            first, second = (Image.open(tmp_path / "pairs" / one) for one in row["image"])
            assert first.size == (28, 28) and row["image"][0] != row["image"][1]
            assert (row["answer"] == "Yes") == (first.getpixel((3, 3)) == second.getpixel((3, 3)))
            assert row["first"] in row["prompt"]
        assert 0.35 < sum(row["answer"] == "Yes" for row in result) / number < 0.65
        seen[name] = {row[side] for row in result for side in ("first", "second")}
    assert len(seen["train"]) == 4 and len(seen["eval"]) == 2 and not seen["train"] & seen["eval"]
    with pytest.raises(ValueError, match="0 grids for eval.jsonl"):
        write_pairs(tmp_path / "grids" / "grids.jsonl", tmp_path / "none", 10, held_out=0.0)


@pytest.mark.slow
def test_the_recipe_trains_an_epoch(tmp_path: Path) -> None:
    write_pairs(grids(tmp_path / "grids"), tmp_path / "pairs", 24, held_out=0.3)
    tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model", layers=2)
    changes = [f"vlm.path={tmp_path / 'model'}", "vlm.dtype=float32", "task.max_pixels=1024", "trackers=[]"]
    changes += [f"task.{split}={tmp_path / 'pairs'}/{split}.jsonl" for split in ("train", "eval")]
    changes += ["trainer.batch_size=8", "trainer.micro_batch=4", "iterations=1", f"output={tmp_path / 'run'}"]
    changes += ["trainer.target='{answer}. {first} and {second}'", "evaluation.questions=4", "evaluation.blind=false"]
    result = rows(train(load(CONFIGS / "paco_reward_7b.yaml", changes)))[-1]
    assert result["updates"] == 3 and result["grad_norm"] > 0 and 0 <= result["eval/accuracy_mean"] <= 1
