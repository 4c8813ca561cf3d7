"""Whether a pipeline can be a one-step generator: draw a picture in one step of its own schedule."""

from __future__ import annotations

import torch

from genrl.diffusion.policy.guidance import guides_by_negative
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch

LARGEST_SIGNAL = 0.9  # alpha_bar where the generator reads its noise; .43 at timestep 399 of Stable Diffusion


def check_one_step(policy: Policy, probe: Batch) -> None:
    """Raise ValueError where the one step would return its noise, or is guided."""
    if guides_by_negative(policy, probe):
        raise ValueError(
            "sampling.pipeline_args: the generator itself has no guidance, and this pipeline guides by a negative "
            "prompt; write true_cfg_scale: 1"
        )
    head = policy.head
    if head.parametrisation == "flow":
        return
    with torch.no_grad(), policy.uncounted():
        policy.roll_out(probe)  # puts the step where a run of the pipeline has it
    time = int(head.timesteps[0])
    if (alpha_bar := float(head.alphas_cumprod[time])) > LARGEST_SIGNAL:
        raise ValueError(
            f"model.scheduler: the one step is at timestep {time}, where alpha_bar is {alpha_bar:.3f} and the network "
            "hardly changes what it reads; write {timestep_spacing: trailing} for the last timestep, or "
            "{timestep_spacing: leading, steps_offset: 399}"
        )
