"""Supervised fine-tuning on demonstrations: where a policy begins before reinforcement."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from genrl.mdp import ddpm, forward
from genrl.mdp.noise import generator
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter, Results, descend, summed
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.offline.descent import step_beside
from genrl.vla.policies.policy import ACTION, SEEN, Batch, Imitates, Policy, PredictsNoise, PredictsVelocity, rows
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import VLARun
from genrl.vla.update.scores import named


def flow_matching_loss(
    policy: PredictsVelocity, context: Batch, actions: Tensor, noise: Tensor, sigma: Tensor, valid: Tensor | None = None
) -> Tensor:
    """Mean of `(v(x_sigma) - (noise - a))^2` over B, H and A: flow matching (arXiv 2210.02747), [].

    actions (normalised) and noise [B, H, A], sigma [B]; valid bool [B, H]: which actions were demonstrated.
    """
    x = forward.flow_sample(actions, noise, sigma)
    return _mean_square(policy.velocity(context, x, sigma) - forward.flow_target(actions, noise), valid)


def noise_matching_loss(
    policy: PredictsNoise,
    context: Batch,
    actions: Tensor,
    noise: Tensor,
    timestep: Tensor,
    alpha_bars: Tensor,
    valid: Tensor | None = None,
) -> Tensor:
    """Mean of `(e(x_t) - noise)^2`: DDPM's simple loss (arXiv 2006.11239, eq. 14), []. timestep int64 [B]."""
    x = forward.diffusion_sample(actions, noise, alpha_bars[timestep])
    return _mean_square(policy.noise(context, x, timestep) - noise, valid)


def own_loss(policy: Imitates, context: Batch, actions: Tensor, given: Recorded) -> Tensor:
    """The part [] of a policy's own loss that these frames have: of all actions, and of all frames."""
    whole = actions.new_ones(actions.shape[:2], dtype=torch.bool)
    valid = given["valid"].to(actions.device) if "valid" in given else whole
    found = policy.errors(context, actions, valid, named(given, "noise/"))
    mean = torch.where(valid, found.actions, 0.0).sum() / valid.sum().clamp(min=1)
    return mean * float(given["share"]) + found.frames.mean() * float(given["share_of_frames"])


def recorded_frames(
    policy: Policy, frames: Batch, index: Tensor, rng: torch.Generator, alpha_bars: Tensor, mine: slice = slice(None)
) -> Recorded:
    """All that `imitation_loss` reads of the frames `index[mine]`, whose share of the mean over all of index it is.

    Noise and times are drawn by rng for all of index, so they do not depend on how a batch is shared out. What
    `ACTION_IS_PAD` marks does not count. Raises TypeError for a policy that cannot imitate.
    """
    here = index[mine]
    actions = policy.normalised(frames[ACTION][here])
    padded = frames[ACTION_IS_PAD][index] if ACTION_IS_PAD in frames else torch.zeros(len(index), 1, dtype=torch.bool)
    share = int((~padded[mine]).sum()) / max(1, int((~padded).sum()))
    shown = {name: frames[name] for name in (*policy.inputs, SEEN) if name in frames}
    tensors = {f"observation/{name}": value for name, value in rows(shown, here).items()}
    tensors |= {"actions": actions, "share": torch.tensor(share, dtype=torch.float64)}
    if isinstance(policy, Imitates):
        drawn = policy.loss_noise(len(index), rng)
        tensors |= {f"noise/{name}": value[mine] for name, value in drawn.items()}
        tensors["share_of_frames"] = torch.tensor(len(here) / len(index), dtype=torch.float64)
    else:
        tensors["noise"] = torch.randn((len(index), *actions.shape[1:]), generator=rng)[mine]
        tensors |= {"level": _levels(policy, len(index), rng, alpha_bars)[mine], "alpha_bars": alpha_bars}
    if ACTION_IS_PAD in frames or not len(here):
        tensors["valid"] = ~padded[mine]
    return Recorded(None, tensors)


def _levels(policy: Policy, count: int, rng: torch.Generator, alpha_bars: Tensor) -> Tensor:
    """Times of a flow, or timesteps of a diffusion [count]."""
    if isinstance(policy, PredictsVelocity):
        return forward.flow_times(count, rng)
    if isinstance(policy, PredictsNoise):
        return torch.randint(len(alpha_bars), (count,), generator=rng)
    raise TypeError(f"{type(policy).__name__} predicts neither velocity nor noise, and has no loss of its own")


def imitation_loss(policy: Policy, given: Recorded) -> Tensor:
    """Flow matching, noise matching or the policy's own: the part [] that these frames have in the mean loss of all of
    a batch."""
    context = policy.encode(observation_of(given))
    device = next(iter(context.values())).device
    actions = given["actions"].to(device)
    if isinstance(policy, Imitates):
        return own_loss(policy, context, actions, given)
    noise, level = given["noise"].to(device), given["level"]
    valid, share = given["valid"].to(device) if "valid" in given else None, float(given["share"])
    if isinstance(policy, PredictsVelocity):
        return flow_matching_loss(policy, context, actions, noise, level.to(device), valid) * share
    assert isinstance(policy, PredictsNoise)
    return noise_matching_loss(policy, context, actions, noise, level, given["alpha_bars"], valid) * share


def observation_of(given: Recorded) -> Batch:
    """The observation that was recorded, by the policy's names."""
    return named(given, "observation/")


def imitation_updates(run: VLARun, settings: Any, frames: Batch, loss: Loss) -> dict[str, float]:
    """The optimiser steps of an iteration on minibatches of frames, each a function of (seed, step) and shared out to
    the processes. settings: `steps_per_iteration` and `batch_size`; loss: of the method. Returns what was found."""
    loop, policy = run.loop, run.policy
    process, processes = loop.process.accelerator.process_index, loop.process.accelerator.num_processes
    acting = Acting(policy, None)
    alpha_bars = ddpm.cosine_alpha_bars(policy.train_steps if isinstance(policy, PredictsNoise) else 1)
    loop.phase("training", settings.steps_per_iteration * settings.batch_size)
    mine, meter, losses = slice(process, None, processes), Meter(), list[float]()

    def measure(part: Tensor, results: Results, recorded: Recorded) -> None:
        losses.append(float(results["loss"].detach()))

    with loop.timed("train"):
        for _ in range(settings.steps_per_iteration):
            rng = generator(run.config.seed, "imitation", loop.optimizer_steps)
            index = torch.randint(len(frames[ACTION]), (settings.batch_size,), generator=rng)
            prepare = partial(recorded_frames, policy, frames, rng=rng, alpha_bars=alpha_bars, mine=mine)
            norms = descend(
                loop, settings, acting, [index], prepare, loss, groups=["policy"], done=len, measure=measure
            )
            meter.note({"grad_norm/policy": norms["policy"]})
    # a loss is this process's part of the mean over a batch
    total = summed({"loss": sum(losses)})["loss"]
    return meter.result() | {"loss": total / settings.steps_per_iteration}


def imitate(
    policy: Policy,
    frames: Batch,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    grad_clip: float = 1.0,
    train_steps: int = 20,
) -> Iterator[float]:
    """Train on frames (observations and `ACTION` of the robot), yielding the loss of every step: leave when you like.

    AdamW with a cosine to 0 over `steps`; batches, noise and times are functions of (seed, step). train_steps is the
    noise schedule of a diffusion policy. Raises FloatingPointError for a loss that is not finite.
    """
    if not isinstance(policy, nn.Module):
        raise TypeError(f"a policy that is trained must be a torch module, {type(policy).__name__} is none")
    optimiser = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: 0.5 * (1.0 + math.cos(math.pi * s / steps)))
    alpha_bars = ddpm.cosine_alpha_bars(train_steps)
    for step in range(steps):
        rng = generator(seed, "imitation", step)
        index = torch.randint(len(frames[ACTION]), (batch_size,), generator=rng)
        loss = imitation_loss(policy, recorded_frames(policy, frames, index, rng, alpha_bars))
        if not bool(loss.isfinite()):
            raise FloatingPointError(f"the loss of step {step} is {loss.item()}: lower the learning rate")
        found = step_beside(optimiser, loss, grad_clip)
        schedule.step()
        yield found


def mean_of_last(losses: Iterator[float], count: int = 50) -> float:
    """Run a training to its end; mean loss of its last steps."""
    last = deque(losses, maxlen=count)
    return sum(last) / len(last)


def _mean_square(error: Tensor, valid: Tensor | None) -> Tensor:
    square = error**2
    if valid is None:
        return square.mean()
    kept = valid[..., None].expand(square.shape)
    return torch.where(kept, square, 0.0).sum() / kept.sum().clamp(min=1)
