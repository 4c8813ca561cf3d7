"""Guard before the first iteration: what a pipeline makes of one sample does not depend on the pictures of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch

TOLERANCE = 1e-6
"""Of the largest number; two calls of the same shapes differ by nothing but the other sample's picture."""
ALONE = "write sampling.batch_size: 1, so that each sample is a call of its own"


@torch.no_grad()
def require_apart(policy: Policy, batch: Batch) -> None:
    """Raise ValueError unless the first of two samples stays as it is when the second is given the first's picture.

    Some pipelines read a list of pictures as several references for each sample (FLUX.2-klein), or share out one
    encoding: trained so, a sample would be drawn by one picture and scored by another. batch: of two samples; one step
    is made twice.
    """
    if len(batch) < 2 or not batch.inputs:
        return
    # The prompts and noise stay; so sample 0 can differ only by what it took from the other's picture.
    same: Mapping[str, Any] = {name: [values[0], values[0]] for name, values in batch.inputs.items()}
    kind = type(policy.pipe).__name__
    try:
        # One step is enough: what leaks between samples leaks in every call of the model.
        other, alike = (
            policy.roll_out(condition, stop=1).final[0] for condition in (batch, replace(batch, inputs=same))
        )
    except ValueError as error:
        text = f"a {kind} cannot be given the pictures of two samples in one call"
        raise ValueError(f"sampling.inputs: {text}; {ALONE} ({error})") from error
    difference = float((other - alike).abs().max())
    # Written so that NaN is refused, too.
    if not difference <= TOLERANCE * float(alike.abs().max()):
        text = f"in a {kind} the picture of one sample changes another sample of the call (by up to {difference:.2g})"
        raise ValueError(f"sampling.inputs: {text}; {ALONE}")
