"""Chains of which every state from step d on has k candidates for the next one: one of them goes on (SPO, 2406.04314).

Model calls per chain of T steps: d + 1 + k (T - d - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel, NoiseKey
from genrl.diffusion.rollout.forest import Drawn
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.rollout.scoring import Scoring
from genrl.mdp.noise import generator
from genrl.mdp.plan import SamplingPlan
from genrl_rewards import compose
from genrl_rewards.compose import Running

if TYPE_CHECKING:
    from genrl.diffusion.run import DiffusionRun


class Candidates(NamedTuple):
    """For the next state of n chains at one step: `state` that they were drawn from, float32 [n, ...]; `drawn`, and the
    clean samples that are predicted from them, float32 [n, k, ...]."""

    state: Tensor
    drawn: Tensor
    clean: Tensor


Found = dict[int, dict[int, Candidates]]  # first slot of a micro-batch -> step -> candidates


def draw(
    policy: Policy,
    batch: Batch,
    slots: list[int],
    *,
    beat: Callable[[], None],
    plan: SamplingPlan,
    kernel: Kernel,
    batch_size: int,
    found: Found,
) -> Drawn:
    """The chains of one micro-batch, from noise to sample; their candidates go into `found`, by the first slot.

    batch_size: rows of one model call, hence candidates evaluated together.
    """
    together = max(1, batch_size // plan.branching[plan.splits[0]])
    parts = [
        crawl(policy, batch.take(rows.tolist()), plan, kernel) for rows in torch.arange(len(batch)).split(together)
    ]
    of_step = {i: zip(*(part[i] for part, _, _ in parts), strict=True) for i in plan.splits}
    found[slots[0]] = {i: Candidates(*map(torch.cat, several)) for i, several in of_step.items()}
    return Drawn(slots, batch, torch.cat([final for _, final, _ in parts]), parts[0][2], [])


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
    state, found = last.states[first], dict[int, Candidates]()
    for i in range(first + 1, plan.steps):
        drawn, going = last.final, chosen_rows(batch, ways, i)
        last = policy.roll_out(
            many,
            kernel,
            plan.stochastic,
            start=i,
            stop=i + 1,
            state=drawn,
            children=Children(going[of_chain], keys) if i in plan.splits else None,
            predict=True,
        )
        assert last.predicted is not None
        found[i - 1] = Candidates(state, *(x.unflatten(0, (chains, ways)) for x in (drawn, last.predicted)))
        state = drawn[going]
    if plan.steps - 1 in plan.splits:  # nothing is left to predict
        going = chosen_rows(batch, ways, plan.steps)
        pictures = last.final.unflatten(0, (chains, ways))
        found[plan.steps - 1] = Candidates(state, pictures, pictures)
    return found, last.final[going], last.sigmas


def chosen_rows(batch: Batch, ways: int, depth: int) -> Tensor:
    """Row of the candidate at this depth from which each chain goes on, drawn uniformly, int64 [n]."""
    picks = [int(torch.randint(ways, (), generator=generator(*key, "continue", depth))) for key in batch.keys]
    return torch.arange(len(batch)) * ways + torch.tensor(picks)


def judge(run: DiffusionRun, rollouts: Rollouts, found: Found, plan: SamplingPlan) -> Tensor:
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
            for column, candidates in enumerate(found[micro_batch.slots[0]].values()):
                slots = [(slot * number + column) * ways + j for slot in micro_batch.slots for j in range(ways)]
                clean = candidates.clean.flatten(0, 1)
                for some in torch.arange(len(slots)).split(sampling.batch_size):
                    with run.loop.timed("decode"), torch.no_grad():
                        images = policy.decode(micro_batch.batch.take(of_chain[some].tolist()), clean[some]).cpu()
                    scoring.add([slots[row] for row in some.tolist()], images)
                run.loop.alive()
        with run.loop.timed("score"):
            scored = scoring.result()
    running = {label: Running(**kept) for label, kept in run.loop.memory.get("scores", {}).items()}
    combined = compose.combine(scored.values, run.scorers.components, group, iteration=run.iteration, running=running)
    return combined.total.view(len(chains), number, ways)
