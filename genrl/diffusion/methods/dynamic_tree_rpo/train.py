"""Dynamic-TreeRPO: trees whose noise grows with the depth, supervised by their best leaf (arXiv 2509.23352).

1. collect   the samples of a prompt are leaves of one tree; the noise level grows from split to split
2. score     R of every leaf
3. estimate  the group-relative advantage of leaves; an edge has the mean of those below it
4. update    LayerTuning-RL: the clipped surrogate, its bounds following the advantage, and the squared distance of the
             velocity from that on the path of the best leaf (or to its image), weighted by how far a sample falls short

docs/trees.md has the equations and curves. The paper's text was not available: its abstract and reviews give the shape
of LayerTuning-RL (the supervised target is the velocity on the best path of the group, weighted by how far a sample
falls short; clip bounds that follow the reward), and the formulas are this project's definition of it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from genrl.diffusion.methods.dynamic_tree_rpo.settings import DynamicTreeRPO
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Edges, Steps, estimate, to_table
from genrl.diffusion.steps.transitions import Action, Tensors, collect, penalised, replayed, step_of, update
from genrl.mdp.tree import Tree, grow
from genrl.objectives.credit import mean_of_leaves
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import clipped_surrogate
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter

Targets = dict[tuple[int, int], Tensor]
"""(step, group) -> velocity on the best path, or (-1, group) -> the best sample itself, [...]."""


def train(run: DiffusionRun, settings: DynamicTreeRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        meter, steps = Meter(), Steps.of(run.config, settings, iteration)
        tree, scale = grow(steps.plan), settings.advantage_scale
        # 1, 2. Collect and score.
        rollouts = collect(run, settings, steps)
        # 3. Estimate.
        advantages = group_advantages(rollouts.total, rollouts.group, scale=scale, eps=1e-8, ddof=1)
        edges = estimate(run, settings, rollouts, steps, advantages, meter)
        # 4. Update.
        targets, short = best_targets(run, settings, rollouts, tree, edges), progress_table(tree, rollouts.total)
        supervision = partial(supervision_of, targets, short, tree.num_slots)
        update(run, settings, rollouts, edges, loss, meter, further=supervision)
        del rollouts, targets, supervision
        run.finish(meter.result() | steps.metrics)


def supervision_of(targets: Targets, short: Tensor, leaves: int, action: Action) -> dict[str, Tensor]:
    """What the loss reads beside the step: how far each sample falls short, [B], and the velocity that it learns."""
    target = target_of(action, targets, leaves)
    return {"short": short[action.step, action.slots].to(target.device), "target": target}


def loss(settings: DynamicTreeRPO, policy: Policy, given: Recorded) -> Tensors:
    """The surrogate of one transition within dynamic bounds, its divergence, and the distance to the best path, [B]."""
    new, advantage = replayed(settings, policy, given), given["advantage"]
    low, high = settings.clip_bounds
    below, above = dynamic_clip_bounds(advantage, low=low, high=high, sensitivity=0.5)
    surrogate = clipped_surrogate(new.log_prob, given["old_log_prob"], advantage, below, above)
    distance = progress_loss(given["short"], new.model_output, given["target"])
    further = {"layer_tuning/distance": (settings.layer_tuning.weight, distance)}
    return penalised(settings, surrogate, new, given, further)


@torch.no_grad()
def best_targets(run: DiffusionRun, settings: DynamicTreeRPO, rollouts: Rollouts, tree: Tree, edges: Edges) -> Targets:
    """What the samples of each group learn from its best one, before the first update. A group is whole within a
    micro-batch. The velocity on the best path is evaluated once more, for one state per group and trained step."""
    leaves, targets = tree.num_slots, Targets()
    rewards = rollouts.total.view(-1, leaves)
    best = rewards.nan_to_num(-torch.inf).argmax(1).tolist()
    paths = [tree.first_leaf[tree.path(int(tree.leaves[leaf]))].tolist() for leaf in best]  # slots by depth
    for micro_batch in rollouts.mine.values():
        if settings.layer_tuning.target == "best_image":
            finals = zip(micro_batch.slots, micro_batch.final, strict=True)
            targets |= {(-1, s // leaves): x for s, x in finals if s % leaves == best[s // leaves]}
            continue
        for piece in micro_batch.pieces:
            for i, slots in piece.slots.items():
                chosen = [k for k, slot in enumerate(slots) if slot % leaves == paths[slot // leaves][i + 1]]
                if not chosen or not bool(edges.weight[i].any()):
                    continue
                step = step_of(run, settings, piece, i)
                rows = torch.arange(len(step.state))[chosen] if step.rows is None else step.rows[chosen]
                states = step.state[rows.to(step.state.device)]
                outputs = run.policy.velocity(step.batch.take(rows.tolist()), states, piece.trajectory.sigmas[i])
                targets |= {(i, slots[k] // leaves): v for k, v in zip(chosen, outputs, strict=True)}
    return targets


def target_of(action: Action, targets: Targets, leaves: int) -> Tensor:
    """The velocity that each sample of this step learns, [B, ...]."""
    groups = [slot // leaves for slot in action.slots]
    if (action.step, groups[0]) in targets:
        return torch.stack([targets[action.step, group] for group in groups])
    step = action.piece.trajectory.step(action.step)
    clean = torch.stack([targets[-1, group] for group in groups])
    state = step.state if step.rows is None else step.state[step.rows.to(step.state.device)]
    return velocity_towards(state, clean, float(action.piece.trajectory.sigmas[action.step]))


def progress_table(tree: Tree, rewards: Tensor) -> Tensor:
    """How far the leaves below an edge fall short of their group's best, in [0, 1], [T, N] (Dynamic-TreeRPO)."""
    return to_table(mean_of_leaves(tree.parent, progress_weights(rewards.view(-1, tree.num_slots))), tree)


def dynamic_clip_bounds(advantage: Tensor, *, low: float, high: float, sensitivity: float) -> tuple[Tensor, Tensor]:
    """(lower, upper): the ratio is kept in 1 - lower .. 1 + upper; each has the shape of the advantage.

    `s = tanh |A|`: upper is `high (1 + eta s)` for A > 0, else `high`; lower is `low (1 + eta s)` for A < 0, else
    `low`: the more a sample tells, the further it may move the policy. For an edge, A is the mean of its leaves'.
    eta = sensitivity (0.5 in our runs). Raises ValueError for a bound that is not positive or a negative sensitivity.
    """
    if low <= 0 or high <= 0 or sensitivity < 0:
        raise ValueError(
            f"clip bounds must be positive, the sensitivity not negative; got {low}, {high}, {sensitivity}"
        )
    size = 1.0 + sensitivity * advantage.detach().abs().tanh()
    lower = torch.where(advantage < 0, low * size, torch.full_like(size, low))
    upper = torch.where(advantage > 0, high * size, torch.full_like(size, high))
    return lower, upper


def progress_weights(rewards: Tensor, eps: float = 1e-8) -> Tensor:
    """`(R_max - R) / (R_max - R_min + eps)` over the last dimension, in [0, 1]: 0 for the best leaf of a group.

    All equal gives 0 everywhere. NaN (no score) gives 0 and counts for neither end.
    """
    values = rewards.detach().double()
    highest = values.nan_to_num(-torch.inf).amax(-1, keepdim=True)
    lowest = values.nan_to_num(torch.inf).amin(-1, keepdim=True)
    return ((highest - values) / (highest - lowest + eps)).nan_to_num(0.0)


def progress_loss(weights: Tensor, velocity: Tensor, target: Tensor) -> Tensor:
    """`w mean (v - sg target)^2` per sample, [B]: what the policy-gradient loss gets lambda times (0.1 in our runs).

    weights [B]; velocity and target [B, ...], the target being the old policy's velocity on the best leaf's path at the
    same step, or `velocity_towards` the best leaf. Gradient through `velocity` only.
    """
    errors = (velocity - target.detach().to(velocity)).square().flatten(1).mean(1)
    return weights.detach().to(errors) * errors


def velocity_towards(x: Tensor, clean: Tensor, sigma: Tensor | float) -> Tensor:
    """`(x - x0) / sigma`: the velocity that takes this state to a given picture in one step, float32 [B, ...].

    The sound target for a sample off the best path, whose velocity belongs to another state. sigma in (0, 1], a float,
    [] or [B].
    """
    level = torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(-1, *[1] * (x.dim() - 1))
    if not bool((level > 0).all()):
        raise ValueError("a finished sample (sigma 0) has no velocity towards another")
    return (x.float() - clean.float()) / level
