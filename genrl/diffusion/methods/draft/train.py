"""Direct reward back-propagation: DRaFT-K (arXiv 2309.17400), AlignProp (2310.03739) and ReFL (2304.05977).

One iteration, T deterministic steps x_T -> ... -> x_0, for a reward r(x_0, c) that is differentiable:

1. collect   x_0 of each prompt, without gradients; the state before the first trained step is kept
2. gradient  g = d L(r(decode(x_0), c)) / d x_0, one picture at a time;  L(r) = -r, or max(0, margin - r) (ReFL)
3. update    the trained steps again, with gradients:  minimise g . x_0(theta).  Its gradient is that of L, by the chain
             rule; the graphs of decoder and denoiser are never held together

Which steps are trained (`truncation`, `steps` = K):
    draft      the last K of every sample (DRaFT-K; K = T: DRaFT)
    alignprop  the last k, k uniform in 1 .. K, drawn once per iteration
    refl       one of the last K, drawn once per iteration; there the chain ends, and x_0 is the prediction
               x_0_hat = x - sigma v (ReFL, algorithm 1)
With several trained steps each is computed again in the backward pass instead of kept (activation checkpointing): K
steps take the memory of one. docs/draft.md has metrics and figures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from genrl.diffusion.forward.direct import chain_loss, recorded_chain, reward_gradient, reward_loss
from genrl.diffusion.methods.draft.settings import Draft
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.forest import Piece, Samples
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter, descend

__all__ = ["loss", "train"]


def train(run: DiffusionRun, settings: Draft) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        steps = trained_steps(settings, run.config.sampling.num_inference_steps, run.config.seed, iteration)
        # 1. Collect and score; the scores of rewards without gradients are for the log.
        rollouts = run.collect(partial(draw, settings=settings, steps=steps))
        # 2, 3. Differentiate and update.
        metrics = learn(run, settings, rollouts, steps)
        del rollouts
        run.finish(metrics)


def trained_steps(settings: Draft, num_steps: int, seed: int, iteration: int) -> range:
    """The steps that gradients run through in this iteration."""
    most = settings.last_steps(num_steps)
    if settings.truncation == "alignprop":
        return random_truncation(num_steps, high=most, seed=seed, update=iteration)
    if settings.truncation == "refl":
        step = random_late_step(num_steps, low=num_steps - most, seed=seed, update=iteration)
        return range(step, step + 1)
    return last_steps(num_steps, most)


def draw(
    policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None], settings: Draft, steps: range
) -> Samples:
    """Samples without gradients; their piece begins with the state before the first trained step."""
    state = policy.roll_out(batch, stop=steps.start).final if steps.start > 0 else None
    clean = settings.truncation == "refl"
    tail = policy.roll_out(batch, start=steps.start, stop=steps.stop, state=state, predict=clean)
    final = tail.predicted if clean else tail.final
    assert final is not None
    return Samples(slots, batch, final, tail.sigmas, [Piece(tail, {})])


def learn(run: DiffusionRun, settings: Draft, rollouts: Rollouts, steps: range) -> dict[str, float]:
    """Steps 2 and 3 of the algorithm on the samples of one iteration; returns its metrics."""
    meter = Meter()
    meter.add("draft/steps", torch.tensor([float(len(steps))]))

    def prepare(micro_batch: MicroBatch) -> Recorded:
        rewarded = reward_gradient(run, rollouts, micro_batch, partial(reward_loss, margin=settings.margin))
        meter.add("loss", rewarded.loss)
        meter.add("draft/pull", rewarded.gradient.flatten(1).norm(dim=1))
        return recorded_chain(micro_batch.batch, micro_batch.pieces[0].trajectory.initial, steps, rewarded.gradient)

    run.start_training(len(rollouts.mine))
    parts = rollouts.mine.values()
    norms = descend(run.loop, settings, run.policy, parts, prepare, loss, divisor=rollouts.num_samples)
    meter.note({"grad_norm": norms["policy"]})
    return meter.result()


def loss(settings: Draft, policy: Policy, given: Recorded) -> dict[str, Tensor]:
    """The trained steps again, with gradients: g . x_0, [B]."""
    return chain_loss(policy, given, clean=settings.truncation == "refl")


# Through which denoising steps the gradient of a differentiable reward runs.
#
# Steps count from 0 = from pure noise, to num_steps - 1 = the last. What is sampled is a function of (seed, update):
# the same on all processes, with nothing to save.


def last_steps(num_steps: int, truncation: int) -> range:
    """The last `truncation` steps: DRaFT-K (arXiv 2309.17400, alg. 1). All of them: DRaFT.

    Raises ValueError unless 1 <= truncation <= num_steps.
    """
    if not 1 <= truncation <= num_steps:
        raise ValueError(f"the gradient runs through 1 to {num_steps} of {num_steps} steps, got {truncation}")
    return range(num_steps - truncation, num_steps)


def random_truncation(num_steps: int, *, high: int, seed: int, update: int) -> range:
    """The last K steps, K uniform in 1 .. high: AlignProp (arXiv 2310.03739).

    Raises ValueError unless 1 <= high <= num_steps.
    """
    if not 1 <= high <= num_steps:
        raise ValueError(f"the truncation must be chosen from 1 .. {num_steps}, got 1 .. {high}")
    return last_steps(num_steps, 1 + int(torch.randint(high, (1,), generator=generator(seed, "truncation", update))))


def random_late_step(num_steps: int, *, low: int, seed: int, update: int) -> int:
    """One step, uniform in low .. num_steps - 1, whose prediction of the data is scored: ReFL (arXiv 2304.05977,
    alg. 1; published range 30 .. 39 of 40 steps).

    Raises ValueError unless 0 <= low < num_steps.
    """
    if not 0 <= low < num_steps:
        raise ValueError(f"the step must be chosen from 0 .. {num_steps - 1}, got {low} .. {num_steps - 1}")
    return low + int(torch.randint(num_steps - low, (1,), generator=generator(seed, "late step", update)))
