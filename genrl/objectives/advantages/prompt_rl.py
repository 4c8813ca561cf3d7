"""PromptRL (arXiv 2602.01382): joint training of a language model that rewrites prompts and the flow model
that renders them.

Of the n pictures of a prompt n - m are of refinements, in front, and m of the prompt as it is: the retained ones keep
the flow model good at plain prompts. Advantages are over all n (`advantages.group_advantages(scale="group", eps=1e-4,
clip=5)`); the flow model learns from all of them, by its clipped surrogate and KL, the language model from its n - m.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.objectives.surrogates.policy_losses import importance_ratio, kl_k3


def joint_rewards(
    generation: Tensor, format_refined: Tensor, *, generation_weight: float = 1.0, format_weight: float = 1.0
) -> Tensor:
    """`R = weight R_generation + weight R_format`, [P, n] from the pictures' [P, n] and the refinements' [P, n - m].

    A retained prompt has no format of its own: it counts as the mean of its group's, so that it is neither helped nor
    harmed by it (without any refinement: 0). Raises ValueError for more refinements than pictures.
    """
    prompts, size = generation.shape
    refined = format_refined.shape[1]
    if format_refined.shape[0] != prompts or refined > size:
        raise ValueError(
            f"{list(generation.shape)} pictures cannot have {list(format_refined.shape)} refinements: both need the "
            "same prompts, and each refinement a picture"
        )
    mean = format_refined.mean(dim=1, keepdim=True) if refined else generation.new_zeros(prompts, 1)
    complete = torch.cat([format_refined, mean.expand(-1, size - refined)], dim=1)
    return generation_weight * generation + format_weight * complete


def completion_mask(tokens: Tensor, end: int) -> Tensor:
    """Which tokens were written, bool [B, L]: up to and including the first `end` (all, where there is none)."""
    ended = (tokens == end).long().cumsum(dim=1)
    return (ended - (tokens == end).long()) == 0


def rewriter_loss(
    log_prob: Tensor, ref_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, kl_weight: float = 0.01
) -> Tensor:
    """`-(exp(l - sg l) A - kl_weight k3)` per token, mean over the tokens of each refinement: [B]; take its mean.

    log_prob, ref_log_prob [B, L] of the written tokens, mask [B, L] of those that count, advantage [B] of the whole
    refinement. Strictly on policy: the ratio is 1, its gradient that of l A. Masked tokens may hold anything.
    Gradient through `log_prob` only.
    """
    written = mask.bool()
    new, reference = torch.where(written, log_prob, 0.0), torch.where(written, ref_log_prob, 0.0)
    # Its value is 1, its gradient that of log p: on policy there is nothing else to divide by.
    gain = importance_ratio(new, new) * advantage.detach().to(new.dtype)[:, None]
    loss = torch.where(written, kl_weight * kl_k3(new, reference) - gain, 0.0)
    return loss.sum(dim=1) / written.sum(dim=1).clamp(min=1)
