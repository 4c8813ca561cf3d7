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

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.diffusion.forward.noising import update
from genrl.diffusion.methods.spo.settings import SPO
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel, NoiseKey, StepRecord
from genrl.diffusion.rollout.forest import Samples
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.rollout.scoring import Scoring
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import choose_kernel, last_step_is_stochastic
from genrl.diffusion.steps.transitions import Tensors, compared_steps, replayed
from genrl.mdp.noise import generator
from genrl.mdp.plan import SamplingPlan
from genrl.objectives.preferences import step_winners
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl_rewards import compose
from genrl_rewards.compose import Running


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
        plan = settings.plan(sampling, last=last_step_is_stochastic(policy))
        kernel = choose_kernel(run, settings, plan)
        # 1. Crawl. The chains' ends are scored too: they are the samples that a run reports.
        candidates: CandidateTable = {}
        rollouts = run.collect(
            partial(draw, plan=plan, kernel=kernel, batch_size=sampling.batch_size, candidates=candidates)
        )
        # 2, 3. Score and compare.
        pairs = compare(judge(run, rollouts, candidates, plan), threshold=settings.threshold)
        # 4. Update.
        metrics = learn(run, settings, rollouts, candidates, pairs, plan, kernel)
        del rollouts, candidates
        run.finish(metrics)


def compare(scores: Tensor, *, threshold: float) -> Pairs:
    """The pair of every state from the scores [N, S, k] of its candidates. Without a score for each there is none."""
    win, lose, valid = (x.view(scores.shape[:2]) for x in step_winners(scores.flatten(0, 1).T, threshold=threshold))
    gap = scores.amax(dim=-1) - scores.amin(dim=-1)
    return Pairs(win, lose, valid & ~gap.isnan(), gap)


def learn(
    run: DiffusionRun,
    settings: SPO,
    rollouts: Rollouts,
    candidates: CandidateTable,
    pairs: Pairs,
    plan: SamplingPlan,
    kernel: Kernel,
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
        given = pair_of(batch, kernel, plan.splits[k], candidates[micro_batch.slots[0]][plan.splits[k]], rows, chosen)
        with torch.no_grad(), run.weights.reference():
            reference = replayed(settings, run.policy, Recorded(batch, given)).log_prob
        return batch, given | {"counts": counts[rows].to(reference), "reference_log_prob": reference}

    steps = len(plan.splits)
    update(run, settings, rollouts, steps, prepare, loss, meter, count=lambda slots: int(pairs.valid[slots].sum()))
    return meter.result()


def pair_of(batch: Batch, kernel: Kernel, step: int, candidates: Candidates, rows: Tensor, chosen: Tensor) -> Tensors:
    """A step of these chains with the winner and the loser (`chosen` int64 [n, 2]) of each as its actions [2 n, ...]:
    neighbours, the winner first."""
    state, next_states = candidates.state[rows], candidates.next_states[rows[:, None], chosen].flatten(0, 1)
    record = StepRecord(batch, kernel.at(step), step, state, next_states, torch.arange(len(rows)).repeat_interleave(2))
    return record.tensors() | {"pairs": torch.tensor([(2 * r, 2 * r + 1, 1) for r in range(len(rows))])}


def loss(settings: SPO, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each pair at one step, [n], and metrics: clip_frac of winner and loser, [2, n]."""
    out, outside, evidence = compared_steps(settings, policy, given)
    outside = outside.view(-1, 2).T
    return {"loss": given["counts"] * out.loss, "spo/correct": out.correct, "spo/clip_frac": outside, **evidence}


class Candidates(NamedTuple):
    """For the next state of n chains at one step: the `state` before, float32 [n, ...]; `next_states` that were drawn
    from it, and the clean samples that are predicted from them, float32 [n, k, ...]."""

    state: Tensor
    next_states: Tensor
    clean: Tensor


CandidateTable = dict[int, dict[int, Candidates]]  # first slot of a micro-batch -> step -> candidates


def draw(
    policy: Policy,
    batch: Batch,
    slots: list[int],
    *,
    beat: Callable[[], None],
    plan: SamplingPlan,
    kernel: Kernel,
    batch_size: int,
    candidates: CandidateTable,
) -> Samples:
    """The chains of one micro-batch, from noise to sample; their candidates go into `candidates`, by the first slot.

    batch_size: rows of one model call, hence candidates evaluated together.
    """
    together = max(1, batch_size // plan.branching[plan.splits[0]])
    parts = [
        crawl(policy, batch.take(rows.tolist()), plan, kernel) for rows in torch.arange(len(batch)).split(together)
    ]
    of_step = {i: zip(*(part[i] for part, _, _ in parts), strict=True) for i in plan.splits}
    candidates[slots[0]] = {i: Candidates(*map(torch.cat, several)) for i, several in of_step.items()}
    return Samples(slots, batch, torch.cat([final for _, final, _ in parts]), parts[0][2], [])


def crawl(
    policy: Policy, batch: Batch, plan: SamplingPlan, kernel: Kernel
) -> tuple[dict[int, Candidates], Tensor, Tensor]:
    """Candidates by compared step, final states [n, ...] and schedule of n chains. The rows of a chain's candidates
    are neighbours: candidate j of chain r is row r k + j."""
    chains, first = len(batch), plan.splits[0]
    ways = plan.branching[first]
    of_chain = torch.arange(chains).repeat_interleave(ways)
    many = batch.take(of_chain.tolist())
    keys: list[NoiseKey] = [(*key, "candidate", j) for key in batch.keys for j in range(ways)]

    last = policy.roll_out(batch, kernel, plan.stochastic, stop=first + 1, children=Children(of_chain, keys))
    state, candidates = last.states[first], dict[int, Candidates]()
    for i in range(first + 1, plan.steps):
        states, going = last.final, chosen_rows(batch, ways, i)
        last = policy.roll_out(
            many,
            kernel,
            plan.stochastic,
            start=i,
            stop=i + 1,
            state=states,
            children=Children(going[of_chain], keys) if i in plan.splits else None,
            predict=True,
        )
        assert last.predicted is not None
        candidates[i - 1] = Candidates(state, *(x.unflatten(0, (chains, ways)) for x in (states, last.predicted)))
        state = states[going]
    if plan.steps - 1 in plan.splits:  # nothing is left to predict
        going = chosen_rows(batch, ways, plan.steps)
        pictures = last.final.unflatten(0, (chains, ways))
        candidates[plan.steps - 1] = Candidates(state, pictures, pictures)
    return candidates, last.final[going], last.sigmas


def chosen_rows(batch: Batch, ways: int, depth: int) -> Tensor:
    """Row of the candidate at this depth from which each chain goes on, drawn uniformly, int64 [n]."""
    picks = [int(torch.randint(ways, (), generator=generator(*key, "continue", depth))) for key in batch.keys]
    return torch.arange(len(batch)) * ways + torch.tensor(picks)


def judge(run: DiffusionRun, rollouts: Rollouts, candidates: CandidateTable, plan: SamplingPlan) -> Tensor:
    """Total reward of every candidate of all processes, float64 [N, S, k]; NaN = no score. A collective.

    The candidates of one state are a group, to rewards that compare and to those that are normalised in groups.
    """
    policy, sampling = run.policy, run.config.sampling
    ways, number = plan.branching[plan.splits[0]], len(plan.splits)
    chains = [row for row in run.iteration_prompts for _ in range(sampling.group_size)]
    rows = [chain for chain in chains for _ in range(number * ways)]
    group = torch.arange(len(chains) * number).repeat_interleave(ways)
    background = sampling.score_in_background
    with Scoring(run.scorers, rows, group.tolist(), background=background, beat=run.loop.alive) as scoring:
        for micro_batch in rollouts.mine.values():
            of_chain = torch.arange(len(micro_batch.slots)).repeat_interleave(ways)
            for column, of_step in enumerate(candidates[micro_batch.slots[0]].values()):
                slots = [(slot * number + column) * ways + j for slot in micro_batch.slots for j in range(ways)]
                clean = of_step.clean.flatten(0, 1)
                for some in torch.arange(len(slots)).split(sampling.batch_size):
                    with run.loop.timed("decode"), torch.no_grad():
                        images = policy.decode(micro_batch.batch.take(of_chain[some].tolist()), clean[some]).cpu()
                    scoring.add([slots[row] for row in some.tolist()], images)
                run.loop.alive()
        with run.loop.timed("score"):
            scored = scoring.result()
    running = {label: Running(**statistics) for label, statistics in run.loop.memory.get("scores", {}).items()}
    combined = compose.combine(scored.values, run.scorers.components, group, iteration=run.iteration, running=running)
    return combined.total.view(len(chains), number, ways)
