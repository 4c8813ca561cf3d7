"""Policy gradients for masked diffusion language models, whose log-probabilities are bounds: BGPO (arXiv 2510.11683).

`elbo` [B, M]: M Monte-Carlo estimates (random masks) of the evidence lower bound of each completion;
`old_elbo` the same masks under the weights before the update; advantage [B]. d_j = elbo_j - old_elbo_j.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_bound_loss(elbo: Tensor, old_elbo: Tensor, advantage: Tensor) -> Tensor:
    """`-A mean_j (1 + d_j)` where A >= 0, `-A mean_j exp(d_j)` where A < 0: BGPO's bound (eqs. 9-14), [B].

    Never below the exact objective `-A exp(mean_j d_j)`, and equal in value and gradient on policy. It is a sum over j,
    so one mask at a time can be run forwards and backwards (divide by M): memory does not grow with M.
    """
    difference = elbo - old_elbo.detach()
    weight = advantage.detach().to(elbo.dtype)[:, None]
    return -(weight * torch.where(weight >= 0, 1.0 + difference, difference.exp())).mean(dim=1)
