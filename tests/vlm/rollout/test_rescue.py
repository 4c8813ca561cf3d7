"""Help with questions that no answer is right to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError
from genrl.vlm.policies.processor import answer_ids
from genrl.vlm.rollout import rescue
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import vlm_runs

TASK = """
from genrl.playground.tasks import shapes

def hard(rng, split):
    question = shapes.either(rng, split)
    right = f"<think> i see {question.answer} </think> <answer> {question.answer} </answer>"
    return question._replace(columns={"weak": "count", "strong": "purple", "shown": right, "wrong": "<answer>"})

def polite(prompts):
    return [float("purple" in prompt) for prompt in prompts]
"""


def config(place: Path, reward: str, **changes: Any) -> Any:
    """A run whose own answers are never right."""
    (place / "hard.py").write_text(TASK)
    rewards = [{"name": reward.format(place)}, {"name": "tag_format", "weight": 0.2}]
    return vlm_runs.config(place, task={"name": f"{place / 'hard.py'}:hard"}, rewards=rewards, **changes)


def test_the_least_hint_that_helps(tmp_path: Path) -> None:
    """It is trained under the question with the hint, which the model sampled it under: its ratio is 1."""
    settings = {"hints": ["weak", "strong"], "warmup": 1}
    wanted = config(tmp_path, "{}/hard.py:polite", rescue=settings, iterations=2, evaluation={"every": 0})
    with vlm_runs.opened(wanted) as run:
        _, before = run.draw()
        assert "rescue/failed" not in before  # as long as the warm-up lasts
        run.loop.iteration = 1
        answers, row = run.draw()
        assert (row["rescue/failed"], row["rescue/rescued"], row["rescue/level"]) == (1.0, 1.0, 2.0)
        assert [*answers.rescued] == [0, 4, 8, 12] and answers.scores["polite"].tolist() == 4 * [1.0, 0.0, 0.0, 0.0]
        prompts, of_row = answers.asked
        assert of_row.tolist() == [4, 0, 0, 0, 5, 1, 1, 1, 6, 2, 2, 2, 7, 3, 3, 3] and not answers.unsampled.any()
        texts = [run.policy.tokenizer.decode(prompts[k].tokens.ids) for k in (0, 4)]
        assert "purple" in texts[1] and "purple" not in texts[0]
        part = answers.chosen([2, 0])
        assert [*part.rescued] == [0, 4] and part.asked[0][2:] == [prompts[6], prompts[4]]
        ready = run.estimate(answers)
        assert ready is not None and ready.batch.sampler_log_prob is not None
        # as it was sampled, so it is replayed
        torch.testing.assert_close(ready.batch.old_log_prob, ready.batch.sampler_log_prob, atol=1e-5, rtol=0)
    row = rows(train(wanted.model_copy(update={"output": str(tmp_path / "whole")})))[-1]
    assert row["ratio/max"] == 1.0 and row["rescue/rescued"] == 1.0


def test_a_demonstration_is_trained_without_ratio(tmp_path: Path) -> None:
    wanted = config(tmp_path, "exact", rescue={"demonstration": "shown", "warmup": 0}, evaluation={"right_at": 1.0})
    with vlm_runs.opened(wanted) as run:
        answers, row = run.draw()
        failed = [k for k in range(4) if 4 * k in answers.rescued]
        assert failed and row["rescue/failed"] == len(failed) / 4 and row["rescue/rescued"] == 1.0
        for k in failed:
            question, mask = answers.rows[k], answers.mask[4 * k]
            tokens = answer_ids(question.prompt, question.columns["shown"], run.policy.processor, run.policy.stop_ids)
            assert answers.tokens[4 * k][mask].tolist() == tokens.tolist() and answers.unsampled[4 * k]
            assert answers.scores["exact"][4 * k : 4 * k + 4].tolist() == [1.0, 0.0, 0.0, 0.0]
        ready = run.estimate(answers)
        assert ready is not None and ready.batch.extra["unsampled"].tolist() == answers.unsampled.tolist()


def test_a_demonstration_that_is_not_right_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with vlm_runs.opened(config(tmp_path, "exact", rescue={"demonstration": "wrong", "warmup": 0})) as run:
        answers, row = run.draw()
        assert not answers.rescued and row["rescue/rescued"] == 0.0
        assert "does not call the wrong right" in caplog.text
        with pytest.raises(ValueError, match="hard/train/.*: rescue.hints reads the text in 'none'"):
            rescue.hinted(run.config.rescue.model_copy(update={"hints": ("none",)}), answers.rows, 0)


def test_what_cannot_be_rescued(tmp_path: Path) -> None:
    for changes, words in (
        ({"rescue": {"hints": ["a"], "demonstration": "b"}}, "write one of them"),
        ({"rescue": {"hints": ["a"], "prompt": "{question}"}}, "places {question} and {hint}"),
        ({"rescue": {"demonstration": "a", "plain": True}}, "in any case"),
        ({"rescue": {"hints": ["a"]}, "trainer": {"preset": "vppo"}}, "of the question alone"),
        ({"rescue": {"hints": ["a"]}, "trainer": {"preset": "gspo"}}, "a loss of its own tokens"),
        ({"rescue": {"hints": ["a"]}, "trainer": {"algorithm": "rlfr"}}, "the model's own answers alone"),
        ({"rescue": {"hints": ["a"]}, "augmentation": {}}, "leave out one"),
    ):
        with pytest.raises(ConfigError, match=words):
            vlm_runs.config(tmp_path, **changes)
