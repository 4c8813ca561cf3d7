"""Recorded steps under the policy as it is: a loss's view of one, pairs of them, and the check that sampling is
replayed: before the first update every ratio is 1."""

from __future__ import annotations

from typing import Protocol

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Replayed, StepRecord
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.objectives.preferences.preference import PreferenceOutput, step_preference_loss
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import require_on_policy

Tensors = dict[str, Tensor]


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
        kept: Replayed = given.graph
        return kept
    return policy.replay(StepRecord.of(given.batch, settings.kernel, given.tensors))


def compared_steps(settings: Comparison, policy: Policy, given: Recorded) -> tuple[PreferenceOutput, Tensor, Tensors]:
    """Pairs of actions of one step under the policy as it is: the loss of each by its (first, second, h) in `pairs`,
    int64 [P, 3], which of the ratios to the reference are outside of `clip_range`, bool [B], and evidence."""
    new, reference = replayed(settings, policy, given), given["reference_log_prob"]
    log_prob = new.log_prob
    first, second, preference = given["pairs"].to(log_prob.device).unbind(1)
    logs = (log_prob[first], reference[first], log_prob[second], reference[second])
    out = step_preference_loss(*logs, preference, beta=settings.beta, clip=settings.clip_range)
    outside = (log_prob - reference).exp().sub(1.0).abs() > settings.clip_range
    return out, outside, evidence(new)


def evidence(new: Replayed) -> Tensors:
    """What a dump keeps of a replayed step, to be compared with when it is replayed again."""
    return {"model_output": new.model_output, "mean": new.mean, "std": new.std, "log_prob": new.log_prob}


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
    deviations = [torch.zeros(1)]
    first: MicroBatch | None = next(iter(rollouts.mine.values()), None)
    if first is not None:
        with run.policy.uncounted(), run.drawing():
            for piece in first.pieces:
                for i, old in piece.trajectory.log_probs.items():
                    new = run.policy.replay(piece.trajectory.step(i))
                    # GRPO-Guard's log-ratio is that of densities times the std, its quadratic term aside.
                    size = new.std.flatten() if scaled else 1.0
                    deviations.append((size * (new.log_prob - old)).expm1().abs().cpu())
    everyone = gather_object([float(torch.cat(deviations).max())])
    worst = float(torch.tensor(everyone).max())  # tensor: NaN is the largest
    problem = off_policy(worst, clip, compiled=bool(run.config.kernels.compile))
    if problem is not None:
        run.process.progress.say(problem)
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
