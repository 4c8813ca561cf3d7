"""RLPR's reward: how likely the right answer is after the model's own reasoning, from whole logits, and after none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genrl.vlm.methods import extras
from genrl.vlm.policies.processor import answer_ids
from genrl.vlm.recipe.shaping import ReferenceProbability
from tests.vlm import vlm_runs
from tests.vlm.by_hand import naive_log_probs
from tests.vlm.rollouts import rollout


def test_it_is_that_of_whole_logits(tmp_path: Path) -> None:
    """A row without a place for the answer has 0; one that says nothing before it has that of no reasoning."""
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer={"preset": "rlpr"})) as run:
        answers, _ = run.draw()
        policy, row = run.policy, answers.rows[0]
        texts = ["<think> i see 3 </think> <answer> 9 </answer>", "<answer> 9 </answer>", "<think> i see 3 </think>"]
        said = [answer_ids(row.prompt, text, policy.processor, policy.stop_ids) for text in texts]
        tokens, mask = torch.zeros_like(answers.tokens), torch.zeros_like(answers.mask)
        for k, ids in enumerate(said):
            tokens[k, : len(ids)], mask[k, : len(ids)] = ids, True
        changed = replace(answers, tokens=tokens, mask=mask)
        parts = list(torch.arange(len(tokens)).split(5))
        found = extras.reference_probability(policy, changed, parts)
        assert found.shape == (len(tokens), 2) and found[2, 0] == 0
        assert found[1, 0] == pytest.approx(float(found[1, 1]), rel=1e-5)
        before = said[0][: said[0].tolist().index(said[1][0])]
        right = answer_ids(row.prompt, f"<answer> {row.columns['answer']} </answer>", policy.processor, policy.stop_ids)
        whole = torch.cat([before, right])
        with torch.no_grad():
            (own,) = naive_log_probs(policy, answers.prompts[:1], whole[None], torch.ones(1, len(whole)).bool())
        between = own[len(before) + 1 : len(before) + 1 + len(right) - 3]  # neither the tags nor the end
        assert found[0, 0] == pytest.approx(float(between.exp().mean()), rel=1e-4)
        sizes = found[:, 1].view(len(answers.rows), -1)
        assert (sizes == sizes[:, :1]).all(), (
            "what a question's answer is worth without reasoning, for all of its group"
        )


def test_what_reasoning_gains_is_paid_and_what_it_loses_is_not_taken() -> None:
    batch = rollout()
    likely = torch.tensor([[0.9, 0.5], [0.2, 0.5]] * (len(batch.mask) // 2), dtype=torch.float64)
    batch = replace(batch, extra={**batch.extra, "reference_probability": likely})
    torch.testing.assert_close(ReferenceProbability().reward(batch)[:2], torch.tensor([0.36, 0.0], dtype=torch.float64))
