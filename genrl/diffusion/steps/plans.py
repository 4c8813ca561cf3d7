"""The steps of an iteration: which of them are noisy and trained, where trees branch, and what each is worth.

The plan is a function of (configuration, iteration): the same in all processes, known before anything is run. What
needs no random number of it is in `layout`. `choose_kernel` asks the loaded model too whether the transition is one for
it.

Advantages and weights of the trained transitions are tables over (step, slot). An edge of a tree is known by its step
and the slot of the first leaf below it (`forest`), so one table [T, N] serves all structures; of independent samples
every row is the advantages of the samples. All processes know the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Draw, Samples, independent
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.layout import Prune, Tree, fixed_window, plan_of, pruned_depths, stochastic_steps, window_end
from genrl.diffusion.steps.settings import EveryStep, PolicyGradient, Stochastic
from genrl.mdp import tree as trees
from genrl.mdp.kernels import FLOW_KERNELS
from genrl.mdp.noise import generator
from genrl.mdp.plan import (
    SamplingPlan,
    check_window,
    draw_start,
    geometric_start_probabilities,
    make_plan,
    unpruned_steps,
)
from genrl.objectives.credit import (
    PromptHistory,
    best_siblings,
    branch_extremes,
    depth_pruned,
    edge_weights,
    extreme_leaves,
    leaf_counts,
    level_softmax,
    mean_of_leaves,
    normalise_per_depth,
    path_softmax,
    signed_advantage,
    width_pruned,
)
from genrl.objectives.groups import group_statistics
from genrl.runtime.loop.running import filled
from genrl.runtime.loop.updating import Meter


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


def window_steps(size: int, low: int, high: int, *, seed: int, iteration: int) -> range:
    """The stochastic (trained) steps of one iteration: `size` consecutive ones inside [low, high).

    Their start is uniform in low .. high - size. A pure function of its arguments: the same on every process and for
    every sample of a group, so that a group's advantages compare the same exploration; never empty.
    Source: the windows of MixGRPO (arXiv 2507.21802) and of Flow-GRPO-Fast (Flow-GRPO's repository).
    Raises ValueError unless 1 <= size <= high - low and low >= 0.
    """
    check_window(size, low, high)
    starts = high - low - size + 1
    offset = int(torch.randint(starts, (1,), generator=generator(seed, "window", iteration)))
    return range(low + offset, low + offset + size)


def geometric_window(size: int, low: int, high: int, *, ratio: float, seed: int, iteration: int) -> range:
    """`size` consecutive steps inside [low, high), early starts more likely: `geometric_start_probabilities`.

    TreeGRPO has as many starts as steps less the size, so its window ends before the last step: high = steps - 1.
    A pure function of its arguments, as `window_steps`.
    """
    check_window(size, low, high)
    uniform = float(torch.rand((), generator=generator(seed, "window", iteration), dtype=torch.float64))
    start = low + draw_start(geometric_start_probabilities(high - low - size + 1, ratio), uniform)
    return range(start, start + size)


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
    if plan.noise_levels[-1] is not None and not last_step_is_stochastic(run.policy):
        raise ValueError(
            f"trainer.window.high: {run.config.model.path} ends at alpha-bar 1, so its last step has no "
            f"noise; use {plan.steps - 1} or null"
        )
    level = settings.noise_level or 0.0
    # Only what differs: trees whose noise grows with depth, and steps outside of the window.
    others = {i: plan.noise_levels[i] for i in plan.stochastic if plan.noise_levels[i] != level}
    return Kernel(settings.kernel, level, {i: other for i, other in others.items() if other is not None})


def last_step_is_stochastic(policy: Policy) -> bool:
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
) -> Samples:
    """Samples whose steps `steps` are drawn from the kernel."""
    return independent(policy.roll_out(batch, kernel, steps), slots)


class Edges(NamedTuple):
    """Tables [T, N]; 0 where there is no trained edge."""

    advantage: Tensor
    weight: Tensor
    """In the loss, which is divided by the sum over an update."""
    moves: Tensor
    """Whether a sample below has an advantage. An edge whose samples' advantages cancel still belongs to the loss, with
    its divergence from the reference; one without any (no score, no spread) does not."""
    skipped: list[int]
    """Depths with too few nodes to be normalised alone."""


def estimate(
    run: DiffusionRun,
    settings: PolicyGradient,
    rollouts: Rollouts,
    steps: Steps,
    advantages: Tensor,
    meter: Meter,
    *,
    grouped: bool = True,
) -> Edges:
    """Advantage and weight of every trained transition, from the advantages of the samples, float64 [N].

    grouped: whether these compare the samples of a prompt, whose spread is then logged.
    """
    iteration = run.iteration
    # Per sample and before trees: a mean over the leaves of clipped advantages stays inside the clip by itself.
    advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
    if grouped:
        meter.add_spread(group_statistics(rollouts.total, rollouts.group))
    if settings.layout.tree is None:
        meter.add_advantages(advantages, settings.advantage_clip)
        return independent_edges(advantages, steps)
    rewards = rollouts.total
    if settings.layout.tree.contrast:
        advantages = contrasted(run, settings, settings.layout.tree, rollouts)
        rewards = torch.where(advantages != 0, rewards, torch.nan)  # the others have no part in what is above them
    # NaN until some process fills them in: a value read of a step that none recorded would show itself.
    log_probs = torch.full((steps.plan.steps, rollouts.num_samples), torch.nan)
    if settings.layout.tree.credit != "mean":
        pieces = [piece for micro_batch in rollouts.mine.values() for piece in micro_batch.pieces]
        # The likelihood of a path takes the log-probabilities of all its edges, and other processes ran some of the
        # trees.
        recorded = [(i, p.slots[i], log) for p in pieces for i, log in p.trajectory.log_probs.items()]
        log_probs = filled(log_probs, recorded)
    edges = tree_edges(
        settings.layout.tree, steps.plan, steps.trained, rewards, advantages, log_probs,
        clip=settings.advantage_clip, iteration=iteration,
    )  # fmt: skip
    meter.add_advantages(edges.advantage[edges.weight > 0], settings.advantage_clip)
    if edges.skipped and iteration == 0:
        run.process.progress.say(
            f"depths {', '.join(map(str, edges.skipped))} have fewer than 4 states: measured against the leaves"
        )
    return edges


def contrasted(run: DiffusionRun, settings: PolicyGradient, tree: Tree, rollouts: Rollouts) -> Tensor:
    """B2-DiffuRL's advantages: scores over the prompt's history, of the best and worst leaf of each split, [N]."""
    history = PromptHistory(8)
    # In the loop's memory, so that it survives a resume and an undone iteration leaves no trace in it.
    history.rewards = run.loop.memory.setdefault("prompt_history", {})
    scores = history.normalise(rollouts.total, rollouts.prompts)
    # With the one split that `contrast` allows, the leaves of a split have consecutive slots.
    branch = torch.arange(rollouts.num_samples) // tree.ways
    chosen = branch_extremes(scores, branch, high=0.5, low=-0.5)
    clip = settings.advantage_clip
    return torch.where(chosen != 0, signed_advantage(scores, clip=clip), 0.0)


def independent_edges(advantages: Tensor, steps: Steps) -> Edges:
    """The edges of samples that share nothing: advantages [N], weight 1."""
    table = torch.zeros(steps.plan.steps, len(advantages), dtype=advantages.dtype)
    weight = torch.zeros_like(table)
    table[list(steps.trained)], weight[list(steps.trained)] = advantages, 1.0
    return Edges(table, weight, table != 0, [])


def tree_edges(
    settings: Tree,
    plan: SamplingPlan,
    trained: tuple[int, ...],
    rewards: Tensor,
    advantages: Tensor,
    log_probs: Tensor,
    *,
    clip: float,
    iteration: int,
) -> Edges:
    """Edges of samples that are leaves. rewards, advantages: [N], of the leaves by slot; log_probs: [T, N], of
    sampling.

    A leaf without a score (NaN reward) is left out of the values above it.
    """
    tree = trees.grow(plan)
    parent, leaves = tree.parent, tree.num_slots
    scored = ~rewards.isnan()
    # BranchGRPO standardises the values of each depth itself, so rewards go in; else the advantages of the leaves do.
    score = rewards if settings.normalise == "depth" else torch.where(scored, advantages.double(), torch.nan)
    leaf_values = score.view(-1, leaves)
    if settings.credit == "mean":
        values = mean_of_leaves(parent, leaf_values)
    else:
        backup = path_softmax if settings.credit == "path_softmax" else level_softmax
        values = backup(parent, leaf_values, from_table(log_probs, tree), 1.0)
    skipped: list[int] = []
    if settings.normalise == "depth":
        values, skipped = normalise_per_depth(values, tree.depth)
        # These advantages were made here, after `estimate` clipped those of the samples.
        values = values.clamp(-clip, clip)
        skipped = [depth for depth in skipped if depth - 1 in trained]
    counts = leaf_counts(parent, scored.view(-1, leaves))
    # An edge below which no leaf has a score has nothing to be credited with.
    trainable = torch.isin(tree.depth - 1, torch.tensor(trained)) & (counts > 0)
    if settings.prune is not None:
        trainable = trainable & unpruned(settings.prune, tree, plan, rewards.view(-1, leaves), iteration)
    moves = leaf_counts(parent, (advantages != 0).view(-1, leaves)) > 0
    return Edges(
        to_table(values.nan_to_num(0.0) * trainable, tree).to(advantages.dtype),
        to_table(edge_weights(trainable, counts, settings.weight), tree).to(advantages.dtype),
        to_table(moves, tree),
        skipped,
    )


def unpruned(settings: Prune, tree: trees.Tree, plan: SamplingPlan, rewards: Tensor, iteration: int) -> Tensor:
    """Edges that pruning leaves, bool [P, nodes]. rewards: [P, leaves]."""
    depths = pruned_depths(settings, plan, iteration)
    remaining = depth_pruned(tree.depth, depths).expand(len(rewards), -1)
    if settings.width is None:
        return remaining
    last_split = max(plan.splits)
    if settings.width == "best_sibling":
        good = best_siblings(tree.parent, tree.depth, rewards, last_split=last_split)
    else:
        # A quarter from either end is the half of the leaves that BranchGRPO keeps.
        good = extreme_leaves(rewards, max(1, rewards.shape[-1] // 4))
    good = good | rewards.isnan().all(-1, keepdim=True)  # without any score there is nothing to choose by, or to train
    return remaining & width_pruned(tree.parent, tree.depth, good, last_split=last_split)


def to_table(values: Tensor, tree: trees.Tree) -> Tensor:
    """Values of nodes [P, nodes] by step and slot of the edge into them, [T, P * leaves]."""
    groups, edges = len(values), tree.depth > 0
    table = torch.zeros(tree.steps, groups, tree.num_slots, dtype=values.dtype)
    table[tree.depth[edges] - 1, :, tree.first_leaf[edges]] = values[:, edges].T
    return table.flatten(1)


def from_table(table: Tensor, tree: trees.Tree) -> Tensor:
    """The reverse of `to_table`, [P, nodes]; NaN for roots."""
    grid = table.view(tree.steps, -1, tree.num_slots)
    # Roots have no edge: their index is only made valid here, and their value replaced below.
    values = grid[(tree.depth - 1).clamp(min=0), :, tree.first_leaf].T
    return torch.where(tree.depth > 0, values, torch.nan)
