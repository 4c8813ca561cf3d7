"""Direct reward back-propagation: the loss of a differentiable reward (which steps it reaches: `mdp/truncation.py`)."""

from __future__ import annotations

from torch import Tensor


def reward_loss(rewards: Tensor, *, margin: float | None = None) -> Tensor:
    """`-r`, [B]: DRaFT (arXiv 2309.17400) and AlignProp. With a margin `max(0, margin - r)`: ReFL's map of rewards to
    losses (arXiv 2304.05977, alg. 1; margin 2), which leaves samples above it alone.

    Raises ValueError where no gradient can come of it: the reward, or the pictures it saw, are detached.
    """
    if not rewards.requires_grad:
        raise ValueError(
            "direct reward back-propagation needs the gradient of the reward with respect to the pictures, but these "
            "rewards carry none: use a differentiable reward, outside torch.no_grad()"
        )
    return -rewards if margin is None else (margin - rewards).relu()
