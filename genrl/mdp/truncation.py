"""Through which denoising steps the gradient of a differentiable reward runs.

Steps count from 0 = from pure noise, to num_steps - 1 = the last. What is sampled is a function of (seed, update):
the same on all processes, with nothing to save.
"""

from __future__ import annotations

import torch

from genrl.mdp.noise import generator


def last_steps(num_steps: int, truncation: int) -> range:
    """The last `truncation` steps: DRaFT-K (arXiv 2309.17400, alg. 1). All of them: DRaFT.

    Raises ValueError unless 1 <= truncation <= num_steps.
    """
    if not 1 <= truncation <= num_steps:
        raise ValueError(f"the gradient runs through 1 to {num_steps} of {num_steps} steps, got {truncation}")
    return range(num_steps - truncation, num_steps)


def random_truncation(num_steps: int, *, low: int = 1, high: int | None = None, seed: int, update: int) -> range:
    """The last K steps, K uniform in low .. high (None: num_steps): AlignProp (arXiv 2310.03739).

    Raises ValueError unless 1 <= low <= high <= num_steps.
    """
    top = num_steps if high is None else high
    if not 1 <= low <= top <= num_steps:
        raise ValueError(f"the truncation must be chosen from 1 .. {num_steps}, got {low} .. {top}")
    length = low + int(torch.randint(top - low + 1, (1,), generator=generator(seed, "truncation", update)))
    return last_steps(num_steps, length)


def random_late_step(num_steps: int, *, low: int, high: int | None = None, seed: int, update: int) -> int:
    """One step, uniform in low .. high - 1 (None: num_steps), whose prediction of the data is scored: ReFL
    (arXiv 2304.05977, alg. 1; published range 30 .. 39 of 40 steps).

    Raises ValueError unless 0 <= low < high <= num_steps.
    """
    top = num_steps if high is None else high
    if not 0 <= low < top <= num_steps:
        raise ValueError(f"the step must be chosen from 0 .. {num_steps - 1}, got {low} .. {top - 1}")
    return low + int(torch.randint(top - low, (1,), generator=generator(seed, "late step", update)))
