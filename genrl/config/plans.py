"""From the settings of Flow-GRPO to the sampling plan of an iteration, and how often which plan comes. No torch.

A window that is drawn at random is drawn in `genrl.diffusion.methods.plans`; what can be said without a draw is here.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from genrl.mdp.plan import SamplingPlan, compress_tail, make_plan, pruning_is_on, sliding_depths, unpruned_steps
from genrl.mdp.windows import (
    backward_interval,
    check_window,
    constant_hold,
    exponential_hold,
    geometric_start_probabilities,
    growing_noise,
    moving_window,
)

if TYPE_CHECKING:
    from genrl.config.schema import Config, Sampling
    from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO, Prune, Tree, Window
    from genrl.diffusion.methods.talk2move.settings import Talk2Move

DRAWN = ("random", "geometric")  # schedules whose windows are drawn


class Round(NamedTuple):
    """Iterations that sample by one plan and train the same steps."""

    share: float
    """Of all iterations; where windows are drawn, the expected one."""
    first: int
    """The first such iteration (of a drawn window: that it may come in)."""
    plan: SamplingPlan
    trained: tuple[int, ...]
    """Steps with trained edges, what the pruning of depths leaves out aside."""


def is_flow_grpo(trainer: object) -> TypeGuard[FlowGRPO]:
    """Whether a trainer's settings are Flow-GRPO's, or those of a method that adds to it."""
    from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO

    return isinstance(trainer, FlowGRPO)


def is_talk2move(trainer: object) -> TypeGuard[Talk2Move]:
    """Whether a trainer's settings are Talk2Move's."""
    from genrl.diffusion.methods.talk2move.settings import Talk2Move

    return isinstance(trainer, Talk2Move)


def window_end(window: Window, steps: int) -> int:
    """Step before which the window ends."""
    return steps - 1 if window.high is None else window.high


def fixed_window(window: Window, *, steps: int, iteration: int, iterations: int) -> range:
    """Steps of a window whose place is not drawn. Raises ValueError where it does not fit."""
    high = window_end(window, steps)
    if window.schedule == "backward":
        shortest = window.size if window.shortest is None else window.shortest
        return backward_interval(high, shortest=shortest, longest=window.size, stages=iterations, stage=iteration)
    hold = partial(constant_hold, every=window.every)
    if window.schedule == "decaying":
        hold = partial(exponential_hold, every=window.every, threshold=window.decay_from)
    return moving_window(window.size, window.low, high, iteration=iteration, hold=hold, stride=window.stride)


def drawn_windows(window: Window, *, steps: int) -> dict[range, float]:
    """Where a window that is drawn may be, each with its probability. Raises ValueError where it does not fit."""
    high = window_end(window, steps)
    check_window(window.size, window.low, high)
    starts = high - window.low - window.size + 1
    law = geometric_start_probabilities(starts, window.ratio if window.schedule == "geometric" else 1.0)
    return {range(window.low + k, window.low + k + window.size): share for k, share in enumerate(law)}


def splits(tree: Tree | None, window: range | None) -> tuple[int, ...]:
    """Steps that branch."""
    if tree is None:
        return ()
    if isinstance(tree.at, tuple):
        return tree.at
    if window is None:
        raise ValueError(f"at: {tree.at} needs a window; give one, or the steps that branch")
    return tuple(window) if tree.at == "window" else (window[0],)


def most_splits(tree: Tree, window: Window | None) -> int:
    """Steps that branch, in the iteration that has most of them."""
    if isinstance(tree.at, tuple):
        return len(tree.at)
    return window.size if tree.at == "window" and window is not None else 1


def most_micro_batches(config: Config) -> int:
    """What processes and updates can share: micro-batches, or the trees that these can be cut into."""
    trainer = config.trainer
    if not is_flow_grpo(trainer) or trainer.tree is None:
        return config.sampling.micro_batches
    leaves = math.prod([trainer.tree.ways] * most_splits(trainer.tree, trainer.window))
    return config.sampling.images_per_iteration // leaves


def stochastic_steps(settings: FlowGRPO, window: range | None, *, steps: int) -> tuple[int, ...]:
    """Steps whose transitions are trained: the window and the splits, or all but the last step."""
    if window is None:
        return tuple(range(steps - 1))
    return tuple(sorted({*window, *splits(settings.tree, window)}))


def plan_of(sampling: Sampling, settings: FlowGRPO, window: range | None) -> SamplingPlan:
    """How the group of one prompt is drawn. Raises ValueError for a plan that cannot be, naming its field."""
    steps, tree = sampling.num_inference_steps, settings.tree
    level = settings.noise_level or 0.0
    noisy = range(steps - 1) if settings.noise_outside_window else stochastic_steps(settings, window, steps=steps)
    noise = dict.fromkeys(noisy, level)
    branching = splits(tree, window)
    ways = 1
    if tree is not None:
        ways = tree.ways
        noise |= dict(zip(branching, growing_noise(level, tree.noise_growth, len(branching)), strict=True))
    leaves = ways ** len(branching)
    if sampling.group_size % leaves:
        raise ValueError(f"roots: {sampling.group_size} samples are not whole trees of {leaves} leaves")
    plan = make_plan(
        steps,
        noise=noise,
        splits=dict.fromkeys(branching, ways),
        roots=sampling.group_size // leaves,
        spread=tree.spread if tree is not None else None,
    )
    return plan if settings.tail_ratio is None else compress_tail(plan, settings.tail_ratio)


def pruned_depths(settings: Prune, plan: SamplingPlan, *, iteration: int, iterations: int) -> range:
    """Depths (step + 1) whose edges are not trained in this iteration."""
    if not settings.depths or not pruning_is_on(iteration, iterations, settings.until):
        return range(0)
    depths = range(min(settings.depths), max(settings.depths) + 1)
    if settings.slide_every is None:
        return depths
    return sliding_depths(depths, iteration=iteration, interval=settings.slide_every, stop=max(plan.splits))


def rounds(config: Config, settings: FlowGRPO) -> list[Round]:
    """The plans of a run, in the order in which they come (a window that is drawn: by its place).

    Raises ValueError for a plan that cannot be, or a pruning that leaves no trained step.
    """
    sampling, iterations = config.sampling, config.iterations
    if is_talk2move(settings):  # a chain of the drawn steps and the shortcut
        exit_at = latest_exit(settings, sampling.num_inference_steps)
        steps = exit_calls(settings, sampling.num_inference_steps, exit_at)
        sampling = sampling.model_copy(update={"num_inference_steps": steps})
        settings = with_exit(settings, exit_at)
    steps, window = sampling.num_inference_steps, settings.window
    prune = settings.tree.prune if settings.tree is not None else None
    still = prune is None and (window is None or window.schedule in DRAWN)
    found: dict[tuple[range | None, range], float] = {}
    first: dict[tuple[range | None, range], int] = {}
    plans: dict[range | None, SamplingPlan] = {}
    for iteration in range(1 if still else iterations):
        places: list[tuple[range | None, float]] = [(None, 1.0)]
        if window is not None and window.schedule in DRAWN:
            places = [*drawn_windows(window, steps=steps).items()]
        elif window is not None:
            places = [(fixed_window(window, steps=steps, iteration=iteration, iterations=iterations), 1.0)]
        for place, share in places:
            if place not in plans:
                plans[place] = plan_of(sampling, settings, place)
            depths = range(0)
            if prune is not None:
                depths = pruned_depths(prune, plans[place], iteration=iteration, iterations=iterations)
            found[place, depths] = found.get((place, depths), 0.0) + share
            first.setdefault((place, depths), iteration)
    whole = sum(found.values())
    result = []
    for (place, depths), share in found.items():
        trained = unpruned_steps(stochastic_steps(settings, place, steps=steps), depths)
        result.append(Round(share / whole, first[place, depths], plans[place], trained))
    return result


def with_exit(settings: Talk2Move, exit_at: int) -> Talk2Move:
    """Talk2Move as Flow-GRPO with a window: the steps before the exit are drawn and trained."""
    from genrl.diffusion.methods.flow_grpo.settings import Window

    return settings.model_copy(update={"window": Window(size=exit_at, high=exit_at)})


def latest_exit(settings: Talk2Move, steps: int) -> int:
    """The exit step as configured; where it is found by the run, the last that it may find."""
    return min(settings.exit_step or steps, steps - 1)


def exit_calls(settings: Talk2Move, steps: int, exit_at: int) -> int:
    """Model evaluations per picture, guidance aside: the drawn steps and a shortcut, never more than `steps`."""
    return exit_at + min(settings.shortcut, steps - exit_at)


def step_evaluation_calls(settings: Talk2Move, steps: int) -> int:
    """Model evaluations of one step evaluation, guidance aside: chains of steps - 1, left at every step."""
    counts = settings.step_evaluation
    ends = sum(exit_calls(settings, steps, k) - k for k in range(1, steps))
    return counts.prompts * counts.samples * (steps - 1 + ends)


def roots_together(config: Config, plan: SamplingPlan, num_processes: int) -> int:
    """Roots in a micro-batch of trees: as many as fit into one model call, but in each update every process needs some.

    Trees begin with fewer states than they end with. So the rows of later calls, which are cut to `batch_size`, depend
    on the number of processes, and pictures do by rounding (those of independent samples do not).
    """
    roots = plan.roots * config.sampling.prompts_per_iteration // config.trainer.updates
    together = math.ceil(roots / num_processes)
    if math.ceil(roots / max(1, together)) < num_processes:  # 5 roots in twos are 3 micro-batches, too few for 4
        together = roots // num_processes
    return max(1, min(config.sampling.batch_size, together))
