"""Log-probabilities of completion tokens from hidden states, without the logits of the whole completion.

The logits of 8 completions of 1,000 tokens over a vocabulary of 150,000 are 5 GB in float32, and a softmax needs them
twice more. Here they exist for one chunk of tokens at a time, also in the backward pass, which computes them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from genrl.vlm.config.sections import LOGITS

IMPOSSIBLE = -1e30  # a logit whose probability is exactly 0; -inf would make entropy 0 * inf


class TokenScores(NamedTuple):
    """log_prob [...]; entropy [...] of the whole distribution, or None. Both 0 where masked, both with gradient."""

    log_prob: Tensor
    entropy: Tensor | None


def tokens_at_once(vocabulary: int) -> int:
    """Tokens whose logits exist at a time: 1,024, fewer where these would be more than `LOGITS`."""
    return max(1, min(1024, LOGITS // vocabulary))


def completion_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> TokenScores:
    """`log softmax((h W^T + b) / temperature)` at the chosen tokens, in float32 (float64 for float64 states).

    hidden [..., H]: the state that predicts each token (for a causal model of prompt length P and completion length T,
    positions P - 1 to P + T - 2); weight [V, H] and bias [V] of the output layer; tokens int64 [...].
    mask [...]: nothing is computed for tokens with 0.
    temperature: that of sampling, so that the ratio compares the distributions that were sampled.
    forbidden: int64 ids that the sampler could not choose (image placeholders); both normalise over the others.
    chunk: tokens whose logits [chunk, V] exist at a time, None = `tokens_at_once`; the result does not depend on it.
    Raises ValueError for a temperature that is not positive, a chosen token that is forbidden, and shapes that differ.
    """
    if temperature <= 0:
        raise ValueError(f"the sampling temperature must be positive, got {temperature}: greedy decoding has no ratio")
    if hidden.shape[:-1] != tokens.shape or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"one state per token is needed: states {list(hidden.shape)}, tokens {list(tokens.shape)}, output layer "
            f"{list(weight.shape)}"
        )
    chunk = tokens_at_once(len(weight)) if chunk is None else chunk
    valid = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    states, chosen = hidden[valid], tokens[valid]
    if forbidden is not None and bool(torch.isin(chosen, forbidden).any()):
        forbidden_ids = sorted(set(chosen[torch.isin(chosen, forbidden)].tolist()))
        raise ValueError(
            f"the completions hold the forbidden tokens {forbidden_ids}: the sampler must suppress the same ids"
        )
    # the states may be bfloat16; from the logits on, all is float32 or more
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    offset = None if bias is None else bias.to(dtype)
    if forbidden is not None:
        blocked = torch.zeros(len(weight), dtype=dtype, device=weight.device).index_fill(0, forbidden, IMPOSSIBLE)
        offset = blocked if offset is None else offset + blocked

    empty = torch.zeros(tokens.shape, dtype=dtype, device=hidden.device)
    if hidden.dtype == weight.dtype == dtype and not entropy and hasattr(F, "linear_cross_entropy"):
        values = _fused(states, weight, offset, chosen, temperature, chunk)
        return TokenScores(empty.masked_scatter(valid, values), None)
    values, entropies = _Chunked.apply(states, weight, offset, chosen, temperature, chunk, entropy)  # type: ignore[no-untyped-call]
    return TokenScores(empty.masked_scatter(valid, values), empty.masked_scatter(valid, entropies) if entropy else None)


def _fused(
    states: Tensor, weight: Tensor, offset: Tensor | None, tokens: Tensor, temperature: float, chunk: int
) -> Tensor:
    """torch's own chunked operator. Its result has the dtype of the states, so it serves float32 and float64 only."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
    return -F.linear_cross_entropy(
        states / temperature,
        weight,
        tokens,
        linear_bias=None if offset is None else offset / temperature,
        reduction="none",
        options=options,
    )


class _Chunked(torch.autograd.Function):
    """(log-probabilities, entropies) in chunks of tokens; any dtype. The backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        offset: Tensor | None,
        tokens: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        values = states.new_empty(len(tokens), dtype=torch.promote_types(states.dtype, torch.float32))
        normaliser, entropies = torch.empty_like(values), torch.zeros_like(values)
        for part in _parts(len(tokens), chunk):
            logits = _logits(states[part], weight, offset, temperature)
            normaliser[part] = logits.logsumexp(dim=-1)
            values[part] = logits.gather(-1, tokens[part, None])[:, 0] - normaliser[part]
            if entropy:
                probabilities = (logits - normaliser[part, None]).exp_()
                entropies[part] = normaliser[part] - probabilities.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(states, weight, offset, tokens, normaliser, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # None for the one that nothing was made of
        return values, entropies

    @staticmethod
    def backward(ctx: Any, of_values: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        states, weight, offset, tokens, normaliser, entropies = ctx.saved_tensors
        to_states, to_weight, to_offset, *_ = ctx.needs_input_grad
        grad_states = torch.empty_like(states) if to_states else None
        # summed over chunks in float32 whatever the dtype of the layer
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if to_weight else None
        grad_offset = torch.zeros_like(offset) if to_offset else None
        for part in _parts(len(tokens), ctx.chunk):
            # d log p(token) / d logit_v = (1[v = token] - p_v) / temperature,
            # d entropy / d logit_v = -p_v (log p_v + entropy) / temperature
            log_p = _logits(states[part], weight, offset, ctx.temperature).sub_(normaliser[part, None])
            grad_logits = torch.zeros_like(log_p)
            if of_values is not None:
                scale = of_values[part, None] / ctx.temperature
                grad_logits.addcmul_(log_p.exp(), scale, value=-1.0).scatter_add_(1, tokens[part, None], scale)
            if of_entropies is not None:
                scale = of_entropies[part, None] / ctx.temperature
                grad_logits.addcmul_(log_p.exp().mul_(log_p + entropies[part, None]), scale, value=-1.0)
            if grad_offset is not None:
                grad_offset += grad_logits.sum(dim=0)
            rounded = grad_logits.to(states.dtype)
            if grad_states is not None:
                grad_states[part] = rounded @ weight.to(states.dtype)
            if grad_weight is not None:
                grad_weight += rounded.T @ states[part]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_states, grad_weight, grad_offset, None, None, None, None


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]


def _logits(states: Tensor, weight: Tensor, offset: Tensor | None, temperature: float) -> Tensor:
    """Logits over the temperature, a new tensor in float32 or more."""
    logits = F.linear(states, weight.to(states.dtype)).to(torch.promote_types(states.dtype, torch.float32))
    return (logits if offset is None else logits.add_(offset)).div_(temperature)
