"""From the settings of Flow-GRPO to the sampling plan of an iteration: which steps are noisy, where trees branch.

Pure functions of (configuration, iteration): the same in all processes, known before anything is run.
"""

from __future__ import annotations

import math
from functools import partial

from genrl.config import Config, FlowGRPO, Tree, Window
from genrl.mdp.plan import SamplingPlan, compress_tail, make_plan
from genrl.mdp.schedules import (
    backward_interval,
    constant_hold,
    exponential_hold,
    geometric_window,
    growing_noise,
    moving_window,
    window_steps,
)


def window_of(window: Window, *, steps: int, seed: int, iteration: int, iterations: int) -> range:
    """Steps of the window in this iteration; never empty. Raises ValueError where it does not fit."""
    high = steps - 1 if window.high is None else window.high
    place = {"size": window.size, "low": window.low, "high": high}
    if window.schedule == "random":
        return window_steps(**place, seed=seed, iteration=iteration)
    if window.schedule == "geometric":
        return geometric_window(**place, ratio=window.ratio, seed=seed, iteration=iteration)
    if window.schedule == "backward":
        shortest = window.size if window.shortest is None else window.shortest
        return backward_interval(high, shortest=shortest, longest=window.size, stages=iterations, stage=iteration)
    hold = partial(constant_hold, every=window.every)
    if window.schedule == "decaying":
        hold = partial(exponential_hold, every=window.every, threshold=window.decay_from)
    return moving_window(**place, iteration=iteration, hold=hold, stride=window.stride)


def trained_steps(config: Config, settings: FlowGRPO, iteration: int) -> tuple[int, ...]:
    """Steps whose transitions are trained: the window and the splits, or all but the last step."""
    steps = config.sampling.num_inference_steps
    if settings.window is None:
        return tuple(range(steps - 1))
    window = window_of(
        settings.window, steps=steps, seed=config.seed, iteration=iteration, iterations=config.iterations
    )
    return tuple(sorted({*window, *splits(settings.tree, window)}))


def splits(tree: Tree | None, window: range) -> tuple[int, ...]:
    """Steps that branch."""
    if tree is None:
        return ()
    if isinstance(tree.at, tuple):
        return tree.at
    return tuple(window) if tree.at == "window" else (window[0],)


def sampling_plan(config: Config, settings: FlowGRPO, iteration: int) -> SamplingPlan:
    """How the group of one prompt is drawn in this iteration. Raises ValueError for a plan that cannot be."""
    steps, tree = config.sampling.num_inference_steps, settings.tree
    trained = trained_steps(config, settings, iteration)
    level = settings.noise_level or 0.0
    noisy = range(steps - 1) if settings.noise_outside_window else trained
    noise = dict.fromkeys(noisy, level)
    branching: tuple[int, ...] = ()
    if tree is not None:
        branching = splits(tree, range(trained[0], trained[-1] + 1))
        grown = growing_noise(level, tree.noise_growth, len(branching))
        noise |= dict(zip(branching, grown, strict=True))
    ways = tree.ways if tree is not None else 1
    plan = make_plan(
        steps,
        noise=noise,
        splits=dict.fromkeys(branching, ways),
        roots=config.sampling.group_size // ways ** len(branching),
        spread=tree.spread if tree is not None else None,
    )
    return plan if settings.tail_ratio is None else compress_tail(plan, settings.tail_ratio)


def roots_together(config: Config, plan: SamplingPlan, num_processes: int) -> int:
    """Roots in a micro-batch: as many as fit into one model call, but every process and update needs some.

    Of independent samples `sampling.batch_size`, whatever the number of processes: then the pictures are the same for
    any number. Trees begin with fewer states than they end with, so there the rows of later calls, which are cut to
    `batch_size`, depend on the number of processes, and so do pictures by rounding.
    """
    if not plan.splits:
        return config.sampling.batch_size
    roots = plan.roots * config.sampling.prompts_per_iteration
    shares = num_processes * config.trainer.updates_per_iteration
    return max(1, min(config.sampling.batch_size, math.ceil(roots / shares)))
