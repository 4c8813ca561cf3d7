"""Prompts with their answers one after the other in one row, without padding.

Every sequence has positions of its own, which begin at 0 again. Where a model is given positions and no attention mask,
transformers begins a new sequence at each position that does not follow the one before, and lets tokens attend to their
own sequence alone (`masking_utils.find_packed_sequence_indices`). Models with M-RoPE read that from a fourth row of
positions, those of the text, before time, height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from genrl.vlm.policies.processor import Prompt, join_pixels

if TYPE_CHECKING:
    from genrl.vlm.policies.policy import Encoded, Policy

APART = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative difference of the states of packed and of separate sequences that is rounding."""


def packed_states(policy: Policy, prompts: Sequence[Encoded], tokens: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    """(states [B, T, H] that predict the answers' tokens, positions computed). Answers `tokens` int64 [B, T], row b to
    prompts[b], are read up to the last token of `mask` [B, T]; further states are 0."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in mask]
    answers = [row[: length - 1].cpu() for row, length in zip(tokens, lengths, strict=True)]
    pairs = list(zip(prompts, answers, strict=True))
    found = policy.body(**packed_inputs(policy, pairs), use_cache=False).last_hidden_state[0]
    states = found.new_zeros(*tokens.shape, found.shape[-1])
    first = 0
    for number, ((prompt, answer), length) in enumerate(zip(pairs, lengths, strict=True)):
        start = first + prompt.length - 1
        states[number, :length] = found[start : start + length]
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

    made: dict[str, Any] = {
        "input_ids": torch.cat([part for prompt, answer in pairs for part in (prompt.tokens.ids, answer)])[None],
        "position_ids": torch.cat([positions(*pair) for pair in pairs], -1).unsqueeze(-2),
    }
    for name in {name for prompt, _ in pairs for name in prompt.tokens.kinds}:
        kinds = [
            part
            for prompt, answer in pairs
            for part in (prompt.tokens.kinds.get(name, torch.zeros_like(prompt.tokens.ids)), torch.zeros_like(answer))
        ]
        made[name] = torch.cat(kinds)[None]
    made |= join_pixels([prompt.tokens for prompt, _ in pairs])
    return {k: v.to(policy.device, policy.dtype if v.is_floating_point() else None) for k, v in made.items()}


@torch.no_grad()
def check_packing(policy: Policy) -> None:
    """Raises ValueError for a model whose packed sequences see each other, or whose positions cannot be given: seen by
    two questions about grey pictures, packed and one by one."""
    picture = Image.new("RGB", (64, 64), (90, 120, 60))
    prompts = [policy.encode(Prompt((picture, text))) for text in ("What is it?", "Why is it there, and where?")]
    tokens = torch.tensor([policy.stop_ids[:1]] * 2)
    kept = torch.ones_like(tokens, dtype=torch.bool)
    name = type(policy.model).__name__
    try:
        packed, _ = packed_states(policy, prompts, tokens, kept)
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"vlm.packing: {name} cannot be given packed sequences ({error}); write false") from error
    alone = torch.cat([policy.body(**policy.inputs([p]), use_cache=False).last_hidden_state[:, -1:] for p in prompts])
    apart = float((packed - alone).float().norm() / alone.float().norm())
    if not apart <= APART[policy.dtype]:
        text = f"{name} lets packed sequences see each other (states differ by {apart:.2g}); write false"
        raise ValueError(f"vlm.packing: {text}")
