"""The update that policy gradients on denoising steps share: trained transitions, their losses, and what they measure.

A method gives its loss of one transition, (settings, policy, what was recorded) -> results; what is recorded is the
step, its advantage and weight, log p_old, and, with a divergence, what the reference says of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from genrl.diffusion.metering import EVIDENCE, Meter
from genrl.diffusion.policy.guidance import without_guidance
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Replayed, Trajectory
from genrl.diffusion.rollout.forest import Draw, Piece, roll_out
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.edges import Edges
from genrl.diffusion.steps.estimation import estimate
from genrl.diffusion.steps.layout import roots_together
from genrl.diffusion.steps.on_policy import check_on_policy
from genrl.diffusion.steps.plans import choose_kernel, kept_steps, sampling_plan, trained_steps
from genrl.diffusion.steps.records import evidence, recorded_step, replayed
from genrl.diffusion.steps.settings import PolicyGradient
from genrl.mdp.plan import SamplingPlan
from genrl.objectives.surrogates.policy_losses import (
    SurrogateOutput,
    clipped_surrogate,
    kl_gaussian,
    kl_gaussian_dt,
    kl_k2,
    kl_mean_square,
    kl_velocity,
    kl_x_prediction,
    staleness_weight,
)
from genrl.runtime.loop.recorded import Recorded

Results = dict[str, Tensor]
REFERENCE = {"gaussian": "mean", "gaussian_dt": "mean", "mean_square": "mean", "k2": "log_prob"}
"""What a divergence reads of the reference; the others read its output."""


OWN = ("loss", "unweighted", "surrogate", "ratio", "clipped")
"""Results of every such loss, which are logged under other names."""


class Action(NamedTuple):
    """A trained transition of one piece of a micro-batch: its number among those of this process, the step, and log
    p_old of each sample [B].

    importance: of samples that older weights drew, p_old over the policy that drew them [B]; None: it is that policy.
    """

    number: int
    piece: Piece
    step: int
    old_log_prob: Tensor
    importance: Tensor | None = None


Settings = TypeVar("Settings", bound=PolicyGradient)
Loss = Callable[[Settings, Policy, Recorded], Results]
Learn = Callable[[DiffusionRun, Settings, Rollouts, SamplingPlan], dict[str, float]]
"""Estimate and update by the samples of an iteration; returns its metrics."""
Further = Callable[[Action], Mapping[str, Tensor]]
"""What a method records of a transition beside what all do."""


def sampler(run: DiffusionRun, settings: PolicyGradient, plan: SamplingPlan) -> Draw:
    """How the samples of a batch of prompts are made."""
    return partial(
        roll_out,
        plan=plan,
        kernel=choose_kernel(run, settings, plan),
        batch_size=run.config.sampling.batch_size,
        keep=kept_steps(run.config, settings, run.iteration),
    )


def train_policy_gradient(
    run: DiffusionRun, settings: Settings, learn: Learn[Settings], *, scaled: bool = False
) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end: collect and score the
    samples of each, and `learn` from them. scaled: as `check_on_policy` has it."""
    for iteration in run.iterations():
        plan = sampling_plan(run.config, settings, iteration)
        rollouts = collect(run, plan, partial(sampler, run, settings))
        check_on_policy(run, rollouts, clip=min(settings.clip_bounds), scaled=scaled)
        metrics = learn(run, settings, rollouts, plan)
        del rollouts
        run.finish(metrics)


def collect(run: DiffusionRun, plan: SamplingPlan, draw_by: Callable[[SamplingPlan], Draw]) -> Rollouts:
    """The scored samples of one iteration; trees that share a root are kept in one micro-batch."""
    together = roots_together(run.config, plan, run.process.replicas) if plan.splits else None

    def another(iteration: int) -> Draw:
        return draw_by(sampling_plan(run.config, run.settings, iteration))

    leaves = plan.leaves // plan.roots
    return run.collect(draw_by(plan), draws=another, leaves=leaves, roots_together=together)


@torch.no_grad()
def actions_of(
    run: DiffusionRun, settings: PolicyGradient, rollouts: Rollouts, edges: Edges
) -> dict[int, list[Action]]:
    """First slot of a micro-batch -> its trained transitions. log p_old is as recorded; or, where the trained policy
    goes without the guidance that sampled, or older weights drew, evaluated now, before the first update, under the
    conditions it is trained in. Steps of which no sample is trained are left out."""
    found: dict[int, list[Action]] = {}
    number = 0
    for micro_batch in rollouts.mine.values():
        actions = found[micro_batch.slots[0]] = []
        for piece in micro_batch.pieces:
            trajectory = piece.trajectory
            logs = {i: p for i, p in trajectory.log_probs.items() if bool(edges.weight[i, piece.slots[i]].any())}
            importance: dict[int, Tensor] = {}
            if run.age or not settings.guidance_in_training:
                batch = trained_under(run.policy, settings, trajectory.batch)
                drawn, logs = logs, {i: replayed_before(run, trajectory, i, batch).log_prob for i in logs}
                importance = {i: staleness_weight(logs[i], drawn[i]) for i in logs} if run.age else {}
            for i, log_prob in logs.items():
                actions.append(Action(number, piece, i, log_prob, importance.get(i)))
                number += 1
    return found


def replayed_before(run: DiffusionRun, trajectory: Trajectory, step: int, batch: Batch) -> Replayed:
    """A transition before the first update, where the iteration can be left."""
    with run.loop.fitting():
        found = run.policy.replay(trajectory, step, batch)
    run.loop.advance_or_leave(0)
    return found


def trained_under(policy: Policy, settings: PolicyGradient, batch: Batch) -> Batch:
    """The conditions of the policy that is trained: those of sampling, or the same without guidance."""
    return batch if settings.guidance_in_training else without_guidance(policy, batch)


def update(
    run: DiffusionRun,
    settings: Settings,
    rollouts: Rollouts,
    edges: Edges,
    actions: Mapping[int, list[Action]],
    loss: Loss[Settings],
    meter: Meter,
    *,
    further: Further = lambda action: {},
    seen: Callable[[Action, Results], None] = lambda action, results: None,
) -> None:
    """The optimiser steps of one iteration. further: what the method's loss reads beside the step; seen: is told what
    came of each."""
    run.start_training(settings.epochs * sum(map(len, actions.values())))
    for _ in range(settings.epochs):
        for micro_batches, slots in rollouts.updates(settings.updates):
            divisor = float(edges.weight[:, slots].sum())
            for action in [action for micro_batch in micro_batches for action in actions[micro_batch.slots[0]]]:
                with run.loop.fitting():
                    recorded = record(run, settings, edges, action, further(action))
                    results = loss(settings, run.policy, recorded)
                    run.backward(settings, results, recorded, divisor=divisor)
                measure(meter, results, recorded)
                seen(action, results)
            meter.add("grad_norm", torch.tensor([run.step()]))


def record(
    run: DiffusionRun, settings: PolicyGradient, edges: Edges, action: Action, further: Mapping[str, Tensor]
) -> Recorded:
    """All that the loss of a transition reads."""
    policy, trajectory, i = run.policy, action.piece.trajectory, action.step
    batch, slots = trained_under(policy, settings, trajectory.batch), action.piece.slots[action.step]
    tables = {"advantage": edges.advantage, "weight": edges.weight, "moves": edges.moves}
    given = {name: table[i, slots].to(policy.device) for name, table in tables.items()}
    given |= {"old_log_prob": action.old_log_prob, **further}
    if action.importance is not None:  # surrogates are linear in it where they are not clipped
        given |= {"importance": action.importance, "advantage": given["advantage"] * action.importance}
    if settings.kl_weight > 0:
        with torch.no_grad(), run.weights.reference():
            found = policy.replay(trajectory, i, batch)
        given["reference"] = getattr(found, REFERENCE.get(settings.kl, "model_output"))
    graph = trajectory.graphs.pop(i) if settings.keep_graph else None
    return recorded_step(trajectory, i, given, batch=batch, graph=graph)


def penalised(
    settings: PolicyGradient,
    surrogate: SurrogateOutput,
    new: Replayed,
    given: Recorded,
    further: Mapping[str, tuple[float, Tensor]] | None = None,
) -> Results:
    """The loss of a transition, [B]: surrogate + kl_weight KL + further terms, each (weight, value) by the name it is
    logged under; times its weight in the update. And what it is made of."""
    value, terms = surrogate.loss, {}
    if settings.kl_weight > 0:
        terms["kl"] = reference_kl(settings.kl, new, given["reference"])
        value = value + settings.kl_weight * terms["kl"]
    for name, (weight, term) in (further or {}).items():
        terms[name] = term
        value = value + weight * term
    value = value * given["moves"]  # no score, or a group without spread: no update, by its KL neither
    return {
        **evidence(new),
        "ratio": surrogate.ratio,
        "clipped": surrogate.clipped,
        "surrogate": surrogate.loss,
        **terms,
        "unweighted": value,
        "loss": given["weight"] * value,
    }


def clipped_loss(settings: PolicyGradient, policy: Policy, given: Recorded) -> Results:
    """Flow-GRPO's loss of one transition, [B]: the clipped surrogate and its divergence (arXiv 2505.05470, eq. 5)."""
    new = replayed(settings, policy, given)
    low, high = settings.clip_bounds
    surrogate = clipped_surrogate(new.log_prob, given["old_log_prob"], given["advantage"], low, high)
    return penalised(settings, surrogate, new, given)


def flow_grpo_update(
    run: DiffusionRun,
    settings: Settings,
    rollouts: Rollouts,
    plan: SamplingPlan,
    advantages: Tensor,
    loss: Loss[Settings] = clipped_loss,
    *,
    grouped: bool = True,
) -> dict[str, float]:
    """Steps 3 and 4 of Flow-GRPO on samples with these advantages, float64 [N]; returns the iteration's metrics.
    grouped: as `estimate` has it."""
    meter = Meter()
    edges = estimate(run, settings, rollouts, plan, advantages, meter, grouped=grouped)
    update(run, settings, rollouts, edges, actions_of(run, settings, rollouts, edges), loss, meter)
    return meter.result() | window_metrics(run, settings)


def measure(meter: Meter, results: Results, given: Recorded) -> None:
    """Log what came of a transition."""
    advantage, weight = given["advantage"], given["weight"]
    for name in [name for name in results if name not in (*OWN, *EVIDENCE)]:
        meter.add(name, results[name], weight)
    meter.add("loss", results["unweighted"], weight)
    surrogate = SurrogateOutput(results["surrogate"], results["ratio"], results["clipped"])
    meter.add_surrogate(surrogate, advantage, weight)
    if "importance" in given:
        trained = weight > 0
        meter.add("importance/mean", given["importance"], trained)
        meter.add("importance/left_out", given["importance"] == 0, trained)
        meter.add("importance/max_abs_dev", (given["importance"] - 1.0).abs(), trained)


def reference_kl(kind: str, new: Replayed, reference: Tensor) -> Tensor:
    """Distance of the policy from the reference at the same state, [B], by its configured name. reference: its mean,
    log-probability or output there (`REFERENCE`)."""
    if kind == "gaussian":
        return kl_gaussian(new.mean, reference, new.std)
    if kind == "gaussian_dt":
        return kl_gaussian_dt(new.mean, reference, new.std, new.step.sigma - new.step.sigma_next)
    if kind == "mean_square":
        return kl_mean_square(new.mean, reference)
    if kind == "x_prediction":
        return kl_x_prediction(new.model_output, reference, new.step.sigma)
    if kind == "k2":
        return kl_k2(new.log_prob, reference)
    return kl_velocity(new.model_output, reference)


def window_metrics(run: DiffusionRun, settings: PolicyGradient) -> dict[str, float]:
    """Where the trained steps of this iteration are."""
    steps = trained_steps(run.config, settings, run.iteration)
    return {"window/first": float(steps[0]), "window/size": float(len(steps))}
