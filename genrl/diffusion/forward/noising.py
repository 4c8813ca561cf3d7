"""What the trainers on the forward process share: finished samples, noised to drawn levels.

Time: sigma = 1 noise, sigma = 0 data, velocity = noise - data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from genrl.diffusion.forward.settings import Matching
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.forest import Drawn, independent
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.forward import diffusion_sample, diffusion_target, flow_sample, flow_target
from genrl.mdp.noise import keyed_noise
from genrl.mdp.noise_levels import logit_normal_draws
from genrl.objectives.advantages.groups import group_advantages, group_statistics
from genrl.runtime.loop.updating import Meter

Tensors = dict[str, Tensor]

REFERENCE = "reference"


def require_flow(run: DiffusionRun) -> None:
    """Raise ValueError where the model predicts something else than a velocity."""
    if run.policy.head.parametrisation != "flow":
        raise ValueError(
            f"trainer.algorithm: {run.config.trainer.algorithm} needs a flow-matching model; "
            f"{run.config.model.path} predicts {run.policy.head.prediction_type}. Use flow_grpo with kernel: ddim"
        )


def noised(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensors:
    """The state at `sigma` on the straight path from `clean` to `noise`, and the velocity there. sigma [] or [B]."""
    return {
        "sigma": sigma,
        "noisy": flow_sample(clean, noise, sigma),
        "target": flow_target(clean, noise),
    }


def drawn_level(policy: Policy, drawn: torch.Generator) -> Tensor:
    """A noise level of training: logit-normal for a flow; a timestep, uniform, for others."""
    if policy.head.parametrisation == "flow":
        return logit_normal_draws(1, drawn, stratified=False)[0]
    return torch.randint(len(policy.head.alphas_cumprod), (), generator=drawn)


def noised_by(policy: Policy, clean: Tensor, noise: Tensor, level: Tensor) -> Tensors:
    """The states at these levels [B] (timesteps, where the model is no flow), and the network's target there."""
    if policy.head.parametrisation == "flow":
        return noised(clean, noise, level)
    alpha_bar = policy.head.alphas_cumprod.to(clean.device)[level]
    target = diffusion_target(clean, noise, alpha_bar, policy.head.prediction_type)
    return {"sigma": level, "noisy": diffusion_sample(clean, noise, alpha_bar), "target": target}


def own_noise(micro_batch: MicroBatch, *names: int | str) -> Tensor:
    """Noise of each sample, by its key and `names`, [B, ...]."""
    clean = micro_batch.final
    return torch.stack([keyed_noise(clean.shape[1:], *key, "forward", *names) for key in micro_batch.batch.keys]).to(
        clean
    )


def group_noise(micro_batch: MicroBatch, group: Tensor, *names: int | str) -> Tensor:
    """Noise of each sample, the same for all of a group (int64 [B]), [B, ...]."""
    clean, (seed, iteration, *_) = micro_batch.final, micro_batch.batch.keys[0]
    noises = {
        g: keyed_noise(clean.shape[1:], seed, iteration, "group", g, "forward", *names) for g in set(group.tolist())
    }
    return torch.stack([noises[g] for g in group.tolist()]).to(clean)


def check_reference_guidance(run: DiffusionRun, scale: float | None) -> None:
    """Raise ValueError where the reference is to have its own guidance, and guidance is an input of the network."""
    if scale is not None and run.policy.embeds_guidance:
        raise ValueError(
            f"trainer.reference_guidance: {run.config.model.path} takes guidance as an input of its network, so "
            f"at {scale:g} the starting model would be judged under another condition than the policy; write null"
        )


def solved(policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None]) -> Drawn:
    """Samples by the deterministic solver."""
    return independent(policy.roll_out(batch), slots)


def estimate(settings: Matching, rollouts: Rollouts) -> tuple[Tensor, Meter]:
    """The advantages of the samples, float64 [N], cut at `advantage_clip`, and metrics of them."""
    clip, meter = settings.advantage_clip, Meter()
    advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale, clip=clip)
    meter.add_spread(group_statistics(rollouts.total, rollouts.group))
    meter.add_advantages(advantages, clip)
    return advantages, meter


@torch.no_grad()
def under(run: DiffusionRun, snapshot: str, batch: Batch, state: Tensor, sigma: Tensor) -> Tensor:
    """The model's output under a snapshot ("reference": the model before training), [B, ...], without gradient."""
    weights = run.weights
    with weights.reference() if snapshot == REFERENCE else weights.use(snapshot):
        return run.policy.velocity(batch, state, sigma)
