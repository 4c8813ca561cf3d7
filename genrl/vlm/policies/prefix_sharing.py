"""Answers attend to one copy of their prompt's keys and values (`genrl.kernels.prefix_attention`), in any transformers
language model whose layers attend to everything before them.

A cache that is asked to `update` keeps nothing and returns what is new, and an attention implementation, registered
under a name of ours, adds the prompts'. Nothing is repeated per answer; values and gradients are those of attention
over the repeated cache, within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from genrl.kernels.prefix_attention import PrefixBackend, prefix_attention

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
    prompts = _prompts.get()
    layer = prompts.cache.layers[module.layer_idx]
    found = prefix_attention(
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
    return found.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


@contextmanager
def prefix_shared(
    model: Any, cache: Any, mask: Tensor, row_of: Tensor, backend: PrefixBackend = "auto"
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
