"""Talk2Move: policy gradient on an editing pipeline, of the steps where exploring pays (arXiv 2601.02356).

One iteration, in the paper's words:

1. off-policy step evaluation   once: of chains that are left at each step k and finished
                                by a shortcut, the exit step K is where rewards differ most
2. active step sampling         G edits of each instruction: steps 0 .. K - 1 drawn from N(mu, s^2 I), the rest of the
                                way from sigma_K to 0 in S deterministic steps; K + S model calls instead of T
3. update                       Flow-GRPO on the K drawn steps, with spatial rewards

docs/talk2move.md has the settings and the curves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from genrl.diffusion.methods.talk2move.settings import TRIED_PROMPTS, TRIED_SAMPLES, Talk2Move
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Samples, independent
from genrl.diffusion.rollout.rollout import batch_inputs, call_arguments
from genrl.diffusion.rollout.scoring import score
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, choose_kernel, estimate
from genrl.diffusion.steps.transitions import check_on_policy, update
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.mdp import kernels
from genrl.mdp.noise import prompt_indices, shares
from genrl.objectives.groups import group_advantages
from genrl.runtime.loop.updating import Meter
from genrl_rewards import compose

__all__ = ["loss", "train"]


def train(run: DiffusionRun, settings: Talk2Move) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    kernel = choose_kernel(run, settings, Steps.of(run.config, settings, 0).plan)
    for iteration in run.iterations():
        # 1. Off-policy step evaluation.
        exit_at, metrics = choose_exit(run, settings, kernel, iteration)
        # 2. Active step sampling.
        chosen = partial(draw, kernel=kernel, exit_at=exit_at, shortcut=settings.shortcut, keep=settings.keep_graph)
        rollouts = run.collect(chosen)
        check_on_policy(run, rollouts, clip=min(settings.clip_bounds))
        # 3. Flow-GRPO on the steps before the exit.
        trained = settings.model_copy(update={"exit_step": exit_at})
        advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
        meter, steps = Meter(), Steps.of(run.config, trained, iteration)
        edges = estimate(run, trained, rollouts, steps, advantages, meter)
        update(run, trained, rollouts, edges, loss, meter)
        del rollouts
        run.finish(metrics | meter.result() | steps.metrics)


def choose_exit(run: DiffusionRun, settings: Talk2Move, kernel: Kernel, iteration: int) -> tuple[int, dict[str, float]]:
    """The exit step K of this iteration, as configured, or the last one found, kept in checkpoints; and its metrics."""
    if settings.exit_step is not None:
        return settings.exit_step, {}
    if "exit" not in run.loop.memory:
        rewards = evaluate_steps(run, settings, kernel, iteration)
        step, variance = max(1, exit_step(rewards)), exit_variance(rewards).tolist()
        if not variance[step] > 0:  # nothing to choose by: at the end; looked at again, at the same cost
            run.process.progress.say(
                "trial edits have equal rewards, or none, at every exit step: it is the last one for now"
            )
            last = len(variance) - 1
            return last, {"exit/variance": variance[last]}
        run.loop.memory["exit"] = {"step": step, "variance": variance}
        table = ", ".join(f"{k}: {value:.3g}" for k, value in enumerate(variance) if k > 0)
        run.process.progress.say(f"variance of rewards by exit step: {table}; {step} it is")
    step = int(run.loop.memory["exit"]["step"])
    return step, {"exit/variance": run.loop.memory["exit"]["variance"][step]}


@torch.no_grad()
def evaluate_steps(run: DiffusionRun, settings: Talk2Move, kernel: Kernel, iteration: int) -> Tensor:
    """Total rewards [P, T, S] of S edits of each of P instructions, left at each step 1 .. T - 1 (0 is NaN: no step is
    drawn, all samples would be the same).

    One chain per sample, drawn to its end, is left at every step: the samples at k + 1 share the noise of those at k.
    All samples of an instruction start from one noise. All processes return the same.
    """
    config, policy = run.config, run.policy
    steps = config.sampling.num_inference_steps
    chosen = prompt_indices(len(run.prompts), TRIED_PROMPTS, seed=config.seed, iteration=iteration)
    rows = [run.prompts[row] for row in chosen for _ in range(TRIED_SAMPLES)]
    pieces: list[tuple[list[int], Tensor]] = []
    accelerator, size = run.accelerator, config.sampling.batch_size
    for slots, counts in shares(len(rows), size, accelerator.process_index, accelerator.num_processes):
        batch = Batch(
            [rows[s].text for s in slots],
            [(config.seed, iteration, "exit", s) for s in slots],
            call_arguments(config.sampling),
            [(config.seed, iteration, "exit", "group", s // TRIED_SAMPLES) for s in slots],
            batch_inputs(config.sampling.inputs, [rows[s] for s in slots]),
        )
        chain = policy.roll_out(batch, kernel, range(steps - 1), stop=steps - 1)
        for k in range(1, steps):
            final = take_shortcut(policy, batch, chain.states[k], chain.sigmas, k, settings.shortcut)
            if counts:
                pieces.append(([(k - 1) * len(rows) + s for s in slots], policy.decode(batch, final).cpu()))
            run.loop.advance_or_leave(0)
    # A group is the samples of one instruction that were left at one step.
    group = torch.arange(len(rows) * (steps - 1)) // TRIED_SAMPLES
    scored = score(run.scorers, pieces, rows * (steps - 1), group.tolist(), run.loop.alive)
    total = compose.evaluate(scored.values, run.scorers.components).view(steps - 1, TRIED_PROMPTS, TRIED_SAMPLES)
    return torch.cat([torch.full_like(total[:1], torch.nan), total]).transpose(0, 1)


def draw(
    policy: Policy,
    batch: Batch,
    slots: list[int],
    *,
    beat: Callable[[], None],
    kernel: Kernel,
    exit_at: int,
    shortcut: int,
    keep: bool,
) -> Samples:
    """Samples whose steps before `exit_at` are drawn and recorded, with their graph if it is to be kept, and whose end
    is a shortcut of so many steps."""
    steps = range(exit_at)
    trajectory = policy.roll_out(batch, kernel, steps, stop=exit_at, keep=steps if keep else ())
    beat()
    final = take_shortcut(policy, batch, trajectory.final, trajectory.sigmas, exit_at, shortcut)
    return independent(replace(trajectory, final=final), slots)


def take_shortcut(policy: Policy, batch: Batch, state: Tensor, sigmas: Tensor, exit_at: int, steps: int) -> Tensor:
    """Go from the state at step `exit_at` [B, ...] to sigma = 0, in `steps` Euler steps (never more than the grid
    has)."""
    levels = shortcut_sigmas(sigmas, exit_at, min(steps, len(sigmas) - 1 - exit_at))
    for sigma, sigma_next in pairwise(levels):
        state = kernels.ode(state, policy.velocity(batch, state, sigma), sigma, sigma_next).mean
    return state


# Talk2Move's choice of the steps to train (arXiv 2601.02356): stochastic up to an exit step, then a shortcut.
#
# Off-policy step evaluation: of samples that leave the chain at each exit step, the step whose rewards differ most is
# where exploring pays. Active step sampling: only the steps before it are sampled and trained, and a few ODE steps from
# it finish the picture.


def exit_variance(rewards: Tensor) -> Tensor:
    """Reward variance at each exit step, float64 [T]: mean over prompts of the population variance over samples.

    rewards [prompts, T, samples]: `[:, k]` of pictures whose steps 0 .. k - 1 were stochastic. NaN = no score: left
    out; a step where no prompt has two scores has variance 0.
    Raises ValueError for another number of dimensions.
    """
    if rewards.dim() != 3:
        raise ValueError(f"rewards must be [prompts, exit steps, samples], got {list(rewards.shape)}")
    values = rewards.detach().cpu().double()
    scored = ~values.isnan()
    count = scored.sum(dim=2)
    mean = values.nan_to_num(nan=0.0).sum(dim=2) / count.clamp(min=1)
    squares = torch.where(scored, values - mean[..., None], 0.0).square().sum(dim=2) / count.clamp(min=1)
    usable = count >= 2
    return torch.where(usable, squares, 0.0).sum(dim=0) / usable.sum(dim=0).clamp(min=1)


def exit_step(rewards: Tensor) -> int:
    """The exit step of largest variance, the first of equals. rewards [prompts, T, samples], as in `exit_variance`."""
    return int(exit_variance(rewards).argmax())


def shortcut_sigmas(sigmas: Tensor, exit_step: int, steps: int) -> Tensor:
    """Noise levels [steps + 1] of the shortcut: even from the grid's value at the exit step to 0.

    sigmas [T + 1], the full grid. (The released code ends at the grid's last value before 0, which leaves noise in the
    picture.) An exit at T needs no shortcut: steps must be 0 then, and only then.
    Raises ValueError otherwise, or for an exit step outside 1 .. T.
    """
    length = sigmas.numel() - 1
    if not 1 <= exit_step <= length:
        raise ValueError(f"the exit step must be in 1 .. {length}, got {exit_step}")
    if (steps == 0) != (exit_step == length) or steps < 0:
        raise ValueError(
            f"leaving {length} steps after {exit_step} needs "
            f"{'no shortcut' if exit_step == length else 'a shortcut of at least one step'}, got {steps} steps"
        )
    return torch.linspace(1.0, 0.0, steps + 1, dtype=sigmas.dtype, device=sigmas.device) * sigmas[exit_step]
