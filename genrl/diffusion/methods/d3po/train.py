"""D3PO: preferences between images, on the steps of their sampling (arXiv 2311.13231).

One iteration:

1. collect   K samples of each prompt, every step but the last drawn from N(mu, s^2 I)
2. compare   all pairs of a group; h = +1 where the first has the higher reward, -1 where the second has
3. update    of every step:  -log sigmoid(beta h (log clip rho_1 - log clip rho_2)),                     (eq. 10)
             rho = pi_theta(x_{t-1} | x_t, c) / pi_ref(x_{t-1} | x_t, c), kept in 1 +- clip_range

Every step of a chain inherits the preference of its image; the reference is the model before training.
docs/d3po.md has the equations, metrics and figures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.forward.noising import update
from genrl.diffusion.methods.d3po.settings import D3PO
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import every_step
from genrl.diffusion.steps.transitions import Tensors, compared_steps
from genrl.objectives.preferences import preference_pairs
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter


def train(run: DiffusionRun, settings: D3PO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    steps, draw = every_step(run, settings)
    for _ in run.iterations():
        # 1. Collect.
        rollouts = run.collect(draw)
        # 2, 3. Compare and update.
        metrics = learn(run, settings, rollouts, num_steps=len(steps))
        del rollouts
        run.finish(metrics)


def learn(run: DiffusionRun, settings: D3PO, rollouts: Rollouts, *, num_steps: int) -> dict[str, float]:
    """Steps 2 and 3 of the algorithm on the samples of one iteration; returns its metrics."""
    total, group, size = rollouts.total, rollouts.group, run.config.sampling.group_size

    def pairs_of(slots: list[int]) -> Tensor:
        return preference_pairs(total[slots], group[slots])

    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors] | None:
        pairs = pairs_of(micro_batch.slots)  # a group is whole within a micro-batch, so all its pairs are
        if len(pairs) == 0 and not run.weights.in_step:  # else the other processes evaluate theirs with us
            return None
        step = micro_batch.pieces[0].trajectory.step(k)
        with torch.no_grad(), run.weights.reference():
            reference = run.policy.replay(step).log_prob
        tensors = {"pairs": pairs, "reference_log_prob": reference, "counts": torch.tensor(float(len(pairs) > 0))}
        return step.batch, step.tensors() | tensors

    meter = Meter()
    meter.add("preference/pairs", torch.tensor([len(preference_pairs(total, group)) / (len(total) * (size - 1) / 2)]))
    update(run, settings, rollouts, num_steps, prepare, loss, meter, lambda slots: len(pairs_of(slots)) * num_steps)
    return meter.result()


def loss(settings: D3PO, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each pair at one step, [P], and metrics. pairs: (first, second, h), int64 [P, 3]."""
    out, outside, evidence = compared_steps(settings, policy, given)
    return {
        "loss": out.loss,
        "preference/correct": out.correct,
        "preference/logit": out.logit,
        "preference/clip_frac": outside,
        **evidence,
    }
