"""Two ways in which training computes nothing twice: sequences packed without padding, and prompts shared by answers.

Packed: prompts with their answers, one after the other in one row. Every sequence has positions of its own, which begin
at 0 again. Where a model is given positions and no attention mask, transformers begins a new sequence at each position
that does not follow the one before, and lets tokens attend to their own sequence alone
(`masking_utils.find_packed_sequence_indices`). Models with M-RoPE read that from a fourth row of positions, those of
the text, before time, height and width.

Shared: answers attend to one copy of their prompt's keys and values (`genrl.kernels.prefix_attention`), in any
transformers language model whose layers attend to everything before them. A cache that is asked to `update` keeps
nothing and returns what is new, and an attention implementation, registered under a name of ours, adds the prompts'.
Values and gradients are those of attention over the repeated cache, within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from genrl.kernels.prefix_attention import PrefixBackend, prefix_attention
from genrl.vlm.policies.processor import Prompt, join_pixels

if TYPE_CHECKING:
    from genrl.vlm.policies.policy import Encoded, Policy

NAME = "genrl_prefix"
WHOLE = (None, "full_attention")


@dataclass(frozen=True)
class Prompts:
    """The prompts' keys and values by layer [N, H', P, D], which tokens are there [N, P], each row's prompt [R]."""

    cache: Any
    mask: Tensor
    row_of: Tensor
    backend: PrefixBackend


_prompts: ContextVar[Prompts] = ContextVar("prompts")


class _Passing(transformers.DynamicCache):
    """Hands every layer its own new keys and values back."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query, key, value [B, heads, T, D] -> [B, T, heads, D]."""
    unknown = [name for name in ("sliding_window", "softcap", "s_aux") if settings.get(name) is not None]
    if unknown:
        raise ValueError(
            f"{type(module).__name__} attends with {unknown[0]}, which shared prefixes do not: turn them off"
        )
    # From the context: transformers hands an attention function its own arguments and no others.
    prompts = _prompts.get()
    layer = prompts.cache.layers[module.layer_idx]
    attended = prefix_attention(
        query,
        key,
        value,
        layer.keys.to(query.dtype),
        layer.values.to(query.dtype),
        row_of=prompts.row_of,
        prefix_mask=prompts.mask,
        scale=settings.get("scaling"),
        backend=prompts.backend,
    )
    return attended.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


@contextmanager
def prefix_shared(
    model: Any, cache: Any, mask: Tensor, row_of: Tensor, backend: PrefixBackend = "sdpa"
) -> Iterator[transformers.Cache]:
    """Within the block, `model` reads on from the prompts in `cache`: call it with the new tokens [R, T], their
    positions, no attention mask, and the cache that is yielded, as `past_key_values`.

    mask bool [N, P]: which tokens of the prompts are there (they are padded on the left). row_of int64 [R]. New tokens
    see all before them in their row, so padding belongs on the right.
    Raises ValueError for a model with layers that do not attend to everything before them.
    """
    text = model.config.get_text_config()
    partial = sorted(set(getattr(text, "layer_types", None) or ()) - set(WHOLE))
    if partial:
        raise ValueError(f"{type(model).__name__} has layers of {partial[0]}: their prefix cannot be shared")
    before, token = text._attn_implementation, _prompts.set(Prompts(cache, mask, row_of, backend))
    # Every layer reads it at every call, so that it can be another one for these calls alone.
    text._attn_implementation = NAME
    try:
        yield _Passing(mask.shape[1])
    finally:
        text._attn_implementation = before
        _prompts.reset(token)


def present(lengths: Tensor) -> Tensor:
    """bool [N, P] of prompts of these lengths, padded on the left to the longest."""
    longest = int(lengths.max())
    return torch.arange(longest, device=lengths.device) >= longest - lengths[:, None]


APART = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative difference of the states of packed and of separate sequences that is rounding."""


def packed_states(policy: Policy, prompts: Sequence[Encoded], tokens: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    """(states [B, T, H] that predict the answers' tokens, positions computed). Answers `tokens` int64 [B, T], row b to
    prompts[b], are read up to the last token of `mask` [B, T]; further states are 0."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in mask]
    # The last token is predicted, and predicts nothing.
    answers = [row[: length - 1].cpu() for row, length in zip(tokens, lengths, strict=True)]
    pairs = list(zip(prompts, answers, strict=True))
    packed = policy.body(**packed_inputs(policy, pairs), use_cache=False).last_hidden_state[0]
    states = packed.new_zeros(*tokens.shape, packed.shape[-1])
    first = 0
    for number, ((prompt, answer), length) in enumerate(zip(pairs, lengths, strict=True)):
        start = first + prompt.length - 1
        states[number, :length] = packed[start : start + length]
        first += prompt.length + len(answer)
    return states, first


def packed_inputs(policy: Policy, pairs: Sequence[tuple[Encoded, Tensor]]) -> dict[str, Tensor]:
    """Arguments of the model for prompts, each with what of its answer int64 [T] is read: input_ids [1, L];
    position_ids [1, L], or [4, 1, L] for M-RoPE; pixels. No attention mask."""

    def positions(prompt: Encoded, answer: Tensor) -> Tensor:
        own = torch.arange(prompt.length + len(answer))
        if prompt.positions.dim() == 1:
            return own
        after = (prompt.next_position + torch.arange(len(answer))).expand(len(prompt.positions), -1)
        return torch.cat([own[None], torch.cat([prompt.positions, after], 1)])

    inputs: dict[str, Any] = {
        "input_ids": torch.cat([part for prompt, answer in pairs for part in (prompt.tokens.ids, answer)])[None],
        "position_ids": torch.cat([positions(*pair) for pair in pairs], -1).unsqueeze(-2),
    }
    for name in {name for prompt, _ in pairs for name in prompt.tokens.kinds}:
        kinds = [
            part
            for prompt, answer in pairs
            for part in (prompt.tokens.kinds.get(name, torch.zeros_like(prompt.tokens.ids)), torch.zeros_like(answer))
        ]
        inputs[name] = torch.cat(kinds)[None]
    inputs |= join_pixels([prompt.tokens for prompt, _ in pairs])
    return {k: v.to(policy.device, policy.dtype if v.is_floating_point() else None) for k, v in inputs.items()}


@torch.no_grad()
def check_packing(policy: Policy) -> None:
    """Raises ValueError for a model whose packed sequences see each other, or whose positions cannot be given: seen by
    two questions about grey pictures, packed and one by one."""
    picture = Image.new("RGB", (64, 64), (90, 120, 60))
    prompts = [policy.encode(Prompt((picture, text))) for text in ("What is it?", "Why is it there, and where?")]
    tokens = torch.tensor([policy.stop_ids[:1]] * 2)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    name = type(policy.model).__name__
    try:
        packed, _ = packed_states(policy, prompts, tokens, valid)
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"vlm.packing: {name} cannot be given packed sequences ({error}); write false") from error
    alone = torch.cat([policy.body(**policy.inputs([p]), use_cache=False).last_hidden_state[:, -1:] for p in prompts])
    apart = float((packed - alone).float().norm() / alone.float().norm())
    if not apart <= APART[policy.dtype]:
        text = f"{name} lets packed sequences see each other (states differ by {apart:.2g}); write false"
        raise ValueError(f"vlm.packing: {text}")
