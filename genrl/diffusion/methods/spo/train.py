"""SPO: preferences between candidates for one next state (arXiv 2406.04314).

One iteration, for a chain of every slot, with k candidates from step d on:

1. crawl     at state x_t draw k candidates x_{t-1} ~ pi_theta(. | x_t, c); evaluate the model on all of them; go on
             from one drawn uniformly, whose evaluation also makes the next candidates
2. score     every candidate x_{t-1}: the reward of its predicted clean sample x_0(x_{t-1}), decoded; of the last step
             the reward of the picture itself
3. compare   best and worst candidate of a state are a pair, where tanh((s_max - s_min) / 2) > threshold
4. update    -log sigmoid(beta (log clip r_w - log clip r_l)),  r = pi_theta / pi_ref of the candidate, kept in
             1 +- clip_range; both sides of a pair share one evaluation of the model

Step 2 is not the paper's: it scores noisy candidates by a preference model trained for every noise level. Here the
configured rewards judge the predicted clean sample, early in the chain a blurred one, so comparisons are less certain
there. docs/spo.md has equations and figures.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.diffusion.methods.spo.candidates import Candidates, Found, draw, judge
from genrl.diffusion.methods.spo.settings import SPO
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel, StepRecord
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import choose_kernel, last_step_is_drawn
from genrl.diffusion.steps.replays import Tensors, compared_steps, replayed
from genrl.diffusion.updating import update
from genrl.mdp.plan import SamplingPlan
from genrl.objectives.preferences.preference import step_winners
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter


class Pairs(NamedTuple):
    """All comparisons of an iteration, by chain (slot) and compared step: the candidates `win` and `lose`, int64
    [N, S]; `valid`, whether it counts, bool [N, S]; `gap`, best score minus worst, float64 [N, S], NaN where a
    candidate has no score."""

    win: Tensor
    lose: Tensor
    valid: Tensor
    gap: Tensor


def train(run: DiffusionRun, settings: SPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    config, policy = run.config, run.policy
    sampling = config.sampling
    for _ in run.iterations():
        plan = settings.plan(sampling, last=last_step_is_drawn(policy))
        kernel = choose_kernel(run, settings, plan)
        # 1. Crawl. The chains' ends are scored too: they are the samples that a run reports.
        found: Found = {}
        rollouts = run.collect(partial(draw, plan=plan, kernel=kernel, batch_size=sampling.batch_size, found=found))
        # 2, 3. Score and compare.
        pairs = compare(judge(run, rollouts, found, plan), threshold=settings.threshold)
        # 4. Update.
        metrics = learn(run, settings, rollouts, found, pairs, plan, kernel)
        del rollouts, found
        run.finish(metrics)


def compare(scores: Tensor, *, threshold: float) -> Pairs:
    """The pair of every state from the scores [N, S, k] of its candidates. Without a score for each there is none."""
    win, lose, valid = (x.view(scores.shape[:2]) for x in step_winners(scores.flatten(0, 1).T, threshold=threshold))
    gap = scores.amax(dim=-1) - scores.amin(dim=-1)
    return Pairs(win, lose, valid & ~gap.isnan(), gap)


def learn(
    run: DiffusionRun, settings: SPO, rollouts: Rollouts, found: Found, pairs: Pairs, plan: SamplingPlan, kernel: Kernel
) -> dict[str, float]:
    """Step 4 of the algorithm on the pairs of one iteration; returns its metrics."""
    meter = Meter()
    meter.add("spo/valid_ratio", pairs.valid)
    if not bool(pairs.gap.isnan().all()):
        meter.add("spo/gap", pairs.gap[~pairs.gap.isnan()])

    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors] | None:
        win, lose, counts = (table[micro_batch.slots, k] for table in (pairs.win, pairs.lose, pairs.valid))
        # A sharded model is evaluated by all processes together: each as often as the others.
        rows = torch.arange(len(counts)) if run.weights.in_step else counts.nonzero()[:, 0]
        if len(rows) == 0:
            return None
        chosen, batch = torch.stack([win, lose], dim=1)[rows], micro_batch.batch.take(rows.tolist())
        given = pair_of(batch, kernel, plan.splits[k], found[micro_batch.slots[0]][plan.splits[k]], rows, chosen)
        with torch.no_grad(), run.weights.reference():
            reference = replayed(settings, run.policy, Recorded(batch, given)).log_prob
        return batch, given | {"counts": counts[rows].to(reference), "reference_log_prob": reference}

    steps = len(plan.splits)
    update(run, settings, rollouts, steps, prepare, loss, meter, count=lambda slots: int(pairs.valid[slots].sum()))
    return meter.result()


def pair_of(batch: Batch, kernel: Kernel, step: int, candidates: Candidates, rows: Tensor, chosen: Tensor) -> Tensors:
    """A step of these chains with the winner and the loser (`chosen` int64 [n, 2]) of each as its actions [2 n, ...]:
    neighbours, the winner first."""
    state, drawn = candidates.state[rows], candidates.drawn[rows[:, None], chosen].flatten(0, 1)
    record = StepRecord(batch, kernel.at(step), step, state, drawn, torch.arange(len(rows)).repeat_interleave(2))
    return record.tensors() | {"pairs": torch.tensor([(2 * r, 2 * r + 1, 1) for r in range(len(rows))])}


def loss(settings: SPO, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each pair at one step, [n], and metrics: clip_frac of winner and loser, [2, n]."""
    out, outside, evidence = compared_steps(settings, policy, given)
    outside = outside.view(-1, 2).T
    return {"loss": given["counts"] * out.loss, "spo/correct": out.correct, "spo/clip_frac": outside, **evidence}
