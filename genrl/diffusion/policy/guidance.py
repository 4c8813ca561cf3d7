"""A pipeline's classifier-free guidance: the same conditions under another one, or without."""

from __future__ import annotations

import inspect
from dataclasses import replace

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch


def guided(batch: Batch, scale: float | None) -> Batch:
    """The same conditions under this guidance; None = as they are."""
    return batch if scale is None else replace(batch, sampling={**batch.sampling, "guidance_scale": scale})


def without_guidance(policy: Policy, batch: Batch) -> Batch:
    """The same conditions for a policy that is trained without guidance.

    Guidance that is an input of the network stays: it is no extrapolation that could be left out, and another value
    would be another condition than that of sampling. Beside it such pipelines extrapolate by `true_cfg_scale` where
    they are given a negative prompt, some by default (Qwen-Image: 4); that is left out.
    """
    batch = batch if policy.embeds_guidance else guided(batch, 1.0)
    if not guides_by_negative(policy, batch):
        return batch
    return replace(batch, sampling={**batch.sampling, "true_cfg_scale": 1.0})


def guides_by_negative(policy: Policy, batch: Batch) -> bool:
    """Whether the pipeline extrapolates from a negative prompt that it is given, by `true_cfg_scale`."""
    taken = inspect.signature(type(policy.pipe).__call__).parameters
    if "true_cfg_scale" not in taken or batch.sampling.get("negative_prompt") is None:
        return False
    return bool(batch.sampling.get("true_cfg_scale", taken["true_cfg_scale"].default) > 1)


def without_prompts(batch: Batch) -> Batch:
    """What guidance extrapolates from: no text, or the negative prompt that the pipeline is given."""
    return replace(batch, prompts=[batch.sampling.get("negative_prompt") or ""] * len(batch))
