"""Packed rows: the log-probabilities and gradients of padded ones, and models that cannot are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.packing import check_packing, prefix_shared
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt
from tests.vlm import tiny_checkpoints
from tests.vlm.tiers import fast_first


def pictured(width: int, height: int, text: str) -> Prompt:
    generator = torch.Generator().manual_seed(width)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Prompt((Image.fromarray(pixels.numpy()), text))


PACKED = [family for family in tiny_checkpoints.FAMILIES if family != "gemma3"]


@pytest.mark.parametrize("family", fast_first(PACKED, ("qwen2_5_vl", "llava_onevision")))
def test_log_probs_and_gradients_are_those_of_padded_rows(family: str, tmp_path: Path) -> None:
    policy = Policy(str(tiny_checkpoints.save(family, tmp_path)))
    torch.manual_seed(0)
    for parameter in policy.parameters:
        if parameter.dim() > 1:  # larger weights: attention to a wrong token shows
            torch.nn.init.normal_(parameter, std=0.1)
    check_packing(policy)
    prompts = [
        policy.encode(pictured(56, 84, "How many?")),
        policy.encode(Prompt(("No picture here.",))),
        policy.encode(pictured(112, 56, "Which of the two, and why?")),
    ]
    tokens, mask = torch.randint(5, 30, (4, 6)), torch.ones(4, 6).tril(2)
    group = torch.tensor([2, 0, 0, 1])
    found = []
    for packing in (False, True):
        policy.packing = packing
        replay = policy.log_probs(prompts, tokens, mask, group=group, entropy=True, share_prefix=False)
        gradients = torch.autograd.grad(replay.log_prob.sum(), policy.parameters, allow_unused=True)
        found.append((replay, gradients))
    (padded, of_padded), (packed, of_packed) = found
    assert packed.positions < padded.positions
    there = sum(prompts[g].length + int(n) - 1 for g, n in zip(group.tolist(), mask.sum(1), strict=True))
    assert packed.positions == there, "no padding"
    torch.testing.assert_close(packed.log_prob, padded.log_prob, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(packed.entropy, padded.entropy, atol=2e-5, rtol=1e-5)
    scale = max(float(one.abs().max()) for one in of_padded if one is not None)
    for one, other in zip(of_packed, of_padded, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert float((one - other).abs().max()) < 1e-4 * scale


def test_a_model_whose_pictures_attend_in_both_directions_is_refused(tmp_path: Path) -> None:
    policy = Policy(str(tiny_checkpoints.save("gemma3", tmp_path)))
    torch.manual_seed(0)
    for parameter in policy.parameters:
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    with pytest.raises(ValueError, match="vlm.packing: Gemma3ForConditionalGeneration lets packed sequences see each"):
        check_packing(policy)


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
