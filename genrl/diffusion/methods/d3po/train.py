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

from genrl.diffusion.methods.d3po.settings import D3PO
from genrl.diffusion.methods.metering import Meter
from genrl.diffusion.methods.plans import every_step
from genrl.diffusion.methods.steps import Tensors, evidence, recorded_step, replayed
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.objectives.preferences.preference import preference_pairs, step_preference_loss
from genrl.runtime.recorded import Recorded


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
    policy, weights = run.policy, run.weights
    meter = Meter()
    whole = preference_pairs(rollouts.total, rollouts.group)
    group = run.config.sampling.group_size
    meter.add("preference/pairs", torch.tensor([len(whole) / (rollouts.num_samples * (group - 1) / 2)]))
    run.start_training(settings.epochs * num_steps * len(rollouts.mine))
    for _ in range(settings.epochs):
        for micro_batches, slots in rollouts.updates(settings.updates):
            divisor = len(preference_pairs(rollouts.total[slots], rollouts.group[slots])) * num_steps
            for micro_batch in micro_batches:
                # A group is whole within a micro-batch, so all its pairs are.
                pairs = preference_pairs(rollouts.total[micro_batch.slots], rollouts.group[micro_batch.slots])
                if len(pairs) == 0 and not weights.in_step:  # else the other processes evaluate theirs with us
                    continue
                trajectory = micro_batch.pieces[0].trajectory
                for i in trajectory.log_probs:
                    with torch.no_grad(), weights.reference():
                        reference = policy.replay(trajectory, i).log_prob
                    recorded = recorded_step(trajectory, i, {"pairs": pairs, "reference_log_prob": reference})
                    results = loss(settings, policy, recorded)
                    run.backward(settings, results, recorded, divisor=max(divisor, 1))
                    if len(pairs) > 0:
                        meter.add_all(results)
            meter.add("grad_norm", torch.tensor([run.step()]))
    return meter.result()


def loss(settings: D3PO, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each pair at one step, [P], and metrics. pairs: (first, second, h), int64 [P, 3]."""
    new, reference = replayed(settings, policy, given), given["reference_log_prob"]
    log_prob = new.log_prob
    first, second, preference = given["pairs"].to(log_prob.device).unbind(1)
    out = step_preference_loss(
        log_prob[first],
        reference[first],
        log_prob[second],
        reference[second],
        preference,
        beta=settings.beta,
        clip=settings.clip_range,
    )
    outside = (log_prob - reference).exp().sub(1.0).abs() > settings.clip_range
    return {
        "loss": out.loss,
        "preference/correct": out.correct,
        "preference/logit": out.logit,
        "preference/clip_frac": outside,
        **evidence(new),
    }
