"""From the settings of Flow-GRPO to the sampling plan of an iteration: which steps are noisy, where trees branch.

Pure functions of (configuration, iteration): the same in all processes, known before anything is run. What needs no
random number is in `genrl.config.plans`.
"""

from __future__ import annotations

from genrl.config import Config, FlowGRPO
from genrl.config.plans import fixed_window, plan_of, roots_together, stochastic_steps, window_end
from genrl.mdp.plan import SamplingPlan
from genrl.mdp.schedules import geometric_window, window_steps

__all__ = ["roots_together", "sampling_plan", "trained_steps", "window_of"]


def window_of(config: Config, settings: FlowGRPO, iteration: int) -> range | None:
    """Steps of the window in this iteration, never empty; None without one."""
    window, steps = settings.window, config.sampling.num_inference_steps
    if window is None:
        return None
    place = {"size": window.size, "low": window.low, "high": window_end(window, steps)}
    if window.schedule == "random":
        return window_steps(**place, seed=config.seed, iteration=iteration)
    if window.schedule == "geometric":
        return geometric_window(**place, ratio=window.ratio, seed=config.seed, iteration=iteration)
    return fixed_window(window, steps=steps, iteration=iteration, iterations=config.iterations)


def trained_steps(config: Config, settings: FlowGRPO, iteration: int) -> tuple[int, ...]:
    """Steps whose transitions are trained: the window and the splits, or all but the last step."""
    window = window_of(config, settings, iteration)
    return stochastic_steps(settings, window, steps=config.sampling.num_inference_steps)


def sampling_plan(config: Config, settings: FlowGRPO, iteration: int) -> SamplingPlan:
    """How the group of one prompt is drawn in this iteration."""
    return plan_of(config.sampling, settings, window_of(config, settings, iteration))
