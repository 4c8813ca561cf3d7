"""Trees: shapes, credit and costs (golden tree_invariants, tree_treegrpo, tree_b2_diffurl and tree_dynamic_treerpo)."""

import json
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from genrl.diffusion.methods.dynamic_tree_rpo.train import dynamic_clip_bounds, progress_loss, progress_weights
from genrl.mdp import plan as plans
from genrl.mdp.plan import SamplingPlan, make_plan, sliding_depths
from genrl.mdp.tree import Tree, correlated_noise, from_parents, grow
from genrl.objectives import credit
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import clipped_surrogate
from tests.golden_cases import Arrays


def test_invariants(golden) -> None:
    a = Arrays(golden("tree_invariants"))
    for tag in a.tags(r"(cfg_\w+)_T_roots"):
        steps, roots = a.given(f"{tag}_T_roots").tolist()
        branching = tuple(a.given(f"{tag}_branch").tolist())
        plan = SamplingPlan(roots=roots, branching=branching, noise_levels=(0.7,) * steps)
        every, counts = range(steps), [plan.calls, plan.edges, sum(plan.nodes), plan.leaves]
        trained = [plan.training_calls(every), plan.trained_edges(every)]
        a.checks(tag, nodes_per_level=plan.nodes, forwards_edges_nodes_leaves=counts)
        a.checks(tag, train_forwards_shared_unshared=trained, independent_forwards=plan.independent_calls)
        tree = grow(plan)
        assert [len(tree.level(depth)) for depth in range(steps + 1)] == list(plan.nodes)

    for tag in a.tags(r"(ragged\d+)_parent"):
        parent, rewards = a.given(f"{tag}_parent"), a.given(f"{tag}_leaf_reward")
        log_prob = a.given(f"{tag}_edge_logp")
        tree = from_parents(parent)
        a.checks(tag, depth=tree.depth, leaf_index=tree.leaves, num_leaves_below=tree.num_leaves)
        a.checks(tag, leaf_index=credit.leaf_nodes(parent), num_leaves_below=credit.leaf_counts(parent))
        a.check(f"{tag}_representative_leaf", tree.first_leaf)
        uniform = credit.mean_of_leaves(parent, rewards)
        softmax = [way(parent, rewards, log_prob) for way in (credit.path_softmax, credit.level_softmax)]
        a.checks(f"{tag}_reward", uniform=uniform, path_softmax=softmax[0], level_softmax=softmax[1])
        one_group = torch.zeros(len(rewards), dtype=torch.int64)
        advantages = group_advantages(rewards, one_group, scale="group", eps=1e-8, ddof=1)
        edge, has_edge = credit.mean_of_leaves(parent, advantages), parent >= 0
        multiplicity = credit.leaf_counts(parent).double() / len(rewards)
        a.checks(tag, leaf_group_adv=advantages, edge_credit_mean_of_leaf_adv=edge)
        a.check(f"{tag}_edge_multiplicity_weight", multiplicity)
        normalised = credit.normalise_per_depth(uniform, tree.depth, min_nodes=2)
        a.check(f"{tag}_depth_norm_adv_uniform", normalised.advantages)
        weights = credit.edge_weights(has_edge, credit.leaf_counts(parent), "leaf_multiplicity")
        assert torch.equal(weights / len(rewards), torch.where(has_edge, multiplicity, 0.0))
        phi = a.given(f"{tag}_phi")
        a.check(f"{tag}_path_duplicated_gradient", (weights * edge * phi).sum() / len(rewards))
    assert a.given("note_prefix_zero") == 1.0  # a remark: a prefix shared by all leaves has credit 0 (see test_credit)

    rows = []
    for steps, first, candidates, *_ in a.given("caterpillar_T_d_k_forwards_compare_candidates").tolist():
        plan = plans.caterpillar(steps, noise=dict.fromkeys(range(steps), 1.0), first=first, candidates=candidates)
        compared = range(first, steps)
        calls = [plan.calls, plan.training_calls(compared), plan.trained_edges(compared)]
        rows.append([steps, first, candidates, *calls])
    a.check("caterpillar_T_d_k_forwards_compare_candidates", rows)
    for split, group, steps, shared, _ in a.given("prefix_k_G_T_forwards_shared_unshared").tolist():
        assert make_plan(steps, noise={split: 0.7}, splits={split: group}).calls == shared
    a.all_used(but=r"ragged\d+_log_partition|cfg_names")


def test_treegrpo(golden) -> None:
    a = Arrays(golden("tree_treegrpo"))
    for tag in a.tags(r"(\w+)_k_d"):
        ways, depth = a.given(f"{tag}_k_d").tolist()
        plan = make_plan(depth, noise=dict.fromkeys(range(depth), 0.7), splits=dict.fromkeys(range(depth), ways))
        tree = grow(plan)
        a.checks(tag, parent=tree.parent, depth=tree.depth, leaf_index=tree.leaves)
        scores, weights = a.given(f"{tag}_leaf_scores"), a.given(f"{tag}_score_weights")
        group = torch.zeros(len(scores), dtype=torch.int64)
        population, unbiased = (
            sum(
                w * group_advantages(s, group, scale="group", eps=eps, ddof=ddof)
                for s, w in zip(scores.T, weights, strict=True)
            )
            for eps, ddof in ((0.0, 0), (1e-8, 1))
        )
        a.checks(f"{tag}_leaf_adv", popstd=population, unbiased_eps=unbiased)
        old, new = a.given(f"{tag}_edge_logp_old"), a.given(f"{tag}_edge_logp_new")
        has_edge = tree.parent >= 0
        edge, even = (credit.level_softmax(tree.parent, population, old, alpha=alpha) for alpha in (1.0, 0.0))
        a.checks(tag, edge_adv=edge, edge_adv_uniform=even)
        clip = float(a.given(f"{tag}_clip_eps"))
        loss = clipped_surrogate(new, old, edge, clip, clip).loss
        weights = credit.edge_weights(has_edge, tree.num_leaves, "per_edge")
        total = (loss * weights).sum()
        a.checks(f"{tag}_loss", sum_edges=loss[has_edge].sum(), mean_edges=total / weights.sum())

    for tag in a.tags(r"start_pmf_(\w+)"):
        steps, size, ratio = re.fullmatch(r"T(\d+)_w(\d+)_r(\d+)", tag).groups()
        law = plans.geometric_start_probabilities(int(steps) - int(size), 1.0 if ratio == "10" else float(f"0.{ratio}"))
        a.check(f"start_pmf_{tag}", law)
        a.check(f"start_icdf_{tag}", [plans.draw_start(law, u) for u in a.given(f"start_u_{tag}").tolist()])

    rows = []
    for steps, ways, depth, start, *_ in a.given("nfe_T_k_d_start_forwards_trainedges_leaves").tolist():
        window = range(start, start + depth)
        plan = make_plan(steps, noise=dict.fromkeys(window, 0.7), splits=dict.fromkeys(window, ways))
        rows.append([steps, ways, depth, start, plan.calls, plan.trained_edges(window), plan.leaves])
    a.check("nfe_T_k_d_start_forwards_trainedges_leaves", rows)
    a.all_used(but=r"\w+_(sibling_weight|leaf_weight_from_root|effective_sample_size_root)")  # not computed here


def test_b2_diffurl(golden) -> None:
    a = Arrays(golden("tree_b2_diffurl"))
    size, branches, batches = (int(a.given(name)) for name in ("batch_size", "branches", "num_batches"))
    high, low = float(a.given("pos_threshold")), float(a.given("neg_threshold"))
    a.check("first_trained_step", plans.backward_interval(
        int(a.given("num_steps")), shortest=int(a.given("split_step")), longest=int(a.given("num_steps")),
        stages=100, stage=0).start)  # fmt: skip
    flat = torch.arange(size * branches * batches)  # branch-major inside a batch
    branch = (flat % size) * batches + flat // (size * branches)
    history = credit.PromptHistory(int(a.given("history_cnt")))
    scores, chosen = [], []
    for rewards, prompts in zip(a.given("rewards"), a.given("prompt_id").tolist(), strict=True):
        scores.append(history.normalise(rewards, [str(prompt) for prompt in prompts]))
        sign = credit.branch_extremes(scores[-1], branch, high=high, low=low)
        picked = sorted(sign.nonzero()[:, 0].tolist(), key=lambda n: (int(branch[n]), -int(sign[n])))
        chosen.append(torch.tensor(picked))
    a.check("norm_score", torch.stack(scores))
    a.check("selected_count", [len(picked) for picked in chosen])
    indices, values = a.given("selected_flat_index"), a.given("selected_score")
    for row, (score, picked) in enumerate(zip(scores, chosen, strict=True)):
        assert indices[row].tolist() == picked.tolist() + [-1] * (indices.shape[1] - len(picked))
        assert torch.allclose(values[row, : len(picked)], score[picked], rtol=1e-9)
        assert values[row, len(picked) :].isnan().all()

    for tag in a.tags(r"(curriculum_\w+)_split_step"):
        shortest, longest, stages = a.given(f"{tag}_left_right_stages").tolist()
        interval = partial(plans.backward_interval, longest, shortest=shortest, longest=longest, stages=stages)
        a.check(f"{tag}_split_step", [len(interval(stage=stage)) for stage in range(stages)])

    old, new, score = (a.given(f"loss_{name}") for name in ("logp_old", "logp_new", "score"))
    for tag in a.tags(r"(loss_w\w+)_grad_logp"):
        positive, negative, clip, largest = a.given(f"{tag}_beta_pos_beta_neg_eps_advmax").tolist()
        advantage = credit.signed_advantage(score, clip=largest, positive=positive, negative=negative)
        moving = new.clone().requires_grad_()
        loss = clipped_surrogate(moving, old, advantage, clip, clip).loss.mean()
        a.check(tag, loss.detach())
        a.check(f"{tag}_grad_logp", torch.autograd.grad(loss, moving)[0])

    steps = int(a.given("nfe_T"))
    branched = [
        make_plan(steps, noise={steps - s: 1.0}, splits={steps - s: ways})
        for s, ways in zip(a.given("nfe_s").flatten().tolist(), a.given("nfe_K").flatten().tolist(), strict=True)
    ]
    shape = a.given("nfe_s").shape
    a.check("nfe_branch_rollout_shared_split_forward", torch.tensor([plan.calls for plan in branched]).view(shape))
    a.check("nfe_independent", torch.tensor([plan.independent_calls for plan in branched]).view(shape))
    a.all_used(but="nfe_branch_rollout")  # where a node is copied before its split, and each copy evaluated


def test_dynamic_treerpo(golden) -> None:
    a = Arrays(golden("tree_dynamic_treerpo_inferred"))
    base, growth, depths = a.given("noise_base_growth_depth").tolist()
    a.check("noise_scale_per_level", plans.growing_noise(base, growth, int(depths)))
    rewards = a.given("leaf_reward")
    advantages = group_advantages(
        rewards, torch.zeros(len(rewards), dtype=torch.int64), scale="group", eps=1e-8, ddof=1
    )
    a.check("leaf_adv", advantages)
    low, high, sensitivity = a.given("clip_low_high_eta").tolist()
    lower, upper = dynamic_clip_bounds(advantages, low=low, high=high, sensitivity=sensitivity)
    a.checks("clip", lower=lower, upper=upper)
    weights = progress_weights(rewards)
    a.check("progress_weight", weights)
    best = int(weights.argmin())
    a.check("best_leaf", best)
    new, old = a.given("v_new"), a.given("v_old")

    def at_every_depth(weight: Tensor) -> Tensor:
        target = old[best]
        per_depth = [progress_loss(weight, new[:, j], target[j].expand_as(new[:, j])) for j in range(new.shape[1])]
        return torch.stack(per_depth, dim=1)

    a.check("sft_mse", at_every_depth(torch.ones(len(rewards))))
    a.check("progress_loss", at_every_depth(weights).mean())
    assert float(a.given("lam")) > 0  # its factor in the loss: a setting of the trainer
    a.all_used()


# -- BranchGRPO as released: transitions, trees, fused rewards, pruning, training steps (golden tree_branchgrpo)
ITERATIONS = 300
"""Of the released script, where a case does not say."""

SINGLE = r"(step|corr|parse|uniform)\d*_"
"""Names in tree_branchgrpo that belong to no tree."""


def test_branchgrpo_noise_and_splits(golden) -> None:
    """The paper's correlated noise, and split points. Its Dance-SDE steps: test_kernels, of the other peers."""
    a = Arrays(golden("tree_branchgrpo"))
    base, own = a.given("corr_xi0"), a.given("corr_eta")
    for tag in a.tags(r"corr_xi_s(\d\w*)"):
        a.check(f"corr_xi_s{tag}", correlated_noise(base, own, float(tag.replace("p", "."))))

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
    a.all_used("(corr|parse).*")


def branchgrpo_plan(a: Arrays, tag: str) -> SamplingPlan:
    steps, splits = int(a.given(f"{tag}_T")), a.given(f"{tag}_splits").tolist()
    mixed, size, stride = a.given(f"{tag}_mix_window_stride").tolist()
    windows = {step for step in range(steps) if step % stride < size} if mixed else range(steps)
    stochastic = set(splits) | set(windows)
    ways = round(len(a.given(f"{tag}_leaf_index")) ** (1 / max(len(splits), 1)))
    return make_plan(steps, noise=dict.fromkeys(stochastic, 0.3), splits=dict.fromkeys(splits, ways))


def test_branchgrpo_trees(golden) -> None:
    """The tree, rewards fused from the leaves, advantages per depth, pruning and the loss of whole training steps."""
    a = Arrays(golden("tree_branchgrpo"))
    tags = list(a.tags(r"(\w+)_parent"))
    for tag in tags:
        plan = branchgrpo_plan(a, tag)
        tree = grow(plan)
        a.checks(tag, parent=tree.parent, depth=tree.depth, edge_step=tree.depth - 1, leaf_index=tree.leaves)
        a.checks(tag, parents_per_step=plan.nodes[:-1], edges_per_step=plan.nodes[1:])
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
    # the noise levels, an order that nothing here walks in, and steps of their optimiser
    a.all_used(but=rf"{SINGLE}.*|\w+_(sigmas|dfs_preorder_edges|num_optimizer_steps)")


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
        keep = keep & credit.depth_pruned(tree.depth, depths)
    a.checks(name, keep_mask=keep, kept_per_tree=keep.sum(1))
    # A case was run in one of the two released modes; both make the same trees, the loss tells which it was.
    bounded = (advantages[mode].clamp(-5, 5) for mode in ("uniform", "level"))
    losses = [clipped_surrogate(drift, torch.zeros_like(drift), one, clip, clip).loss[keep].mean() for one in bounded]
    want = a.given(f"{name}_mean_edge_ppo_loss")
    loss = min(losses, key=lambda loss: abs(loss - want))
    a.check(f"{name}_mean_edge_ppo_loss", loss)
    scaled = loss / (options["grad_acc"] * (int(keep.sum()) // len(keep)))  # released: edges per tree, rounded down
    a.check(f"{name}_mean_scaled_loss", scaled, rtol=2e-3, atol=1e-9)  # the peer sums float32 losses near 0
