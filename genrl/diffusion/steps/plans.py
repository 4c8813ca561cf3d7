"""From the settings of Flow-GRPO to the sampling plan of an iteration: which steps are noisy, where trees branch.

Functions of (configuration, iteration): the same in all processes, known before anything is run. What needs no random
number is in `layout`. `choose_kernel` asks the loaded model too whether the transition is one for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Draw, Drawn, independent
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.layout import fixed_window, plan_of, pruned_depths, stochastic_steps, window_end
from genrl.diffusion.steps.settings import EveryStep, PolicyGradient, Stochastic
from genrl.mdp.kernels import FLOW_KERNELS
from genrl.mdp.plan import SamplingPlan, make_plan, unpruned_steps
from genrl.mdp.schedules import geometric_window, window_steps


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
