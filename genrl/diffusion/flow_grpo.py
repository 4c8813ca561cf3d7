"""Flow-GRPO: policy gradient on the steps of the sampler (arXiv 2505.05470), and what became of it.

One iteration, with the paper's symbols:

1. collect   G samples x_0 of each prompt c from pi_old, every (windowed) step drawn from N(mu, s^2 I)
2. score     R(x_0, c)
3. estimate  A_i = (R_i - mean_G R) / std, the group-relative advantage                              (eq. 4)
4. update    r_i = p_theta(x_{t-1} | x_t, c) / p_old(x_{t-1} | x_t, c), clipped surrogate, KL         (eq. 5)

Settings make it Dance-GRPO (`kernel: dance_sde`), Flow-CPS (`flow_cps`), GRPO-Guard (`guard`), DDPO (`kernel: ddim`,
`advantage_scale: prompt_history`, `objective`) or Flow-GRPO-Fast / MixGRPO's window (`window`). docs/flow_grpo.md has
the equations, metrics and curves, docs/ddpo.md DDPO's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.config import D3PO, PRDP, SPO, Contrast, FlowGRPO
from genrl.config import Tree as TreeSettings
from genrl.diffusion.edges import Edges, independent_edges, progress_table, tree_edges
from genrl.diffusion.forest import Piece, roll_out
from genrl.diffusion.metering import Meter
from genrl.diffusion.plans import roots_together, sampling_plan, trained_steps
from genrl.diffusion.policy import Batch, Kernel, Replayed, Trajectory
from genrl.diffusion.rollout import MicroBatch, Rollouts
from genrl.diffusion.session import Session
from genrl.mdp.kernels import FLOW_KERNELS
from genrl.mdp.plan import SamplingPlan
from genrl.mdp.tree import Tree, grow
from genrl.objectives.advantages import gdpo_advantages, group_advantages, group_statistics
from genrl.objectives.aggregation import LogTame, log_tame_advantages
from genrl.objectives.credit import PromptHistory, branch_extremes, signed_advantage
from genrl.objectives.guard import guard_log_ratio, guard_surrogate
from genrl.objectives.layer_tuning import dynamic_clip_bounds, progress_loss, velocity_towards
from genrl.objectives.policy_losses import (
    SurrogateOutput,
    clipped_surrogate,
    importance_ratio,
    kl_gaussian,
    kl_gaussian_dt,
    kl_k2,
    kl_mean_square,
    kl_velocity,
    kl_x_prediction,
    score_function_loss,
)
from genrl.objectives.prompt_statistics import prompt_advantages

OldLogProbs = dict[int, dict[int, Tensor]]  # id of the piece -> step -> [B]


def train(session: Session, settings: FlowGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    config, processes = session.config, session.accelerator.num_processes
    checked = False
    for iteration in session.iterations():
        plan = sampling_plan(config, settings, iteration)
        tree, kernel = grow(plan), choose_kernel(session, settings, plan)
        # 1, 2. Collect and score.
        rollouts = session.collect(
            partial(
                roll_out,
                session.policy,
                tree=tree,
                plan=plan,
                kernel=kernel,
                batch_size=config.sampling.batch_size,
                beat=session.pulse,
            ),
            leaves=plan.leaves // plan.roots,
            roots_together=roots_together(config, plan, processes) if plan.splits else None,
        )
        if not checked:
            check_on_policy(session, rollouts, clip=min(settings.clip_bounds), guard=settings.guard)
            checked = True
        metrics = learn(session, settings, rollouts, plan, tree)
        del rollouts
        steps = trained_steps(config, settings, iteration)
        session.finish(metrics | {"window/first": float(steps[0]), "window/size": float(len(steps))})


def learn(session: Session, settings: FlowGRPO, rollouts: Rollouts, plan: SamplingPlan, tree: Tree) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    policy, weights = session.policy, session.weights

    # 3. Estimate.
    meter = Meter()
    edges = estimate(session, settings, rollouts, plan, tree, meter)
    old_log_probs = old_policy(session, settings, rollouts, edges)
    old_means = means_before(session, settings, rollouts, old_log_probs)
    pull = progress(session, settings, rollouts, tree, edges)

    # 4. Update.
    session.start_training(settings.inner_epochs * sum(len(logs) for logs in old_log_probs.values()))
    for _ in range(settings.inner_epochs):
        for micro_batches, slots in rollouts.updates(settings.updates_per_iteration):
            divisor = float(edges.weight[:, slots].sum())
            for piece in (piece for micro_batch in micro_batches for piece in micro_batch.pieces):
                trajectory, batch = piece.trajectory, judged_under(settings, piece.trajectory.batch)
                for i, old_log_prob in old_log_probs[id(piece)].items():
                    advantage = edges.advantage[i, piece.slots[i]].to(policy.device)
                    weight = edges.weight[i, piece.slots[i]].to(policy.device)
                    reference = None
                    if settings.kl_weight > 0:
                        with torch.no_grad(), weights.reference():
                            reference = policy.replay(trajectory, i, batch)
                    new = policy.replay(trajectory, i, batch)
                    old_mean = old_means.setdefault((id(piece), i), new.mean.detach()) if settings.guard else None
                    next_state = trajectory.next_states[i]
                    surrogate = policy_loss(settings, new, next_state, old_log_prob, old_mean, advantage)
                    loss = surrogate.loss
                    if reference is not None:
                        kl = reference_kl(settings.kl, new, reference)
                        loss = loss + settings.kl_weight * kl
                        meter.add("kl", kl, weight)
                    if pull is not None and settings.layer_tuning is not None:
                        short = pull.weight[i, piece.slots[i]].to(policy.device)
                        distance = progress_loss(short, new.model_output, pull.target(piece, i))
                        loss = loss + settings.layer_tuning.weight * distance
                        meter.add("layer_tuning/distance", distance, weight)
                    moves = edges.moves[i, piece.slots[i]].to(policy.device)
                    loss = loss * moves  # no score, or a group without spread: no update
                    meter.add("loss", loss, weight)
                    loss = weight * loss
                    session.backward(
                        loss,
                        batch,
                        ({} if old_mean is None else {"old_mean": old_mean})
                        | {
                            "step": torch.tensor(i),
                            "state": trajectory.states[i],
                            "next_state": next_state,
                            "rows": rows_of(trajectory, i),
                            "advantage": advantage,
                            "weight": weight * moves,
                            "old_log_prob": old_log_prob,
                            "model_output": new.model_output,
                            "log_prob": new.log_prob,
                        },
                        divisor=divisor,
                    )
                    meter.add_surrogate(surrogate, advantage, weight)
            meter.add("grad_norm", torch.tensor([session.step()]))
    return meter.result()


def choose_kernel(session: Session, settings: FlowGRPO | SPO | D3PO | PRDP, plan: SamplingPlan) -> Kernel:
    """The configured transition. Raises ValueError where it is not one for what the model predicts."""
    is_flow = session.policy.head.parametrisation == "flow"
    if is_flow == (settings.kernel == "ddim"):
        predicts = "a velocity (flow matching)" if is_flow else session.policy.prediction_type
        legal = ", ".join(FLOW_KERNELS[1:]) if is_flow else "ddim"
        raise ValueError(
            f"trainer.kernel: {settings.kernel} is no transition for {session.config.model.path}, which predicts "
            f"{predicts}; use {legal}"
        )
    level = settings.noise_level or 0.0
    others = {i: plan.noise_levels[i] for i in plan.stochastic if plan.noise_levels[i] != level}
    return Kernel(settings.kernel, level, {i: other for i, other in others.items() if other is not None})


def estimate(
    session: Session, settings: FlowGRPO, rollouts: Rollouts, plan: SamplingPlan, tree: Tree, meter: Meter
) -> Edges:
    """Advantage and weight of every trained transition, from the rewards of the samples."""
    config, iteration = session.config, session.iteration
    advantages = advantages_of(session, settings, rollouts).clamp(-settings.advantage_clip, settings.advantage_clip)
    meter.add_advantages(advantages, settings.advantage_clip)
    if settings.advantage_scale != "prompt_history":  # there no group is compared
        meter.add_spread(group_statistics(rollouts.total, rollouts.group))
    trained = trained_steps(config, settings, iteration)
    if settings.tree is None:
        return independent_edges(advantages, plan, trained)
    rewards = rollouts.total
    if settings.tree.contrast is not None:
        advantages = contrasted(session, settings.tree, settings.tree.contrast, rollouts)
        rewards = torch.where(advantages != 0, rewards, torch.nan)  # the others have no part in what is above them
    log_probs = torch.full((plan.steps, rollouts.num_samples), torch.nan)
    if settings.tree.credit != "mean":
        pieces = [piece for micro_batch in rollouts.mine.values() for piece in micro_batch.pieces]
        mine = [(i, p.slots[i], log) for p in pieces for i, log in p.trajectory.log_probs.items()]
        log_probs = session.gather(mine, log_probs)
    edges = tree_edges(
        settings.tree, tree, plan, trained, rewards, advantages, log_probs,
        clip=settings.advantage_clip, iteration=iteration, iterations=config.iterations,
    )  # fmt: skip
    meter.add_advantages(edges.advantage[edges.weight > 0], settings.advantage_clip)
    if edges.skipped and iteration == 0:
        session.progress.say(
            f"depths {', '.join(map(str, edges.skipped))} have fewer than 4 states: measured against the leaves"
        )
    return edges


def advantages_of(session: Session, settings: FlowGRPO, rollouts: Rollouts) -> Tensor:
    """Of every sample, float64 [N]; 0 without a score, or in a group without spread."""
    total, group, scale = rollouts.total, rollouts.group, settings.advantage_scale
    if scale == "prompt_history":
        seen = session.memory.get("prompt_rewards", {})
        keep = settings.history
        advantages, session.memory["prompt_rewards"] = prompt_advantages(
            total, rollouts.prompts, seen, buffer_size=keep.size, min_count=keep.min_count
        )
        return advantages
    if settings.aggregate == "sum":
        return group_advantages(total, group, scale=scale)
    weights = list(rollouts.weights.values())
    if not any(weights):  # a schedule may have all of them at 0 for a while
        return torch.zeros_like(total)
    parts = [rollouts.parts[label] for label in rollouts.weights]
    if settings.aggregate == "gdpo":
        return gdpo_advantages(parts, weights, group)
    variant: LogTame = "paper" if settings.aggregate == "log_tame" else "released"
    return log_tame_advantages(parts, weights, group, variant=variant, scale=scale)


def contrasted(session: Session, tree: TreeSettings, contrast: Contrast, rollouts: Rollouts) -> Tensor:
    """B2-DiffuRL's advantages: scores over the prompt's history, of the best and worst leaf of each split, [N]."""
    history = PromptHistory(contrast.history)
    history.rewards = session.memory.setdefault("prompt_history", {})
    scores = history.normalise(rollouts.total, rollouts.prompts)
    branch = torch.arange(rollouts.num_samples) // tree.ways
    chosen = branch_extremes(scores, branch, high=contrast.high, low=contrast.low)
    clip = session.config.trainer.advantage_clip
    return torch.where(chosen != 0, signed_advantage(scores, clip=clip), 0.0)


def policy_loss(
    settings: FlowGRPO,
    new: Replayed,
    next_state: Tensor,
    old_log_prob: Tensor,
    old_mean: Tensor | None,
    advantage: Tensor,
) -> SurrogateOutput:
    """The configured policy term of one step, [B]. old_mean: of the policy that sampled; for `guard` alone."""
    low, high = clip_bounds(settings, advantage)
    if old_mean is not None:
        log_ratio = guard_log_ratio(next_state, new.mean, old_mean, new.std)
        return guard_surrogate(log_ratio, advantage, new.step.sigma - new.step.sigma_next, low, high)
    if settings.objective == "score_function":
        loss = score_function_loss(new.log_prob, advantage)
        return SurrogateOutput(loss, importance_ratio(new.log_prob, old_log_prob), torch.zeros_like(loss).bool())
    return clipped_surrogate(new.log_prob, old_log_prob, advantage, low, high)


@torch.no_grad()
def means_before(
    session: Session, settings: FlowGRPO, rollouts: Rollouts, old_log_probs: OldLogProbs
) -> dict[tuple[int, int], Tensor]:
    """(id of the piece, step) -> transition means before the first update, which GRPO-Guard's ratio is measured from.

    Those of the first update's samples are left out: its own evaluation has them.
    """
    if not settings.guard:
        return {}
    later = [
        m for micro_batches, _ in list(rollouts.updates(settings.updates_per_iteration))[1:] for m in micro_batches
    ]
    return {
        (id(piece), i): session.policy.replay(piece.trajectory, i, judged_under(settings, piece.trajectory.batch)).mean
        for micro_batch in later
        for piece in micro_batch.pieces
        for i in old_log_probs[id(piece)]
    }


def clip_bounds(settings: FlowGRPO, advantage: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """How far below and above 1 the ratio may go."""
    low, high = settings.clip_bounds
    if settings.layer_tuning is None:
        return low, high
    return dynamic_clip_bounds(advantage, low=low, high=high, sensitivity=settings.layer_tuning.sensitivity)


@dataclass(frozen=True)
class Pull:
    """Towards the best sample of each group (Dynamic-TreeRPO's LayerTuning-RL)."""

    weight: Tensor
    """By step and slot, [T, N]."""
    targets: dict[tuple[int, int], Tensor]
    """(step, group) -> velocity on the best path, or (-1, group) -> the best sample itself, [...]."""
    leaves: int
    """Samples of a group."""

    def target(self, piece: Piece, step: int) -> Tensor:
        """Velocity that each action of this step is pulled to, [B, ...]."""
        groups = [slot // self.leaves for slot in piece.slots[step]]
        if (step, groups[0]) in self.targets:
            return torch.stack([self.targets[step, group] for group in groups])
        trajectory, rows = piece.trajectory, piece.trajectory.rows(step)
        state = trajectory.states[step]
        clean = torch.stack([self.targets[-1, group] for group in groups])
        state = state if rows is None else state[rows.to(state.device)]
        return velocity_towards(state, clean, float(trajectory.sigmas[step]))


@torch.no_grad()
def progress(session: Session, settings: FlowGRPO, rollouts: Rollouts, tree: Tree, edges: Edges) -> Pull | None:
    """Weights and targets of the pull, made before the first update. A group is whole within a micro-batch.

    The velocity on the best path is evaluated once more, for one state per group and trained step.
    """
    if settings.layer_tuning is None:
        return None
    leaves, targets = tree.num_slots, {}
    rewards = rollouts.total.view(-1, leaves)
    best = rewards.nan_to_num(-torch.inf).argmax(1).tolist()
    paths = [tree.first_leaf[tree.path(int(tree.leaves[leaf]))].tolist() for leaf in best]  # slots by depth
    for micro_batch in rollouts.mine.values():
        if settings.layer_tuning.target == "best_image":
            finals = zip(micro_batch.slots, micro_batch.final, strict=True)
            targets |= {(-1, s // leaves): x for s, x in finals if s % leaves == best[s // leaves]}
            continue
        for piece in micro_batch.pieces:
            trajectory = piece.trajectory
            for i, slots in piece.slots.items():
                chosen = [k for k, slot in enumerate(slots) if slot % leaves == paths[slot // leaves][i + 1]]
                if not chosen or not bool(edges.weight[i].any()):
                    continue
                rows = rows_of(trajectory, i)[chosen]
                batch = judged_under(settings, trajectory.batch.take(rows.tolist()))
                states = trajectory.states[i][rows.to(trajectory.states[i].device)]
                outputs = session.policy.velocity(batch, states, trajectory.sigmas[i])
                targets |= {(i, slots[k] // leaves): v for k, v in zip(chosen, outputs, strict=True)}
    return Pull(progress_table(tree, rollouts.total), targets, leaves)


def rows_of(trajectory: Trajectory, step: int) -> Tensor:
    """Row of the state of each action, int64 [B]."""
    rows = trajectory.rows(step)
    return torch.arange(len(trajectory.states[step])) if rows is None else rows


def judged_under(settings: FlowGRPO, batch: Batch) -> Batch:
    """The conditions of the policy that is trained: those of sampling, or the same without guidance."""
    if settings.guidance_in_training:
        return batch
    return replace(batch, sampling={**batch.sampling, "guidance_scale": 1.0})


@torch.no_grad()
def old_policy(session: Session, settings: FlowGRPO, rollouts: Rollouts, edges: Edges) -> OldLogProbs:
    """id of a piece -> trained step -> log p_old, [B]. As recorded; or, where the trained policy goes without the
    guidance that sampled, evaluated before the first update under the conditions it is trained in. Steps of which no
    action is trained are left out."""
    found: dict[int, dict[int, Tensor]] = {}
    for piece in (piece for micro_batch in rollouts.mine.values() for piece in micro_batch.pieces):
        logs = piece.trajectory.log_probs
        logs = {i: log for i, log in logs.items() if bool(edges.weight[i, piece.slots[i]].any())}
        if not settings.guidance_in_training:
            batch = judged_under(settings, piece.trajectory.batch)
            logs = {i: session.policy.replay(piece.trajectory, i, batch).log_prob for i in logs}
        found[id(piece)] = logs
    return found


def reference_kl(kind: str, new: Replayed, reference: Replayed) -> Tensor:
    """Distance of the policy from the reference at the same state, [B], by its configured name."""
    if kind == "gaussian":
        return kl_gaussian(new.mean, reference.mean, new.std)
    if kind == "gaussian_dt":
        return kl_gaussian_dt(new.mean, reference.mean, new.std, new.step.sigma - new.step.sigma_next)
    if kind == "mean_square":
        return kl_mean_square(new.mean, reference.mean)
    if kind == "x_prediction":
        return kl_x_prediction(new.model_output, reference.model_output, new.step.sigma)
    if kind == "k2":
        return kl_k2(new.log_prob, reference.log_prob)
    return kl_velocity(new.model_output, reference.model_output)


@torch.no_grad()
def check_on_policy(session: Session, rollouts: Rollouts, *, clip: float, guard: bool = False) -> None:
    """Replay the first micro-batch before any update: the ratio must be 1.

    An exact 1 passes in silence; a deviation below a tenth of the clip range passes with a warning; anything above
    raises RuntimeError in all processes, since the clip would cut numerical noise. guard: of GRPO-Guard's ratio.
    """
    deviations = [torch.zeros(1)]
    first: MicroBatch | None = next(iter(rollouts.mine.values()), None)
    if first is not None:
        with session.policy.uncounted():
            for piece in first.pieces:
                for i, old in piece.trajectory.log_probs.items():
                    new = session.policy.replay(piece.trajectory, i)
                    # GRPO-Guard's log-ratio is that of densities times the std, its quadratic term aside.
                    size = new.std.flatten() if guard else 1.0
                    deviations.append((size * (new.log_prob - old)).expm1().abs().cpu())
    everyone = gather_object([float(torch.cat(deviations).max())])
    problem = off_policy(float(torch.tensor(everyone).max()), clip)  # tensor: NaN is the largest
    if problem is not None:
        session.progress.say(problem)


def off_policy(worst: float, clip: float) -> str | None:
    """What to say of the largest |ratio - 1| before the first update. Raises RuntimeError above a tenth of `clip`."""
    if worst == 0.0:
        return None
    found = f"before the first update the ratio of the replayed to the recorded policy is off 1 by {worst:.3g}"
    if worst > clip / 10 or math.isnan(worst):
        raise RuntimeError(
            f"{found}, more than a tenth of trainer.clip_range ({clip:g}): training does not replay what sampling "
            "did. Usual causes: a pipeline option that depends on the position in the loop (skip-layer guidance, "
            "guidance intervals: take it out of sampling.pipeline_args), low precision (model.dtype float32 or "
            "float16 instead of bfloat16), kernels that are not deterministic. Or widen trainer.clip_range."
        )
    return f"{found}; below a tenth of the clip range ({clip:g}): rounding of the kernels in use"
