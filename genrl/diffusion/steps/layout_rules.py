"""Windows, trees, tails and what is trained of them, as far as they contradict each other.

What the arithmetic of sampling plans refuses (`genrl.mdp.plan`) is refused in its words, under the key it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.diffusion.config.kernels import UP_TO_ONE
from genrl.diffusion.steps.layout import Layout, Tree, Window, most_micro_batches, most_splits, window_end
from genrl.mdp.plan import extreme_count

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.steps.settings import PolicyGradient

# Keys of a window that only some of its schedules read.
OF_SCHEDULE = {
    "every": ("progressive", "decaying"),
    "stride": ("progressive", "decaying"),
    "decay_from": ("decaying",),
    "ratio": ("geometric",),
    "shortest": ("backward",),
}
# Fields that the arithmetic of plans complains about -> the keys they come from.
PLAN_KEYS = {
    "roots": "sampling.group_size",
    "branching": "trainer.tree.at",
    "splits": "trainer.tree.at",
    "at": "trainer.tree.at",
    "noise": "trainer.window",
    "noise_levels": "trainer.noise_level",
    "spread": "trainer.tree.spread",
    "ratio": "trainer.tail_ratio",
    "tail": "trainer.tail_ratio",
    "depths": "trainer.tree.prune.depths",
}


def layout_problems(config: Config, settings: PolicyGradient) -> Iterator[Finding]:
    """What is wrong with how a policy gradient is to sample, and which transitions it is to train."""
    layout = settings.layout
    if config.sampling.num_inference_steps < 2:
        return
    found = [*_window(config, settings.kernel, layout.window), *_outside(settings.kernel, layout)]
    if layout.tree is not None:
        found += _tree(config, settings, layout.tree)
        found += _pruning(config, settings, layout.tree)
        found += _own_advantages(settings, layout.tree)
        found += _contrast(layout.tree)
    yield from found or _plans(config, settings)


def _window(config: Config, kernel: str, window: Window | None) -> Iterator[Finding]:
    if window is None:
        return
    steps, high = config.sampling.num_inference_steps, window_end(window, config.sampling.num_inference_steps)
    last = steps if kernel == "ddim" else steps - 1
    for key, schedules in OF_SCHEDULE.items():
        if window.schedule not in schedules and getattr(window, key) != type(window).model_fields[key].default:
            text = (
                f"is of schedule {' or '.join(schedules)}, not of {window.schedule}; remove it, or change the schedule"
            )
            yield (f"trainer.window.{key}", "trainer.window.schedule"), text
    if window.schedule == "backward" and window.low > 0:
        text = "a backward window is the last `size` steps before `high`, wherever they begin; remove `low`"
        yield ("trainer.window.low", "trainer.window.schedule"), text
        return
    if high > last:
        text = f"there are {steps} steps" if kernel == "ddim" else f"the last of {steps} steps is never stochastic"
        near = f"{last} or null" if last == steps - 1 else f"{last}, or null for {steps - 1}"
        text = f"{text}, so the window must end by {last}; use {near}"
        yield ("trainer.window.high", "sampling.num_inference_steps"), text
    elif window.low >= high:
        keys = ("trainer.window.low", "sampling.num_inference_steps" if window.high is None else "trainer.window.high")
        yield keys, f"the window is empty: it would begin at step {window.low} and end before {high}; lower `low`"
    elif window.size > high - window.low:
        text = f"{window.size} steps do not fit between {window.low} and {high}; use {high - window.low} or less"
        yield ("trainer.window.size", "trainer.window.high", "sampling.num_inference_steps"), text
    if window.schedule == "backward" and window.shortest is not None and window.shortest > window.size:
        text = f"the window grows from {window.shortest} steps to {window.size}; use {window.size} or less, or null"
        yield ("trainer.window.shortest", "trainer.window.size"), text


def _outside(kernel: str, layout: Layout) -> Iterator[Finding]:
    """Steps that are not in the window."""
    if layout.noise_outside_window and layout.window is None:
        text = "there is no window: every step but the last is noisy and trained; write false, or give a window"
        yield ("trainer.noise_outside_window", "trainer.window"), text
    if layout.tail_ratio is None:
        return
    if layout.window is None:
        text = "the tail is what comes after the window, and there is none: every step is noisy; give a window, or null"
        yield ("trainer.tail_ratio", "trainer.window"), text
    if layout.noise_outside_window:
        text = "a solver's steps are deterministic, and these are noisy outside the window; write null, or false"
        yield ("trainer.tail_ratio", "trainer.noise_outside_window"), text
    if kernel == "ddim":
        text = "the solver of the tail is for flow models, ddim for others; write null"
        yield ("trainer.tail_ratio", "trainer.kernel"), text


def _last_noisy(config: Config, settings: PolicyGradient) -> int:
    """The last step that can be drawn from: the one before the end, or the end itself, which DDIM draws where a window
    reaches it."""
    steps, window = config.sampling.num_inference_steps, settings.layout.window
    reaches = settings.kernel == "ddim" and window is not None and window_end(window, steps) == steps
    return steps - 1 if reaches else steps - 2


def _tree(config: Config, settings: PolicyGradient, tree: Tree) -> Iterator[Finding]:
    window, last = settings.layout.window, _last_noisy(config, settings)
    if isinstance(tree.at, tuple):
        outside = [step for step in tree.at if step > last]
        if not tree.at:
            yield ("trainer.tree.at",), "no step branches, which is no tree; name steps, or write tree: null"
        elif outside:
            text = f"steps {_listed(outside)} cannot branch: those with noise are 0 to {last} (later ones have none)"
            yield ("trainer.tree.at", "sampling.num_inference_steps"), f"{text}; use these"
        elif list(tree.at) != sorted(set(tree.at)):
            yield ("trainer.tree.at",), f"steps must rise; write {list(sorted(set(tree.at)))}"
    elif window is None:
        text = f"{tree.at} branches where a window is, and there is none; give one, or steps such as [0, {last // 2}]"
        yield ("trainer.tree.at", "trainer.window"), text
        return
    count = most_splits(tree, window)
    group, leaves = config.sampling.group_size, tree.ways**count
    if group % leaves:
        near = [size for size in (group - group % leaves, group - group % leaves + leaves) if size >= leaves]
        text = f"{group} samples are not whole trees of {tree.ways}^{count} = {leaves} leaves"
        keys = ("sampling.group_size", "trainer.tree.ways", "trainer.tree.at")
        yield keys, f"{text}; use {' or '.join(map(str, near))}, or fewer splits"
    else:
        roots, updates = most_micro_batches(config.sampling, settings.layout), settings.updates
        if updates > roots:
            text = f"a tree is trained on as a whole: {roots} trees are too few for {updates} updates"
            yield ("trainer.updates_per_iteration", "trainer.tree"), f"{text}; use {roots} or less, or more prompts"
    yield from _growth(settings, count)
    if tree.credit == "mean" and tree.sharpness != type(tree).model_fields["sharpness"].default:
        text = "the mean of the leaves weighs them alike; remove it, or use path_softmax or level_softmax"
        yield ("trainer.tree.sharpness", "trainer.tree.credit"), text
    if config.in_step:
        key = config.sharded_by
        text = "sharded processes must make their model calls together, trees make different ones; write false, or null"
        yield (key, "trainer.tree"), text


def _growth(settings: PolicyGradient, splits: int) -> Iterator[Finding]:
    growth = settings.layout.noise_growth
    if growth == 0:
        return
    level = settings.noise_level
    if splits < 2:
        text = "the noise grows from one branching step to the next, and there is one; write 0"
        yield ("trainer.tree.noise_growth", "trainer.tree.at"), text
    elif level is None:
        text = f"{settings.kernel} takes its noise from the schedule and has no level that could grow; write 0"
        yield ("trainer.tree.noise_growth", "trainer.kernel"), text
    elif settings.kernel in UP_TO_ONE and 0 < level <= 1 < level * (1 + growth):
        text = f"{settings.kernel} has levels up to 1, and {level:g} would grow to {level * (1 + growth):g}"
        keys = ("trainer.tree.noise_growth", "trainer.noise_level", "trainer.kernel")
        yield keys, f"{text}; use {1 / level - 1:g} or less"


def _pruning(config: Config, settings: PolicyGradient, tree: Tree) -> Iterator[Finding]:
    prune, at = tree.prune, "trainer.tree.prune"
    if prune is None:
        return
    if not prune.depths and prune.width is None:
        yield (at,), "neither depths nor width is pruned; give one of them, or write null"
    deepest = _last_noisy(config, settings) + 1
    beyond = [depth for depth in prune.depths if depth > deepest]
    if beyond:
        text = f"no trained edge leads to depth {_listed(beyond)}: depths are step + 1, so 1 to {deepest}; use these"
        yield (f"{at}.depths", "sampling.num_inference_steps"), text
    if prune.depths and sorted(prune.depths) != list(range(min(prune.depths), max(prune.depths) + 1)):
        found = list(range(min(prune.depths), max(prune.depths) + 1))
        yield (f"{at}.depths",), f"depths must be consecutive, each once; for example {found}"
    if prune.slide_every is not None and not prune.depths:
        yield (f"{at}.slide_every", f"{at}.depths"), "there are no depths that could move; name them, or write null"
    if prune.width != "extremes" and prune.keep != type(prune).model_fields["keep"].default:
        yield (f"{at}.keep", f"{at}.width"), "is the share that width: extremes keeps; remove it, or write extremes"
    if prune.width == "extremes":
        try:
            extreme_count(config.sampling.group_size, prune.keep)
        except ValueError as error:
            yield (f"{at}.keep", "sampling.group_size"), _after_field(error)
    if prune.width is not None and tree.contrast is not None:
        text = "contrast has chosen the leaves already, and width would choose among them; keep one of the two"
        yield (f"{at}.width", "trainer.tree.contrast"), text


def _own_advantages(settings: PolicyGradient, tree: Tree) -> Iterator[Finding]:
    """Trees whose edges are not measured by the advantages of the samples."""
    if getattr(settings, "advantage_scale", "group") == "group":
        return
    for key, own in (("contrast", tree.contrast is not None), ("normalise", tree.normalise == "depth")):
        if own:
            text = f"{key} has a scale of its own, which takes the place of this one; write group"
            yield ("trainer.advantage_scale", f"trainer.tree.{key}"), text


def _contrast(tree: Tree) -> Iterator[Finding]:
    if tree.contrast is None:
        return
    if tree.at == "window" or (isinstance(tree.at, tuple) and len(tree.at) > 1):
        text = "the best and worst of one split are compared, and there are several; write at: window_start"
        yield ("trainer.tree.contrast", "trainer.tree.at"), text
    if tree.normalise == "depth":
        text = "contrast has advantages of its own, over a prompt's history; write group"
        yield ("trainer.tree.normalise", "trainer.tree.contrast"), text


def _plans(config: Config, settings: PolicyGradient) -> Iterator[Finding]:
    """What only shows in the plans of the run's iterations."""
    prune = settings.layout.prune
    try:
        rounds = settings.rounds(config)
    except ValueError as error:
        field = str(error).split(":")[0]
        yield (PLAN_KEYS.get(field, "trainer.tree"),), _after_field(error)
        return
    if prune is not None and prune.width is not None and all(max(r.trained) <= max(r.plan.splits) for r in rounds):
        text = "leaves are chosen among the edges after the last split, and none of these is trained"
        text = f"{text}; let the window go on after the last split, or write null"
        yield ("trainer.tree.prune.width", "trainer.tree.at", "trainer.window"), text


def _after_field(error: ValueError) -> str:
    """The message of a plan without the name of its field."""
    return str(error).split(": ", 1)[-1]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
