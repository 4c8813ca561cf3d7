"""PRDP: proximal reward difference prediction (arXiv 2402.08714), a regression over pairs of samples of one prompt.

The policy that maximises `E r - beta KL(p_theta(x_0:T) || p_ref(x_0:T))` has, for any two samples a and b of a prompt,
`log p/p_ref (a) - log p/p_ref (b) = (r_a - r_b) / beta`. PRDP regresses the left side, the predicted reward difference,
on the right one. Shapes: log-probabilities [N, B, T] (prompts, samples of each, steps), rewards [N, B]. Computed in
float64 on the host, where results are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Reduction = Literal["sum", "mean"]
Pairs = Literal["all", "positive"]


class PairErrors(NamedTuple):
    """Per pair (a, b) of samples of one prompt: where it stands, and its squared errors."""

    pairs: Tensor
    """int64 [P, 3]: prompt, sample a, sample b."""
    unclipped: Tensor
    """`l = (dr_hat - dr / beta)^2`, float64 [P]."""
    clipped: Tensor
    """The same of the log-ratios clipped around the old policy's, float64 [P]."""


class PRDPOutput(NamedTuple):
    """loss [] (float64), the share of pairs whose clipped error is the larger one, and the number of pairs."""

    loss: Tensor
    clipped: float
    num_pairs: int


def pair_errors(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor,
    rewards: Tensor,
    *,
    beta: float,
    clip: float,
    reduction: Reduction = "sum",
    pairs: Pairs = "all",
) -> PairErrors:
    """The squared prediction errors of every pair, plain and proximal.

    Per step the log-ratio `log p_theta / p_ref` is kept within clip of the old policy's (the snapshot that sampled);
    the proximal error uses those. reduction: log-ratios are summed over the steps (the paper's equations) or averaged
    (its listing, appendix; beta is then in units of 1 / T, and of 1 / D where log-probabilities are element means:
    its table's 3e-5 belongs to that). pairs (a < b): all, or those with a positive difference of rewards one way round
    (the listing: ties teach nothing there). Samples without a score (NaN) are in no pair.
    Gradient through `log_prob` only.
    Raises ValueError for shapes that do not belong together, beta <= 0 or clip < 0.
    """
    if beta <= 0 or clip < 0:
        raise ValueError(f"beta must be positive and the clip range not negative, got {beta} and {clip}")
    if log_prob.dim() != 3 or rewards.shape != log_prob.shape[:2]:
        raise ValueError(
            "log-probabilities are [prompts, samples, steps] and rewards [prompts, samples]; got "
            f"{list(log_prob.shape)} and {list(rewards.shape)}"
        )
    if not log_prob.shape == ref_log_prob.shape == old_log_prob.shape:
        raise ValueError(
            "new, reference and old log-probabilities must have one shape; got "
            f"{list(log_prob.shape)}, {list(ref_log_prob.shape)} and {list(old_log_prob.shape)}"
        )
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
    new, reference, old = (value.cpu().double() for value in (log_prob, ref_log_prob.detach(), old_log_prob.detach()))
    scores = rewards.detach().cpu().double()
    index = _pairs(scores, pairs)
    prompt, a, b = index.unbind(dim=1)
    target = (scores[prompt, a] - scores[prompt, b]) / beta
    drift = new - old
    proximal = (old - reference) + drift.clamp(-clip, clip)
    errors = []
    for log_ratio in ((old - reference) + drift, proximal):
        total = log_ratio.sum(dim=2) if reduction == "sum" else log_ratio.mean(dim=2)
        errors.append((total[prompt, a] - total[prompt, b] - target).square())
    return PairErrors(index, errors[0], errors[1])


def prdp_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor,
    rewards: Tensor,
    *,
    beta: float,
    clip: float,
    reduction: Reduction = "sum",
    pairs: Pairs = "all",
) -> PRDPOutput:
    """Mean over pairs of `max(l, l_clip)`; 0, with a gradient of 0, where there is no pair. Arguments as `pair_errors`:
    log-probabilities [N, B, T], rewards [N, B]."""
    errors = pair_errors(
        log_prob, ref_log_prob, old_log_prob, rewards, beta=beta, clip=clip, reduction=reduction, pairs=pairs
    )
    count = errors.pairs.shape[0]
    loss = torch.maximum(errors.unclipped, errors.clipped).sum() / max(count, 1)
    clipped = int((errors.clipped > errors.unclipped).sum()) / max(count, 1)
    return PRDPOutput(loss, clipped, count)


def prdp_gradient(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor,
    rewards: Tensor,
    *,
    beta: float,
    clip: float,
    reduction: Reduction = "sum",
    pairs: Pairs = "all",
) -> tuple[PRDPOutput, Tensor]:
    """The loss, and its derivative c = d loss / d log_prob, float64 [N, B, T], without a graph.

    The loss couples all samples and steps of a prompt; the network's gradient is that of `sum(c log p_theta)` all the
    same, which can be gathered step by step and micro-batch by micro-batch: evaluate all log-probabilities without
    gradients (in the first update they are the recorded ones), then replay each with its coefficient.
    """
    with torch.enable_grad():
        leaf = log_prob.detach().cpu().double().requires_grad_()
        output = prdp_loss(
            leaf, ref_log_prob, old_log_prob, rewards, beta=beta, clip=clip, reduction=reduction, pairs=pairs
        )
        (gradient,) = torch.autograd.grad(output.loss, leaf)
    return output._replace(loss=output.loss.detach()), gradient


def _pairs(scores: Tensor, kind: Pairs) -> Tensor:
    """int64 [P, 3] in the order (prompt, a, b)."""
    if kind not in ("all", "positive"):
        raise ValueError(f"pairs must be 'all' or 'positive', got {kind!r}")
    first, second = scores[:, :, None], scores[:, None, :]
    size = scores.shape[1]
    wanted = torch.ones(size, size, dtype=torch.bool).triu(diagonal=1) & ~first.isnan() & ~second.isnan()
    return (wanted if kind == "all" else wanted & (first != second)).nonzero()
