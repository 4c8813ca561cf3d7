"""The score of a step in the released Flow-CPS trainers (Adv-GRPO, Flow-Factory, PaCo-RL)."""

from __future__ import annotations

from torch import Tensor

from genrl.mdp.kernels import Reduction, compute_dtype, reduce_elements


def cps_log_prob(x: Tensor, mean: Tensor, reduction: Reduction = "mean") -> Tensor:
    """`-(x - mean)^2` reduced to [B]: what the released CPS trainers use in place of a log-density (x detached).

    Not a likelihood: variance and constants are dropped, so the log-ratio is 2 s^2 times too small, by a factor that
    changes from step to step, and clip ranges do not compare with `kernels.log_prob`'s.
    """
    dtype = compute_dtype(x, mean)
    return reduce_elements(-((x.detach().to(dtype) - mean.to(dtype)) ** 2), reduction)
