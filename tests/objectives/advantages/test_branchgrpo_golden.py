"""BranchGRPO as released: transitions, trees, fused rewards, pruning, training steps (golden tree_branchgrpo)."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from genrl.mdp import gaussian, kernels
from genrl.mdp.plan import SamplingPlan, make_plan, sliding_depths
from genrl.mdp.tree import Tree, correlated_noise, grow
from genrl.objectives.advantages import credit, pruning
from genrl.objectives.surrogates.policy_losses import clipped_surrogate
from tests.golden_cases import Arrays
from tests.reference.branchgrpo import repeated_windows, uniform_splits
from tests.reference.grids import shifted_grid

ITERATIONS = 300
"""Of the released script, where a case does not say."""

SINGLE = r"(step|corr|parse|uniform)\d*_"
"""Names in tree_branchgrpo that belong to no tree."""


def test_branchgrpo_transitions(golden) -> None:
    """Dance-SDE steps, the scaled split noise scored as released, and the paper's correlated noise."""
    a = Arrays(golden("tree_branchgrpo"))
    x, v, sigmas = (a.given(f"step_{name}") for name in ("x", "v", "sigmas"))
    eta = float(a.given("step_eta"))
    loose = {"rtol": 1e-4, "atol": 1e-4}
    for tag in a.tags(r"(step\d+)_mean"):
        at = int(tag.removeprefix("step"))
        step = kernels.dance_sde(x, v, sigmas[at], sigmas[at + 1], noise_level=eta)
        noise = a.given(f"{tag}_noise")
        a.check(f"{tag}_mean", step.mean, **loose)
        a.check(f"{tag}_std", step.std.flatten()[0], **loose)
        taken = gaussian.sample(step.mean, step.std, noise)
        a.check(f"{tag}_next", taken, **loose)
        a.check(f"{tag}_logp", gaussian.log_prob(taken, step.mean, step.std), **loose)
        a.check(f"{tag}_x0", kernels.ode(x, v, sigmas[at], 0.0).mean, **loose)
        # Released: children of one state get several times the noise, but are scored without it.
        noise = a.given(f"{tag}_split_noise")
        mean, std = (part[:1].expand(len(noise), *part.shape[1:]) for part in step)
        for scale in map(int, a.tags(rf"{tag}_split_next_scale(\d+)")):
            child = gaussian.sample(mean, scale * std, noise)
            a.check(f"{tag}_split_next_scale{scale}", child, **loose)
            released = gaussian.log_prob(child, mean, std)
            a.check(f"{tag}_split_logp_scale{scale}", released, rtol=1e-4, atol=2e-3)
            squares = noise.double().square().flatten(1).mean(1)
            proper = released + (scale**2 - 1) / 2 * squares - math.log(scale)  # what it should be scored with
            torch.testing.assert_close(
                gaussian.log_prob(child, mean, scale * std).double(), proper, rtol=1e-4, atol=2e-3
            )

    base, own = a.given("corr_xi0"), a.given("corr_eta")
    for tag in a.tags(r"corr_xi_s(\d\w*)"):
        a.check(f"corr_xi_s{tag}", correlated_noise(base, own, float(tag.replace("p", "."))))

    for tag in a.tags(r"(uniform\d+)_points"):
        a.check(f"{tag}_points", uniform_splits(*a.given(f"{tag}_rounds_T").tolist()))
    for tag in a.tags(r"(parse\d+)_points"):
        wanted = [int(text) for text in a.text(f"{tag}_spec").split(",")]
        steps, points = int(a.given(f"{tag}_T")), a.given(f"{tag}_points")
        noise = dict.fromkeys(range(steps), 0.3)
        if all(0 <= step < steps for step in wanted):
            a.check(f"{tag}_points", make_plan(steps, noise=noise, splits=dict.fromkeys(wanted, 2)).splits)
        else:  # released: moved into the schedule in silence
            assert points.tolist() == sorted({min(max(step, 0), steps - 1) for step in wanted})
            with pytest.raises(ValueError, match="splits: steps .* are outside"):
                make_plan(steps, noise=noise, splits=dict.fromkeys(wanted, 2))
    a.all_used(f"{SINGLE}.*")


def branchgrpo_plan(a: Arrays, tag: str) -> SamplingPlan:
    steps, splits = int(a.given(f"{tag}_T")), a.given(f"{tag}_splits").tolist()
    mixed, size, stride = a.given(f"{tag}_mix_window_stride").tolist()
    stochastic = set(splits) | set(repeated_windows(size, stride, steps)) if mixed else range(steps)
    ways = round(len(a.given(f"{tag}_leaf_index")) ** (1 / max(len(splits), 1)))
    return make_plan(steps, noise=dict.fromkeys(stochastic, 0.3), splits=dict.fromkeys(splits, ways))


def shift_of(sigmas: Tensor) -> float:
    """The shift s of a grid `s u / (1 + (s - 1) u)` of even u, from the value nearest to the middle."""
    steps = len(sigmas) - 1
    u, sigma = 1 - (steps // 2) / steps, float(sigmas[steps // 2])
    return round(sigma * (1 - u) / (u * (1 - sigma)), 4)


def preorder(tree: Tree) -> list[int]:
    return sorted(range(tree.num_nodes), key=lambda node: (int(tree.first_leaf[node]), int(tree.depth[node])))


def test_branchgrpo_trees(golden) -> None:
    """The tree, rewards fused from the leaves, advantages per depth, pruning and the loss of whole training steps."""
    a = Arrays(golden("tree_branchgrpo"))
    tags = list(a.tags(r"(\w+)_parent"))
    for tag in tags:
        plan = branchgrpo_plan(a, tag)
        tree = grow(plan)
        a.check(f"{tag}_sigmas", shifted_grid(plan.steps, shift_of(a.given(f"{tag}_sigmas"))), rtol=0, atol=5e-7)
        a.check(f"{tag}_parent", tree.parent)
        a.check(f"{tag}_depth", tree.depth)
        a.check(f"{tag}_edge_step", tree.depth - 1)
        a.check(f"{tag}_leaf_index", tree.leaves)
        a.check(f"{tag}_dfs_preorder_edges", [node for node in preorder(tree) if tree.depth[node] > 0])
        a.check(f"{tag}_parents_per_step", plan.nodes[:-1])
        a.check(f"{tag}_edges_per_step", plan.nodes[1:])
        a.check(f"{tag}_forwards_edges_nodes_leaves", [plan.calls, plan.edges, sum(plan.nodes), plan.leaves])
        is_action = torch.isin(tree.depth - 1, torch.tensor(plan.stochastic))
        stochastic = a.given(f"{tag}_edge_is_sde").bool()
        assert torch.equal(stochastic[tree.depth > 0], is_action[tree.depth > 0])

        rewards, log_prob = a.given(f"{tag}_leaf_reward"), a.given(f"{tag}_edge_logp")
        assert int(a.given(f"{tag}_ntree")) == len(rewards)
        fused = {
            "uniform": credit.mean_of_leaves(tree.parent, rewards),
            "level": credit.level_softmax(tree.parent, rewards, log_prob),
            "path": credit.path_softmax(tree.parent, rewards, log_prob),
            "path_beta_half": credit.path_softmax(tree.parent, rewards, log_prob, beta=0.5),
        }
        advantages = {}
        for mode, values in fused.items():
            a.check(f"{tag}_node_reward_{mode}", values)
            advantages[mode] = credit.normalise_per_depth(values, tree.depth, min_nodes=2).advantages
            if f"{tag}_node_adv_{mode}" in a:
                a.check(f"{tag}_node_adv_{mode}", advantages[mode])
        for name in a.tags(rf"({tag}_prune\d+)_keep_mask"):
            check_training_step(a, name, plan, tree, advantages)
    a.all_used(but=f"{SINGLE}.*")


def check_training_step(a: Arrays, name: str, plan: SamplingPlan, tree: Tree, advantages: dict[str, Tensor]) -> None:
    options = json.loads(a.text(f"{name}_cfg_json"))
    drift, clip = a.given(f"{name}_logp_drift"), options["clip"]
    keep = ((tree.depth > 0) & torch.isin(tree.depth - 1, torch.tensor(plan.stochastic))).expand(len(drift), -1)
    if "wmode" in options:  # pruned by edges of the batch, which nothing here does
        keep = a.given(f"{name}_keep_mask")
    elif options.get("cur", 0) <= int(options.get("max_iter", ITERATIONS) * options.get("ratio_step", 1.0)):
        depths = options.get("depth_prune", [])
        if options.get("slide"):
            stop = options.get("stop", max(plan.splits))
            depths = sliding_depths(depths, iteration=options["cur"], interval=options["stride"], stop=stop)
        keep = keep & pruning.depth_pruned(tree.depth, depths)
    a.check(f"{name}_keep_mask", keep)
    a.check(f"{name}_kept_per_tree", keep.sum(1))
    a.check(f"{name}_num_optimizer_steps", math.ceil(int(keep.sum()) / options["grad_acc"]))
    # A case was run in one of the two released modes; both make the same trees, the loss tells which it was.
    losses = [
        clipped_surrogate(drift, torch.zeros_like(drift), advantages[mode].clamp(-5, 5), clip, clip).loss[keep].mean()
        for mode in ("uniform", "level")
    ]
    want = a.given(f"{name}_mean_edge_ppo_loss")
    loss = min(losses, key=lambda loss: abs(loss - want))
    a.check(f"{name}_mean_edge_ppo_loss", loss)
    scaled = loss / (options["grad_acc"] * (int(keep.sum()) // len(keep)))  # released: edges per tree, rounded down
    a.check(f"{name}_mean_scaled_loss", scaled, rtol=2e-3, atol=1e-9)  # the peer sums float32 losses near 0
