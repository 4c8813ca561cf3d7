"""The policy's replay of one recorded step, and losses that compare the actions of a step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Replayed, StepRecord
from genrl.objectives.preferences.preference import PreferenceOutput, step_preference_loss
from genrl.runtime.loop.recorded import Recorded

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
