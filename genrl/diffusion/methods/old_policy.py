"""The policy that drew the samples: its log-probabilities and means, and that training replays what it did."""

from __future__ import annotations

import math

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.diffusion.methods.edges import Edges
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.methods.noising import without_guidance
from genrl.diffusion.policy.policy import Batch, Policy, Trajectory
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun

OldLogProbs = dict[int, dict[int, Tensor]]  # id of the piece -> step -> [B]


@torch.no_grad()
def old_policy(run: DiffusionRun, settings: FlowGRPO, rollouts: Rollouts, edges: Edges) -> OldLogProbs:
    """id of a piece -> trained step -> log p_old, [B]. As recorded; or, where the trained policy goes without the
    guidance that sampled, evaluated before the first update under the conditions it is trained in. Steps of which no
    action is trained are left out."""
    found: dict[int, dict[int, Tensor]] = {}
    for piece in (piece for micro_batch in rollouts.mine.values() for piece in micro_batch.pieces):
        logs = piece.trajectory.log_probs
        logs = {i: log for i, log in logs.items() if bool(edges.weight[i, piece.slots[i]].any())}
        if not settings.guidance_in_training:
            batch = judged_under(run.policy, settings, piece.trajectory.batch)
            logs = {i: run.policy.replay(piece.trajectory, i, batch).log_prob for i in logs}
        found[id(piece)] = logs
    return found


@torch.no_grad()
def means_before(
    run: DiffusionRun, settings: FlowGRPO, rollouts: Rollouts, old_log_probs: OldLogProbs
) -> dict[tuple[int, int], Tensor]:
    """(id of the piece, step) -> transition means before the first update, which GRPO-Guard's ratio is measured from.

    Those of the first update's samples are left out: its own evaluation has them.
    """
    if not settings.guard:
        return {}
    later = [m for micro_batches, _ in list(rollouts.updates(settings.updates))[1:] for m in micro_batches]
    policy = run.policy
    return {
        (id(piece), i): policy.replay(piece.trajectory, i, judged_under(policy, settings, piece.trajectory.batch)).mean
        for micro_batch in later
        for piece in micro_batch.pieces
        for i in old_log_probs[id(piece)]
    }


def judged_under(policy: Policy, settings: FlowGRPO, batch: Batch) -> Batch:
    """The conditions of the policy that is trained: those of sampling, or the same without guidance."""
    return batch if settings.guidance_in_training else without_guidance(policy, batch)


def rows_of(trajectory: Trajectory, step: int) -> Tensor:
    """Row of the state of each action, int64 [B]."""
    rows = trajectory.rows(step)
    return torch.arange(len(trajectory.states[step])) if rows is None else rows


@torch.no_grad()
def check_on_policy(run: DiffusionRun, rollouts: Rollouts, *, clip: float, guard: bool = False) -> None:
    """Replay the first micro-batch before any update: the ratio must be 1. Once per process, later calls do nothing.

    An exact 1 passes in silence; a deviation below a tenth of the clip range passes with a warning; anything above
    raises RuntimeError in all processes, since the clip would cut numerical noise; so does any where the denoiser is
    compiled. guard: of GRPO-Guard's ratio.
    """
    if run.replays:
        return
    deviations = [torch.zeros(1)]
    first: MicroBatch | None = next(iter(rollouts.mine.values()), None)
    if first is not None:
        with run.policy.uncounted():
            for piece in first.pieces:
                for i, old in piece.trajectory.log_probs.items():
                    new = run.policy.replay(piece.trajectory, i)
                    # GRPO-Guard's log-ratio is that of densities times the std, its quadratic term aside.
                    size = new.std.flatten() if guard else 1.0
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
    if worst == 0.0:
        return None
    found = f"before the first update the ratio of the replayed to the recorded policy is off 1 by {worst:.3g}"
    if compiled:
        raise RuntimeError(
            f"{found}: as compiled (kernels.compile), the denoiser does not replay what it sampled. Write "
            "kernels.compile: false; if the ratio is off without it too, that run says why"
        )
    if worst > clip / 10 or math.isnan(worst):
        raise RuntimeError(
            f"{found}, more than a tenth of trainer.clip_range ({clip:g}): training does not replay what sampling "
            "did. Usual causes: a pipeline option that depends on the position in the loop (skip-layer guidance, "
            "guidance intervals: take it out of sampling.pipeline_args), low precision (model.dtype float32 or "
            "float16 instead of bfloat16), kernels that are not deterministic. Or widen trainer.clip_range."
        )
    return f"{found}; below a tenth of the clip range ({clip:g}): rounding of the kernels in use"
