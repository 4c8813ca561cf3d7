"""Supervised fine-tuning on demonstrations: where a policy begins before reinforcement.

Optimiser steps on data: of the policy by the run's own optimiser, of networks beside it by theirs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from genrl.mdp import ddpm, levels
from genrl.mdp.noise import generator
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Loss, Meter, Results, descend, summed
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.policies.policy import ACTION, SEEN, Batch, Imitates, Policy, PredictsNoise, PredictsVelocity, rows
from genrl.vla.rollout.sampling import Acting, Sampler
from genrl.vla.rollout.scores import named
from genrl.vla.run import VLARun

Step = Callable[[Recorded], Mapping[str, Tensor]]
"""Takes what a loss is made of: loss, gradients, clipping and an optimiser step. Returns what the loss found."""


def stepper(run: VLARun, settings: Any, loss: Loss, sampler: Sampler | None = None) -> Step:
    """An optimiser step of a run's own optimiser on the policy, by the method's loss. sampler: None = that of the
    running iteration."""
    loop = run.loop

    def step(recorded: Recorded) -> Mapping[str, Tensor]:
        loop.optimizer.zero_grad(set_to_none=True)  # imitation by an optimiser of its own leaves gradients behind
        acting = run.acting if sampler is None else Acting(run.policy, sampler)
        figures: dict[str, Tensor] = {}

        def measure(part: Recorded, results: Results, _: Recorded) -> None:
            figures.update({name: value.detach().cpu() for name, value in results.items()})

        # One part: these losses are means over a batch that was sampled as a whole.
        descend(loop, settings, acting, [recorded], lambda one: one, loss, groups=["policy"], measure=measure)
        return figures

    return step


def step_beside(optimiser: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> float:
    """One step on a loss []; returns it. clip: the largest norm of the gradient; None = any."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
    optimiser.step()
    return loss.item()


def followed(run: VLARun, phase: str, steps: int, rows: Iterator[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """A training of so many steps as a phase of the run: means of what it yields, each under prefix/name."""
    run.loop.phase(phase, steps)
    meter = Meter()
    for row in rows:
        meter.note({f"{prefix}/{name}": value for name, value in row.items()})
        run.loop.advance(1)
    return meter.result()


def matching_error(
    policy: Policy, context: Batch, actions: Tensor, noise: Tensor, level: Tensor, alpha_bars: Tensor | None
) -> Tensor:
    """What a policy's prediction at noisy chunks lacks, [B, H, A]: of flow matching (arXiv 2210.02747)
    `v(x_sigma) - (noise - a)`, level sigma [B]; of DDPM's simple loss (2006.11239, eq. 14) `e(x_t) - noise`, level an
    int64 timestep [B] of alpha_bars.

    actions (normalised) and noise [B, H, A]. Raises TypeError for a policy that predicts neither.
    """
    if isinstance(policy, PredictsVelocity):
        sigma = level.to(actions)
        x = levels.flow_sample(actions, noise, sigma)
        return policy.velocity(context, x, sigma) - levels.flow_target(actions, noise)
    if not isinstance(policy, PredictsNoise) or alpha_bars is None:
        raise TypeError(f"{type(policy).__name__} predicts neither velocity nor noise, and has no loss of its own")
    x = levels.diffusion_sample(actions, noise, alpha_bars[level])
    return policy.noise(context, x, level) - noise


def noise_and_levels(policy: Policy, shape: Sequence[int], rng: torch.Generator, alpha_bars: Tensor) -> Batch:
    """Noise [B, H, A] of a shape and the levels [B] of `matching_error`, with the alpha_bars."""
    noise = torch.randn(tuple(shape), generator=rng)
    if isinstance(policy, PredictsVelocity):
        level = levels.flow_times(shape[0], rng)
    else:
        level = torch.randint(len(alpha_bars), (shape[0],), generator=rng)
    return {"noise": noise, "level": level, "alpha_bars": alpha_bars}


def recorded_chunks(
    policy: Policy, observation: Batch, action: Tensor, alpha_bars: Tensor, rng: torch.Generator, weight: Tensor
) -> Recorded:
    """Data chunks to be cloned with these weights [B], with noise and levels drawn by rng."""
    tensors = {f"observation/{name}": value for name, value in observation.items()}
    tensors |= noise_and_levels(policy, action.shape, rng, alpha_bars)
    return Recorded(None, tensors | {"actions": policy.normalised(action), "weight": weight})


def cloning_errors(policy: Policy, given: Recorded) -> Tensor:
    """Squared error of the policy's prediction for each data chunk, mean over H and A, [B]: flow or noise matching.

    Weighted by `actor_critic.advantage_weights` its mean is advantage-weighted regression of a flow or diffusion
    policy.
    """
    context, actions = policy.encode(observation_of(given)), given["actions"]
    error = matching_error(policy, context, actions, given["noise"].to(actions), given["level"], given["alpha_bars"])
    return error.square().flatten(1).mean(1)


def own_loss(policy: Imitates, context: Batch, actions: Tensor, given: Recorded) -> Tensor:
    """The part [] of a policy's own loss that these frames have: of all actions, and of all frames."""
    all_valid = actions.new_ones(actions.shape[:2], dtype=torch.bool)
    valid = given["valid"].to(actions.device) if "valid" in given else all_valid
    errors = policy.errors(context, actions, valid, named(given, "noise/"))
    mean = torch.where(valid, errors.actions, 0.0).sum() / valid.sum().clamp(min=1)
    return mean * float(given["share"]) + errors.frames.mean() * float(given["share_of_frames"])


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
    # By what counts, not by rows: processes with more padding have less of the mean.
    share = int((~padded[mine]).sum()) / max(1, int((~padded).sum()))
    inputs = {name: frames[name] for name in (*policy.inputs, SEEN) if name in frames}
    tensors = {f"observation/{name}": value for name, value in rows(inputs, here).items()}
    tensors |= {"actions": actions, "share": torch.tensor(share, dtype=torch.float64)}
    if isinstance(policy, Imitates):
        random = policy.loss_noise(len(index), rng)
        tensors |= {f"noise/{name}": value[mine] for name, value in random.items()}
        tensors["share_of_frames"] = torch.tensor(len(here) / len(index), dtype=torch.float64)
    else:
        random = noise_and_levels(policy, (len(index), *actions.shape[1:]), rng, alpha_bars)
        tensors |= random | {name: random[name][mine] for name in ("noise", "level")}
    if ACTION_IS_PAD in frames or not len(here):
        tensors["valid"] = ~padded[mine]
    return Recorded(None, tensors)


def imitation_loss(policy: Policy, given: Recorded) -> Tensor:
    """Flow matching, noise matching or the policy's own: the part [] that these frames have in the mean loss of all of
    a batch."""
    context = policy.encode(observation_of(given))
    device = next(iter(context.values())).device
    actions = given["actions"].to(device)
    if isinstance(policy, Imitates):
        return own_loss(policy, context, actions, given)
    noise, share = given["noise"].to(device), float(given["share"])
    square = matching_error(policy, context, actions, noise, given["level"], given["alpha_bars"]) ** 2
    if "valid" not in given:
        return square.mean() * share
    counted = given["valid"].to(device)[..., None].expand(square.shape)
    return torch.where(counted, square, 0.0).sum() / counted.sum().clamp(min=1) * share


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
    my_rows, meter, losses = slice(process, None, processes), Meter(), list[float]()

    def measure(part: Tensor, results: Results, recorded: Recorded) -> None:
        losses.append(float(results["loss"].detach()))

    with loop.timed("train"):
        for _ in range(settings.steps_per_iteration):
            # Keyed by optimiser steps: a resumed run goes on with the next batch.
            rng = generator(run.config.seed, "imitation", loop.optimizer_steps)
            index = torch.randint(len(frames[ACTION]), (settings.batch_size,), generator=rng)
            prepare = partial(recorded_frames, policy, frames, rng=rng, alpha_bars=alpha_bars, mine=my_rows)
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
        loss_value = step_beside(optimiser, loss, grad_clip)
        schedule.step()
        yield loss_value


def mean_of_last(losses: Iterator[float], count: int = 50) -> float:
    """Run a training to its end; mean loss of its last steps."""
    last = deque(losses, maxlen=count)
    return sum(last) / len(last)
