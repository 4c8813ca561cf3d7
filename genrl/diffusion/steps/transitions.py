"""What policy gradients on denoising steps share: samples, trained transitions, their losses, and what they measure.

A method gives its loss of one transition, (settings, policy, what was recorded) -> results; what is recorded is the
step, its advantage and weight, log p_old, and, with a divergence, what the reference says of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.diffusion.policy.policy import Policy, without_guidance
from genrl.diffusion.policy.trajectory import Replayed, StepRecord
from genrl.diffusion.rollout.forest import Draw, Piece, roll_out
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Edges, Steps, choose_kernel
from genrl.diffusion.steps.settings import PolicyGradient
from genrl.objectives.policy_losses import (
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
from genrl.objectives.preferences import PreferenceOutput, step_preference_loss
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import EVIDENCE, Meter, Results, descend, require_on_policy

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

    @property
    def slots(self) -> list[int]:
        """Columns of its samples in the tables of `Edges`."""
        return self.piece.slots[self.step]


Tensors = dict[str, Tensor]
Settings = TypeVar("Settings", bound=PolicyGradient)
Loss = Callable[[Settings, Policy, Recorded], Tensors]
Actions = Mapping[int, list[Action]]
"""First slot of a micro-batch -> its trained transitions."""


def sampler(run: DiffusionRun, settings: PolicyGradient, steps: Steps) -> Draw:
    """How the samples of a batch of prompts are made."""
    kernel = choose_kernel(run, settings, steps.plan)
    size = run.config.sampling.batch_size
    return partial(roll_out, plan=steps.plan, kernel=kernel, batch_size=size, keep=steps.kept)


def collect(run: DiffusionRun, settings: PolicyGradient, steps: Steps, *, scaled: bool = False) -> Rollouts:
    """The scored samples of one iteration; trees that share a root are kept in one micro-batch. scaled: as
    `check_on_policy` has it."""
    plan = steps.plan

    # Where iterations are drawn ahead, each needs the plan of its own window, not that of the running one.
    def later(iteration: int) -> Draw:
        return sampler(run, settings, Steps.of(run.config, settings, iteration))

    leaves = plan.leaves // plan.roots
    rollouts = run.collect(sampler(run, settings, steps), draws=later, leaves=leaves)
    # The narrower side decides: rounding beyond it would be clipped as if the policy had moved.
    check_on_policy(run, rollouts, clip=min(settings.clip_bounds), scaled=scaled)
    return rollouts


@torch.no_grad()
def check_on_policy(run: DiffusionRun, rollouts: Rollouts, *, clip: float, scaled: bool = False) -> None:
    """Replay the first micro-batch before any update, by the weights that drew it: the ratio must be 1. Once per
    process, later calls do nothing.

    An exact 1 passes in silence; a deviation below a tenth of the clip range passes with a warning; anything above
    raises RuntimeError in all processes, since the clip would cut numerical noise; so does any where the denoiser is
    compiled. scaled: of ratios whose logarithm is scaled by the std of the step (GRPO-Guard).
    """
    if run.replays:
        return
    # A process without samples has no deviation, but must be there when all compare theirs.
    deviations = [torch.zeros(1)]
    first: MicroBatch | None = next(iter(rollouts.mine.values()), None)
    if first is not None:
        with run.policy.uncounted(), run.drawing():
            for piece in first.pieces:
                for i, old in piece.trajectory.log_probs.items():
                    new = run.policy.replay(piece.trajectory.step(i))
                    # GRPO-Guard's log-ratio is that of densities times the std, its quadratic term aside.
                    size = new.std.flatten() if scaled else 1.0
                    # expm1, not exp - 1: what is looked for is smaller than the spacing of float32 around 1.
                    deviations.append((size * (new.log_prob - old)).expm1().abs().cpu())
    everyone = gather_object([float(torch.cat(deviations).max())])
    worst = float(torch.tensor(everyone).max())  # tensor: NaN is the largest
    problem = off_policy(worst, clip, compiled=bool(run.config.kernels.compile))
    if problem is not None:
        run.process.progress.say(problem)
    # Once: a replay that is exact for the first micro-batch is so for all of them, and it costs their sampling again.
    run.replays = True


def off_policy(worst: float, clip: float, *, compiled: bool = False) -> str | None:
    """What to say of the largest |ratio - 1| before the first update. Raises RuntimeError above a tenth of `clip`, or,
    of a compiled denoiser, above 0: one graph runs in both."""
    causes = (
        "Usual causes: a pipeline option that depends on the position in the loop (skip-layer guidance, guidance "
        "intervals: take it out of sampling.pipeline_args), low precision (model.dtype float32 or float16 instead of "
        "bfloat16), kernels that are not deterministic. Or widen trainer.clip_range, of which a tenth is allowed."
    )
    if compiled:
        causes = "Write kernels.compile: false; if the ratio is off without it too, that run says why"
    what = "the ratio of the replayed to the recorded policy"
    require_on_policy(worst, 0.0 if compiled else clip / 10, what, causes=causes)
    return f"before the first update {what} is off 1 by {worst:.3g}: rounding of the kernels in use" if worst else None


def actions_of(run: DiffusionRun, settings: PolicyGradient, rollouts: Rollouts, edges: Edges) -> Actions:
    """The trained transitions of this process. log p_old is as recorded; or, where the trained policy goes without the
    guidance that sampled, or older weights drew, evaluated now, before the first update, under the conditions it is
    trained in. Steps of which no sample is trained are left out."""
    actions: dict[int, list[Action]] = {}
    number = 0
    for micro_batch in rollouts.mine.values():
        actions[micro_batch.slots[0]] = []
        for piece in micro_batch.pieces:
            for i, log_prob in piece.trajectory.log_probs.items():
                # A pruned step, or one whose samples have no score: its passes would add exactly 0.
                if not bool(edges.weight[i, piece.slots[i]].any()):
                    continue
                importance = None
                if run.age or not settings.guidance_in_training:
                    sampled, log_prob = log_prob, replayed_before(run, step_of(run, settings, piece, i)).log_prob
                    importance = staleness_weight(log_prob, sampled) if run.age else None
                actions[micro_batch.slots[0]].append(Action(number, piece, i, log_prob, importance))
                number += 1
    return actions


def replayed_before(run: DiffusionRun, step: StepRecord) -> Replayed:
    """A transition before the first update, where the iteration can be left."""
    with run.loop.fitting():
        result = run.policy.replay(step)
    run.loop.advance_or_leave(0)
    return result


def step_of(run: DiffusionRun, settings: PolicyGradient, piece: Piece, i: int) -> StepRecord:
    """A recorded step under the conditions of the policy that is trained: those of sampling, or without guidance."""
    batch = piece.trajectory.batch
    return piece.trajectory.step(i, batch if settings.guidance_in_training else without_guidance(run.policy, batch))


def update(
    run: DiffusionRun,
    settings: Settings,
    rollouts: Rollouts,
    edges: Edges,
    loss: Loss[Settings],
    meter: Meter,
    *,
    actions: Actions | None = None,
    further: Callable[[Action], Mapping[str, Tensor]] = lambda action: {},
    seen: Callable[[Action, Results], None] = lambda action, results: None,
) -> None:
    """The optimiser steps of one iteration. actions: None = all that are trained; further: what the method's loss reads
    beside the step; seen: is told what came of each."""
    every = actions_of(run, settings, rollouts, edges) if actions is None else actions

    def measured(action: Action, results: Results, recorded: Recorded) -> None:
        measure(meter, results, recorded)
        seen(action, results)

    def prepare(action: Action) -> Recorded:
        return record(run, settings, edges, action, further(action))

    run.start_training(settings.epochs * sum(map(len, every.values())))
    for _ in range(settings.epochs):
        for micro_batches, slots in rollouts.updates():
            # Over the samples of all processes, whose gradients are added up: so the update does not depend on how many
            # there are.
            divisor = float(edges.weight[:, slots].sum())
            parts = (action for micro_batch in micro_batches for action in every[micro_batch.slots[0]])
            norms = descend(run.loop, settings, run.policy, parts, prepare, loss, divisor=divisor, measure=measured)
            meter.note({"grad_norm": norms["policy"]})


def record(
    run: DiffusionRun, settings: PolicyGradient, edges: Edges, action: Action, further: Mapping[str, Tensor]
) -> Recorded:
    """All that the loss of a transition reads."""
    policy, i = run.policy, action.step
    step = step_of(run, settings, action.piece, i)
    tables = {"advantage": edges.advantage, "weight": edges.weight, "moves": edges.moves}
    tensors = {name: table[i, action.slots].to(policy.device) for name, table in tables.items()}
    tensors |= {"old_log_prob": action.old_log_prob, **further}
    if action.importance is not None:  # surrogates are linear in it where they are not clipped
        tensors |= {"importance": action.importance, "advantage": tensors["advantage"] * action.importance}
    if settings.kl_weight > 0:
        # At the policy's own recorded state: the KL of eq. 5 is that of two transitions from one x_t, not of two
        # rollouts.
        with torch.no_grad(), run.weights.reference():
            reference = policy.replay(step)
        tensors["reference"] = getattr(reference, REFERENCE.get(settings.kl, "model_output"))
    # A kept graph is freed by its one backward pass, so it leaves the trajectory here.
    graph = action.piece.trajectory.graphs.pop(i) if settings.keep_graph else None
    return Recorded(step.batch, step.tensors() | tensors, graph)


class Transition(Protocol):
    """Settings of a method that has a transition kernel."""

    @property
    def kernel(self) -> str: ...


class Comparison(Transition, Protocol):
    """Settings of one that compares its actions."""

    @property
    def beta(self) -> float: ...

    @property
    def clip_range(self) -> float: ...


def replayed(settings: Transition, policy: Policy, given: Recorded) -> Replayed:
    """The step under the policy as it is: log-probability [B], mean, std and model output of its transition."""
    if given.graph is not None:  # kept from sampling: the same numbers without a second pass
        result: Replayed = given.graph
        return result
    return policy.replay(StepRecord.of(given.batch, settings.kernel, given.tensors))


def evidence(new: Replayed) -> Tensors:
    """What a dump keeps of a replayed step, to be compared with when it is replayed again."""
    return {"model_output": new.model_output, "mean": new.mean, "std": new.std, "log_prob": new.log_prob}


def penalised(
    settings: PolicyGradient,
    surrogate: SurrogateOutput,
    new: Replayed,
    given: Recorded,
    further: Mapping[str, tuple[float, Tensor]] | None = None,
) -> Tensors:
    """The loss of a transition, [B]: surrogate + kl_weight KL + further terms, each (weight, value) by the name it is
    logged under; times its weight in the update. And what it is made of."""
    value, terms = surrogate.loss, {}
    if settings.kl_weight > 0:
        terms["kl"] = reference_kl(settings.kl, new, given["reference"])
        pays = given["pays"] if "pays" in given else 1.0  # a method may let some samples alone pay it (GARDO)
        value = value + settings.kl_weight * pays * terms["kl"]
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


def clipped_loss(settings: PolicyGradient, policy: Policy, given: Recorded) -> Tensors:
    """Flow-GRPO's loss of one transition, [B]: the clipped surrogate and its divergence (arXiv 2505.05470, eq. 5)."""
    new = replayed(settings, policy, given)
    low, high = settings.clip_bounds
    surrogate = clipped_surrogate(new.log_prob, given["old_log_prob"], given["advantage"], low, high)
    return penalised(settings, surrogate, new, given)


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


def compared_steps(settings: Comparison, policy: Policy, given: Recorded) -> tuple[PreferenceOutput, Tensor, Tensors]:
    """Pairs of actions of one step under the policy as it is: the loss of each by its (first, second, h) in `pairs`,
    int64 [P, 3], which of the ratios to the reference are outside of `clip_range`, bool [B], and evidence."""
    new, reference = replayed(settings, policy, given), given["reference_log_prob"]
    log_prob = new.log_prob
    first, second, preference = given["pairs"].to(log_prob.device).unbind(1)
    logs = (log_prob[first], reference[first], log_prob[second], reference[second])
    # D3PO compares two actions of one step, not two samples: every step is a preference pair of its own.
    out = step_preference_loss(*logs, preference, beta=settings.beta, clip=settings.clip_range)
    outside = (log_prob - reference).exp().sub(1.0).abs() > settings.clip_range
    return out, outside, evidence(new)


@dataclass(frozen=True)
class OldMeans:
    """Number of a transition -> its mean before the first update, [B, ...]."""

    means: dict[int, Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, run: DiffusionRun, settings: PolicyGradient, rollouts: Rollouts, actions: Actions) -> Self:
        """Means of all transitions but those of the first update, whose own evaluation is that."""
        # In the first update the policy is still the one that sampled, so its loss pass yields these means for free
        # (`note`).
        later = [m for micro_batches, _ in list(rollouts.updates())[1:] for m in micro_batches]
        every = [action for micro_batch in later for action in actions[micro_batch.slots[0]]]
        steps = {action_of.number: step_of(run, settings, action_of.piece, action_of.step) for action_of in every}
        return cls({number: replayed_before(run, step).mean for number, step in steps.items()})

    def known(self, action: Action) -> dict[str, Tensor]:
        """What a loss reads of the policy that sampled; nothing in the first update."""
        return {"old_mean": self.means[action.number]} if action.number in self.means else {}

    def note(self, action: Action, results: Results) -> None:
        """Keep the evaluation of the first update for the epochs that follow."""
        # Of the first epoch alone: in later ones the weights have moved.
        self.means.setdefault(action.number, results["mean"].detach())
