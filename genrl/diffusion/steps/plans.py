"""From the settings of Flow-GRPO to the sampling plan of an iteration: which steps are noisy, where trees branch.

Functions of (configuration, iteration): the same in all processes, known before anything is run. What needs no random
number is in `layout`. `choose_kernel` asks the loaded model too whether the transition is one for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel, Replayed, StepRecord
from genrl.diffusion.rollout.forest import Draw, Drawn, independent
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.layout import fixed_window, plan_of, pruned_depths, stochastic_steps, window_end
from genrl.diffusion.steps.settings import EveryStep, PolicyGradient, Stochastic
from genrl.mdp.kernels import FLOW_KERNELS
from genrl.mdp.plan import SamplingPlan, make_plan, unpruned_steps
from genrl.mdp.schedules import geometric_window, window_steps
from genrl.objectives.preferences import PreferenceOutput, step_preference_loss
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import require_on_policy


def window_of(config: Config, settings: PolicyGradient, iteration: int) -> range | None:
    """Steps of the window in this iteration, never empty; None without one."""
    window, steps = settings.layout.window, config.sampling.num_inference_steps
    if window is None:
        return None
    place = {"size": window.size, "low": window.low, "high": window_end(window, steps)}
    if window.schedule == "random":
        return window_steps(**place, seed=config.seed, iteration=iteration)
    if window.schedule == "geometric":
        return geometric_window(**place, ratio=window.ratio, seed=config.seed, iteration=iteration)
    return fixed_window(window, steps=steps, iteration=iteration, iterations=config.iterations)


class Steps(NamedTuple):
    """What an iteration samples and trains: made once, and handed to whatever collects, estimates and logs."""

    plan: SamplingPlan
    """How the group of one prompt is sampled."""
    trained: tuple[int, ...]
    """Steps whose transitions are trained: the window and the splits, or all but the last step."""
    kept: tuple[int, ...]
    """Steps whose graphs sampling keeps: the trained ones, but for pruned depths; none without `keep_graph`."""
    window: range | None

    @classmethod
    def of(cls, config: Config, settings: PolicyGradient, iteration: int) -> Self:
        """A function of these alone, so that all processes agree without a word."""
        layout, window = settings.layout, window_of(config, settings, iteration)
        plan = plan_of(config.sampling, layout, window)
        trained = stochastic_steps(layout, window, steps=config.sampling.num_inference_steps)
        pruned: Sequence[int] = ()
        if layout.prune is not None:
            pruned = pruned_depths(layout.prune, plan, iteration)
        return cls(plan, trained, unpruned_steps(trained, pruned) if settings.keep_graph else (), window)

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of where the trained steps are."""
        return {"window/first": float(self.trained[0]), "window/size": float(len(self.trained))}


def choose_kernel(run: DiffusionRun, settings: Stochastic, plan: SamplingPlan) -> Kernel:
    """The configured transition. Raises ValueError where it is not one for what the model predicts, or where the last
    step is to be drawn and has no distribution."""
    is_flow = run.policy.head.parametrisation == "flow"
    # DDIM is the one kernel of models that predict noise, and no flow's.
    if is_flow == (settings.kernel == "ddim"):
        predicts = "a velocity (flow matching)" if is_flow else run.policy.head.prediction_type
        legal = ", ".join(FLOW_KERNELS[1:]) if is_flow else "ddim"
        raise ValueError(
            f"trainer.kernel: {settings.kernel} is no transition for {run.config.model.path}, which predicts "
            f"{predicts}; use {legal}"
        )
    if plan.noise_levels[-1] is not None and not last_step_is_drawn(run.policy):
        raise ValueError(
            f"trainer.window.high: {run.config.model.path} ends at alpha-bar 1, so its last step has no "
            f"noise; use {plan.steps - 1} or null"
        )
    level = settings.noise_level or 0.0
    # Only what differs: trees whose noise grows with depth, and steps outside of the window.
    others = {i: plan.noise_levels[i] for i in plan.stochastic if plan.noise_levels[i] != level}
    return Kernel(settings.kernel, level, {i: other for i, other in others.items() if other is not None})


def last_step_is_drawn(policy: Policy) -> bool:
    """Whether the last step has a distribution: DDIM's, unless it ends at alpha-bar 1. (Those of flows leave noise in
    the picture, or have no variance.)"""
    return policy.head.parametrisation == "diffusion" and float(policy.head.final_alpha_cumprod) < 1.0


def every_step(run: DiffusionRun, settings: EveryStep) -> tuple[range, Draw]:
    """The trained steps, all but the last, and what draws samples whose trained steps are all stochastic."""
    sampling = run.config.sampling
    steps = range(sampling.num_inference_steps - 1)
    plan = make_plan(len(steps) + 1, noise=dict.fromkeys(steps, settings.noise_level or 0.0), roots=sampling.group_size)
    return steps, partial(chains, kernel=choose_kernel(run, settings, plan), steps=steps)


def chains(
    policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None], kernel: Kernel, steps: range
) -> Drawn:
    """Samples whose steps `steps` are drawn from the kernel."""
    return independent(policy.roll_out(batch, kernel, steps), slots)


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
        result: Replayed = given.graph
        return result
    return policy.replay(StepRecord.of(given.batch, settings.kernel, given.tensors))


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
