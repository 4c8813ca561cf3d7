"""Answers that attend to one copy of their prompts: the log-probabilities and gradients of a repeated cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.packing import prefix_shared
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt
from tests.vlm import tiny_checkpoints

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "llava")


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_repeated_cache(tmp_path: Path, family: str, backend: str) -> None:
    policy = Policy(str(tiny_checkpoints.save(family, tmp_path)), lora=VLMLoRA(rank=2))
    torch.manual_seed(0)
    for parameter in policy.parameters:
        torch.nn.init.normal_(parameter, std=0.05)
    prompts = [policy.encode(Prompt((text,))) for text in ("No picture.", "Two dots, or three?", "Why")]
    tokens = torch.randint(5, 30, (5, 6))
    mask = torch.ones(5, 6).tril(3)
    found = []
    for way in (None, backend):
        policy.prefix_attention = way
        replay = policy.log_probs(prompts, tokens, mask, group=torch.tensor([2, 0, 0, 2, 1]))
        found.append((replay.log_prob, torch.autograd.grad(replay.log_prob.sum(), policy.parameters)))
    with torch.no_grad():  # as old log-probabilities are computed
        again = policy.log_probs(prompts, tokens, mask, group=torch.tensor([2, 0, 0, 2, 1])).log_prob
    (plain, of_plain), (shared, of_shared) = found
    assert torch.equal(again, shared.detach())
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)
    assert float(plain.detach().abs().max()) > 1.0
    for one, other in zip(of_shared, of_plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_the_model_is_as_before_afterwards_and_partial_layers_are_refused(tmp_path: Path) -> None:
    policy = Policy(str(tiny_checkpoints.save("llava", tmp_path)))
    text = policy.model.config.get_text_config()
    before = text._attn_implementation
    with prefix_shared(policy.model, None, torch.ones(1, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)):
        assert text._attn_implementation == "genrl_prefix"
    assert text._attn_implementation == before
    text.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="has layers of sliding_attention"):
        with prefix_shared(policy.model, None, torch.ones(1, 3), torch.zeros(2)):
            pass
