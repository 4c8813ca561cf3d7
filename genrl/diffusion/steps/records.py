"""One recorded step of a denoising chain as what a loss is made of, and the policy's replay of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Children, Kernel, Replayed, Trajectory
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


def recorded_step(
    trajectory: Trajectory,
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    batch: Batch | None = None,
    graph: Replayed | None = None,
) -> Recorded:
    """Step `step` of a trajectory, and what else the loss reads.

    batch: conditions that the step is replayed under; None = those it was sampled under. graph: kept from sampling.
    """
    kernel, rows = trajectory.kernel, trajectory.rows(step)
    level = kernel.levels.get(step, kernel.noise_level)
    given = {
        "step": torch.tensor(step),
        "noise_level": torch.tensor(level, dtype=torch.float64),
        "state": trajectory.states[step],
        "next_state": trajectory.next_states[step],
        **tensors,
    }
    if rows is not None:  # the state of each action
        given["rows"] = rows
    return Recorded(batch or trajectory.batch, given, graph)


def replayed(settings: Transition, policy: Policy, given: Recorded) -> Replayed:
    """The step under the policy as it is: log-probability [B], mean, std and model output of its transition."""
    if given.graph is not None:
        kept: Replayed = given.graph
        return kept
    step, state, next_state = int(given["step"]), given["state"], given["next_state"]
    kernel = Kernel(settings.kernel, float(given["noise_level"]))
    children = Children(given["rows"], []) if "rows" in given else None
    recorded = Trajectory(
        batch=given.batch,
        kernel=kernel,
        states={step: state},
        next_states={step: next_state},
        log_probs={},
        final=next_state,
        sigmas=torch.empty(0),
        stop=step + 1,
        initial=state,
        children=children,
    )
    return policy.replay(recorded, step)


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
