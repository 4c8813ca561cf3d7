"""Which steps of a rollout are noisy, branch and are trained: settings, and the sampling plans made of them. No torch.

A window that is placed at random is placed in `genrl.diffusion.steps.plans`; what can be said without a random number
is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from genrl.config.errors import Finding
from genrl.config.section import Count, Flag, Positive, Section, Share, Ways, Whole
from genrl.diffusion.config.kernels import UP_TO_ONE
from genrl.mdp.plan import (
    SamplingPlan,
    backward_interval,
    check_window,
    compress_tail,
    geometric_start_probabilities,
    growing_noise,
    make_plan,
    moving_window,
    sliding_depths,
    unpruned_steps,
)

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.config.sections import Sampling

RANDOM = ("random", "geometric")  # schedules whose windows are placed at random


class Window(Section):
    """The stretch of steps that is stochastic and trained; all others are deterministic."""

    size: Count = 2
    """Number of consecutive stochastic steps (Flow-GRPO-Fast: 2 or 3, MixGRPO: 4)."""
    low: Whole = 0
    """First step where the window may begin."""
    high: Count | None = None
    """The window ends before this step; null = before the last step, which only ddim can draw (with the number of steps
    here)."""
    schedule: Literal["random", "progressive", "geometric", "backward"] = "random"
    """Its position in an iteration: uniform; moving down the schedule (MixGRPO); early positions more likely
    (TreeGRPO); or the last steps, more and more of them (B2-DiffuRL)."""
    every: Count = 25
    """Iterations that it stays in one place, to move by a step (progressive)."""
    ratio: Share = 0.5
    """Likelihood of a start against the one before it (geometric; TreeGRPO: 0.5); 1 = uniform."""
    shortest: Count | None = None
    """Size at the beginning (backward); it grows to `size` over the run (B2-DiffuRL: 14 to 20 of 20 steps)."""


class Prune(Section):
    """Edges that are not trained (BranchGRPO, arXiv 2509.06040)."""

    depths: tuple[Count, ...] = ()
    """Leave out the edges into these depths (step + 1); consecutive ones."""
    slide_every: Count | None = None
    """Move `depths` up the tree by one every so many iterations, as far as the last split; null = never."""
    width: Literal["best_sibling", "extremes"] | None = None
    """Below the last split keep the better leaf of each parent, or half of the leaves, the best and the worst; null =
    all."""


class Branching(Section):
    """The samples of a group are leaves of trees: shared prefixes are computed once."""

    ways: Ways
    """Children of every state at a step that branches (TreeGRPO 3, BranchGRPO and Dynamic-TreeRPO 2)."""
    at: Literal["window", "window_start"] | tuple[Whole, ...] = "window_start"
    """Steps that branch: all of the window, its first one, or these. group_size is a multiple of the leaves."""


class Tree(Branching):
    """The samples of a group are leaves of trees: shared prefixes are computed once."""

    spread: Positive | None = None
    """Noises of siblings have correlation 1 / (1 + spread^2) (BranchGRPO: 4); null = independent."""
    credit: Literal["mean", "path_softmax", "level_softmax"] = "mean"
    """Value of a shared edge: the mean of its leaves, or weighted by their likelihood along the path or level by
    level (TreeGRPO)."""
    normalise: Literal["group", "depth"] = "group"
    """Advantages are those of the leaves, or of all values at one depth (BranchGRPO; four or more)."""
    weight: Literal["leaf_multiplicity", "per_edge"] = "leaf_multiplicity"
    """An edge counts as often as it has leaves (as if rollouts were separate), or once (BranchGRPO, TreeGRPO)."""
    prune: Prune | None = None
    """Edges that are not trained; null = all are."""
    contrast: Flag = False
    """Train only the best and the worst leaf of each split, by scores over a prompt's last eight iterations: at least
    0.5, or below -0.5 (B2-DiffuRL)."""


class Layout(NamedTuple):
    """What a method's settings say of its rollouts."""

    noise_level: float | None
    """Of its kernel; None for a kernel without one."""
    window: Window | None = None
    tree: Tree | None = None
    noise_growth: float = 0.0
    """Share by which the noise level grows from the first to the last branching step."""
    noise_outside_window: bool = False
    tail_ratio: float | None = None

    @property
    def prune(self) -> Prune | None:
        return self.tree.prune if self.tree is not None else None


class Round(NamedTuple):
    """Iterations that sample by one plan and train the same steps."""

    share: float
    """Of all iterations; where windows are placed at random, the expected one."""
    first: int
    """The first such iteration (of a random window: that it may come in)."""
    plan: SamplingPlan
    trained: tuple[int, ...]
    """Steps with trained edges, what the pruning of depths leaves out aside."""


def window_end(window: Window, steps: int) -> int:
    """Step before which the window ends."""
    return steps - 1 if window.high is None else window.high


def fixed_window(window: Window, *, steps: int, iteration: int, iterations: int) -> range:
    """Steps of a window whose place is not random. Raises ValueError where it does not fit."""
    high = window_end(window, steps)
    if window.schedule == "backward":
        shortest = window.size if window.shortest is None else window.shortest
        return backward_interval(high, shortest=shortest, longest=window.size, stages=iterations, stage=iteration)
    return moving_window(window.size, window.low, high, iteration=iteration, every=window.every)


def random_windows(window: Window, *, steps: int) -> dict[range, float]:
    """Places where a random window may be, each with its probability. Raises ValueError where it does not fit."""
    high = window_end(window, steps)
    check_window(window.size, window.low, high)
    starts = high - window.low - window.size + 1
    law = geometric_start_probabilities(starts, window.ratio if window.schedule == "geometric" else 1.0)
    return {range(window.low + k, window.low + k + window.size): share for k, share in enumerate(law)}


def splits(tree: Branching | None, window: range | None) -> tuple[int, ...]:
    """Steps that branch."""
    if tree is None:
        return ()
    if isinstance(tree.at, tuple):
        return tree.at
    if window is None:
        raise ValueError(f"at: {tree.at} needs a window; give one, or the steps that branch")
    return tuple(window) if tree.at == "window" else (window[0],)


def most_splits(tree: Branching, window: Window | None) -> int:
    """Steps that branch, in the iteration that has most of them."""
    if isinstance(tree.at, tuple):
        return len(tree.at)
    return window.size if tree.at == "window" and window is not None else 1


def stochastic_steps(layout: Layout, window: range | None, *, steps: int) -> tuple[int, ...]:
    """Steps whose transitions are trained: the window and the splits, or all but the last step."""
    if window is None:
        return tuple(range(steps - 1))
    return tuple(sorted({*window, *splits(layout.tree, window)}))


def plan_of(sampling: Sampling, layout: Layout, window: range | None) -> SamplingPlan:
    """How the group of one prompt is sampled. Raises ValueError for a plan that cannot be, naming its field."""
    steps, tree = sampling.num_inference_steps, layout.tree
    # None in a plan is a deterministic step. A kernel without a level (wan_sde) is stochastic all the same: 0 stands
    # for it.
    level = layout.noise_level or 0.0
    noise = dict.fromkeys(stochastic_steps(layout, window, steps=steps), level)
    if layout.noise_outside_window:
        noise |= dict.fromkeys(range(steps - 1), level)
    branching = splits(tree, window)
    ways = 1
    if tree is not None:
        ways = tree.ways
        # Last, so that branching steps have the level that grows with their depth, not the window's.
        noise |= dict(zip(branching, growing_noise(level, layout.noise_growth, len(branching)), strict=True))
    leaves = ways ** len(branching)
    if sampling.group_size % leaves:
        near = max(leaves, sampling.group_size // leaves * leaves)
        text = f"{sampling.group_size} samples are not whole trees of {leaves} leaves"
        raise ValueError(f"roots: {text}; use {near} or {near + leaves}, or fewer splits")
    plan = make_plan(
        steps,
        noise=noise,
        splits=dict.fromkeys(branching, ways),
        roots=sampling.group_size // leaves,
        spread=tree.spread if tree is not None else None,
    )
    return plan if layout.tail_ratio is None else compress_tail(plan, layout.tail_ratio)


def pruned_depths(settings: Prune, plan: SamplingPlan, iteration: int) -> Sequence[int]:
    """Depths (step + 1) whose edges are not trained in this iteration."""
    if settings.slide_every is None or not settings.depths:
        return settings.depths
    return sliding_depths(settings.depths, iteration=iteration, interval=settings.slide_every, stop=max(plan.splits))


def rounds_of(sampling: Sampling, layout: Layout, iterations: int) -> list[Round]:
    """The plans of a run, in the order in which they come (a random window: by its place).

    Raises ValueError for a plan that cannot be, or a pruning that leaves no trained step.
    """
    steps, window, prune = sampling.num_inference_steps, layout.window, layout.prune
    # Where nothing moves with the iteration, one iteration stands for all of the run.
    still = prune is None and (window is None or window.schedule in RANDOM)
    shares: dict[tuple[range | None, tuple[int, ...]], float] = {}
    first: dict[tuple[range | None, tuple[int, ...]], int] = {}
    plans: dict[range | None, SamplingPlan] = {}
    for iteration in range(1 if still else iterations):
        places: list[tuple[range | None, float]] = [(None, 1.0)]
        if window is not None and window.schedule in RANDOM:
            places = [*random_windows(window, steps=steps).items()]
        elif window is not None:
            places = [(fixed_window(window, steps=steps, iteration=iteration, iterations=iterations), 1.0)]
        for place, share in places:
            if place not in plans:
                plans[place] = plan_of(sampling, layout, place)
            depths = () if prune is None else tuple(pruned_depths(prune, plans[place], iteration))
            shares[place, depths] = shares.get((place, depths), 0.0) + share
            first.setdefault((place, depths), iteration)
    # Shares were added over iterations, or over the places of a random window: they are of either sum.
    total = sum(shares.values())
    result = []
    for (place, depths), share in shares.items():
        trained = unpruned_steps(stochastic_steps(layout, place, steps=steps), depths)
        result.append(Round(share / total, first[place, depths], plans[place], trained))
    return result


# Fields that the arithmetic of plans and windows complains about -> the keys they come from.
PLAN_KEYS = {
    "window": ("trainer.window",),
    "roots": ("sampling.group_size", "trainer.tree"),
    "splits": ("trainer.tree.at", "sampling.num_inference_steps"),
    "at": ("trainer.tree.at", "trainer.window"),
    "branching": ("trainer.tree.at",),
    "noise": ("trainer.window",),
    "ratio": ("trainer.tail_ratio", "trainer.window"),
    "tail": ("trainer.tail_ratio",),
    "depths": ("trainer.tree.prune.depths",),
}


def layout_problems(
    config: Config, layout: Layout, kernel: str, rounds: Callable[[], list[Round]]
) -> Iterator[Finding]:
    """What is wrong with how a policy gradient is to sample, and which transitions it is to train. What the arithmetic
    of windows and plans refuses is refused in its words. rounds: all plans of the run."""
    steps = config.sampling.num_inference_steps
    # Refused by `too_few_steps` already; the arithmetic of windows would complain of it in words that lead astray.
    if steps < 2:
        return
    is_ddim, window = kernel == "ddim", layout.window
    last = steps if is_ddim else steps - 1
    if window is not None and window_end(window, steps) > last:
        text = f"there are {steps} steps" if is_ddim else f"the last of {steps} steps is never stochastic"
        text = f"{text}, so the window must end by {last}; use {last} or null"
        yield ("trainer.window.high", "sampling.num_inference_steps"), text
        return
    if layout.tail_ratio is not None and is_ddim:
        text = "the solver of the tail is for flow models, ddim for others; write null"
        yield ("trainer.tail_ratio", "trainer.kernel"), text
    try:
        # Every plan of the run is made here, so that the one of iteration 900 is refused before the first.
        rounds()
    except ValueError as error:
        field, _, text = str(error).partition(": ")
        yield PLAN_KEYS.get(field, ("trainer.tree",)), text
    if layout.tree is not None:
        yield from _tree(config, layout, kernel, layout.tree)


def _tree(config: Config, layout: Layout, kernel: str, tree: Tree) -> Iterator[Finding]:
    window, level, growth = layout.window, layout.noise_level, layout.noise_growth
    steps, count, updates = config.sampling.num_inference_steps, most_splits(tree, window), config.trainer.updates
    reaches = kernel == "ddim" and window is not None and window_end(window, steps) == steps
    last = steps - 1 if reaches else steps - 2  # DDIM draws the last step where a window reaches it
    if isinstance(tree.at, tuple) and (not tree.at or list(tree.at) != sorted(set(tree.at))):
        yield ("trainer.tree.at",), "the steps that branch must rise, each named once"
    elif isinstance(tree.at, tuple) and tree.at[-1] > last:
        text = f"step {tree.at[-1]} cannot branch: those with noise are 0 to {last} (later ones have none); use these"
        yield ("trainer.tree.at", "sampling.num_inference_steps"), text
    roots = config.sampling.images_per_iteration // tree.ways**count
    if updates > roots > 0:
        text = f"a tree is trained on as a whole: {roots} trees are too few for {updates} updates"
        yield ("trainer.updates_per_iteration", "trainer.tree"), f"{text}; use {roots} or less, or more prompts"
    if config.in_step:
        text = "sharded processes must make their model calls together, trees make different ones; write false, or null"
        yield (config.sharded_by, "trainer.tree"), text
    if level is not None and kernel in UP_TO_ONE and level <= 1 < level * (1 + growth) and count > 1:
        text = f"{kernel} has levels up to 1, and {level:g} would grow to {level * (1 + growth):g}"
        keys = ("trainer.tree.at", "trainer.noise_level", "trainer.kernel")
        yield keys, f"{text}; use {1 / level - 1:g} or less"
    if tree.contrast and count > 1:
        text = "the best and worst of one split are compared, and there are several; write at: window_start"
        yield ("trainer.tree.contrast", "trainer.tree.at"), text
    if tree.contrast and tree.normalise == "depth":
        text = "contrast has advantages of its own, over a prompt's history; write group"
        yield ("trainer.tree.normalise", "trainer.tree.contrast"), text
