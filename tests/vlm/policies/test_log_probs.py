"""Log-probabilities without the logits: equal to the naive ones in value and gradient, in far less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.log_probs import completion_log_probs
from genrl.vlm.policies.packing import check_packing, prefix_shared
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt
from tests.run_folders import tiered
from tests.vlm import tiny_checkpoints

FORBIDDEN = torch.tensor([3, 11])


def naive(
    hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None, temperature: float, forbidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if forbidden is not None:
        logits = logits.index_fill(-1, forbidden, -1e30)
    rows = (logits / temperature).log_softmax(-1)
    entropy = -(rows.exp() * rows).sum(-1)
    return rows.gather(-1, tokens[..., None])[..., 0], entropy


def inputs(seed: int, rows: int, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": dtype}
    allowed = torch.tensor([token for token in range(17) if token not in FORBIDDEN])
    return {
        "hidden": torch.randn(rows, length, 5, **draw).requires_grad_(),
        "weight": torch.randn(17, 5, **draw).requires_grad_(),
        "bias": torch.randn(17, **draw).requires_grad_(),
        "tokens": allowed[torch.randint(len(allowed), (rows, length), generator=generator)],
        "mask": torch.rand(rows, length, generator=generator) < 0.7,
        "upstream": torch.randn(rows, length, **draw),
    }


@given(
    *(st.integers(0, 99), st.integers(1, 3), st.integers(1, 6), st.integers(1, 9)),
    *(st.sampled_from([0.5, 1.0, 1.3]), st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_value_and_gradient_equal_the_naive_ones(
    seed: int, rows: int, length: int, chunk: int, temperature: float, biased: bool, blocked: bool, entropy: bool
) -> None:
    data = inputs(seed, rows, length, torch.float64)
    bias, forbidden = data["bias"] if biased else None, FORBIDDEN if blocked else None
    leaves = [data["hidden"], data["weight"], *([data["bias"]] if biased else [])]
    arguments = (data["hidden"], data["weight"], data["tokens"])
    options = {"bias": bias, "temperature": temperature, "forbidden": forbidden}
    ours = completion_log_probs(*arguments, mask=data["mask"], entropy=entropy, chunk=chunk, **options)
    want, want_entropy = naive(*arguments, **options)
    want = torch.where(data["mask"], want, 0.0)
    assert torch.allclose(ours.log_prob, want, rtol=1e-10, atol=1e-12)
    want_entropy = torch.where(data["mask"], want_entropy, 0.0)
    # of log-probabilities, entropies, and both; with respect to forbidden rows of the output layer it is 0
    scores = [(ours.log_prob, want)]
    if entropy:
        assert ours.entropy is not None and torch.allclose(ours.entropy, want_entropy, rtol=1e-10, atol=1e-12)
        scores += [(ours.entropy, want_entropy), (ours.log_prob - 2 * ours.entropy, want - 2 * want_entropy)]
    else:
        assert ours.entropy is None
    for mine, theirs in scores:
        got = torch.autograd.grad((mine * data["upstream"]).sum(), leaves, retain_graph=True)
        expected = torch.autograd.grad((theirs * data["upstream"]).sum(), leaves, retain_graph=True)
        for one, other in zip(got, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def test_bfloat16_states_give_float32_log_probabilities() -> None:
    data = inputs(1, 3, 7, torch.bfloat16)
    ours = completion_log_probs(data["hidden"], data["weight"], data["tokens"], chunk=4).log_prob
    logits = (data["hidden"] @ data["weight"].T).float()
    want = logits.log_softmax(-1).gather(-1, data["tokens"][..., None])[..., 0]
    assert ours.dtype == torch.float32 and torch.allclose(ours, want, atol=1e-6)
    assert not torch.equal(ours, ours.bfloat16().float())  # not rounded to 8 bits on the way
    ours.sum().backward()
    assert data["hidden"].grad.dtype == torch.bfloat16


def test_masked_states_may_hold_anything() -> None:
    data = inputs(2, 3, 7, torch.float64)
    with torch.no_grad():
        data["hidden"][~data["mask"]] = torch.nan
    ours = completion_log_probs(data["hidden"], data["weight"], data["tokens"], mask=data["mask"], chunk=2).log_prob
    ours.sum().backward()
    assert bool((ours[~data["mask"]] == 0).all()) and bool((ours[data["mask"]] < 0).all())
    assert bool(data["weight"].grad.isfinite().all())
    assert bool((data["hidden"].grad[~data["mask"]] == 0).all())


def test_errors_say_what_to_do() -> None:
    data = inputs(4, 2, 3, torch.float32)
    arguments = (data["hidden"], data["weight"], data["tokens"])
    with pytest.raises(ValueError, match="must be positive, got 0"):
        completion_log_probs(*arguments, temperature=0.0)
    with pytest.raises(ValueError, match="the sampler must suppress the same ids"):
        completion_log_probs(*arguments, forbidden=data["tokens"][0, :1])
    with pytest.raises(ValueError, match="one state per token"):
        completion_log_probs(data["hidden"][:, 1:], data["weight"], data["tokens"])


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operator gives."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        tensors = [one for one in (result if isinstance(result, tuple | list) else [result]) if isinstance(one, Tensor)]
        self.numbers = max([self.numbers, *(one.numel() for one in tensors)])
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_the_logits_are_never_whole(entropy: bool) -> None:
    """Of 64 tokens and 4,000 words, 16 tokens at a time; the weight's gradient is 4,000 by 4."""
    hidden, weight = torch.randn(1, 64, 4, requires_grad=True), torch.randn(4000, 4, requires_grad=True)
    with Largest() as seen:
        result = completion_log_probs(hidden, weight, torch.randint(4000, (1, 64)), entropy=entropy, chunk=16)
        result.log_prob.sum().backward()
    assert seen.numbers <= 16 * 4000


# -- Packed rows: the log-probabilities and gradients of padded ones, and models that cannot are refused by name
def pictured(width: int, height: int, text: str) -> Prompt:
    generator = torch.Generator().manual_seed(width)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Prompt((Image.fromarray(pixels.numpy()), text))


def loud(family: str, place: Path) -> Policy:
    """A policy with larger weights, so that attention to a wrong token shows."""
    policy = Policy(str(tiny_checkpoints.save(family, place)))
    torch.manual_seed(0)
    for parameter in policy.parameters:
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


PACKED = [family for family in tiny_checkpoints.FAMILIES if family != "gemma3"]


@pytest.mark.parametrize("family", tiered(PACKED, ("qwen2_5_vl", "llava_onevision")))
def test_log_probs_and_gradients_are_those_of_padded_rows(family: str, tmp_path: Path) -> None:
    policy = loud(family, tmp_path)
    check_packing(policy)
    prompts = [
        policy.encode(pictured(56, 84, "How many?")),
        policy.encode(Prompt(("No picture here.",))),
        policy.encode(pictured(112, 56, "Which of the two, and why?")),
    ]
    tokens, mask = torch.randint(5, 30, (4, 6)), torch.ones(4, 6).tril(2)
    group = torch.tensor([2, 0, 0, 1])
    result = []
    for packing in (False, True):
        policy.packing = packing
        replay = policy.log_probs(prompts, tokens, mask, group=group, entropy=True, share_prefix=False)
        gradients = torch.autograd.grad(replay.log_prob.sum(), policy.parameters, allow_unused=True)
        result.append((replay, gradients))
    (padded, of_padded), (packed, of_packed) = result
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
    with pytest.raises(ValueError, match="vlm.packing: Gemma3ForConditionalGeneration lets packed sequences see each"):
        check_packing(loud("gemma3", tmp_path))


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
    result = []
    for way in (None, backend):
        policy.prefix_attention = way
        replay = policy.log_probs(prompts, tokens, mask, group=torch.tensor([2, 0, 0, 2, 1]))
        result.append((replay.log_prob, torch.autograd.grad(replay.log_prob.sum(), policy.parameters)))
    with torch.no_grad():  # as old log-probabilities are computed
        again = policy.log_probs(prompts, tokens, mask, group=torch.tensor([2, 0, 0, 2, 1])).log_prob
    (plain, of_plain), (shared, of_shared) = result
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
