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

from functools import partial

import torch
from torch import Tensor

from genrl.diffusion.methods.estimation import estimate
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.methods.metering import Meter
from genrl.diffusion.methods.old_policy import check_on_policy, judged_under, means_before, old_policy, rows_of
from genrl.diffusion.methods.plans import choose_kernel, kept_steps, roots_together, sampling_plan, trained_steps
from genrl.diffusion.methods.pull import pull_to_best
from genrl.diffusion.policy.policy import Replayed
from genrl.diffusion.rollout.forest import Draw, roll_out
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.plan import SamplingPlan
from genrl.mdp.tree import grow
from genrl.objectives.surrogates.guard import guard_log_ratio, guard_surrogate
from genrl.objectives.surrogates.layer_tuning import dynamic_clip_bounds, progress_loss
from genrl.objectives.surrogates.policy_losses import (
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
from genrl.runtime.recorded import Recorded


def train(run: DiffusionRun, settings: FlowGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    for iteration in run.iterations():
        # 1, 2. Collect and score.
        plan = sampling_plan(run.config, settings, iteration)
        rollouts = collect(run, plan, drawing(run, settings, plan))
        check_on_policy(run, rollouts, clip=min(settings.clip_bounds), guard=settings.guard)
        # 3, 4. Estimate and update.
        metrics = learn(run, settings, rollouts, plan)
        del rollouts
        run.finish(metrics)


def drawing(run: DiffusionRun, settings: FlowGRPO, plan: SamplingPlan) -> Draw:
    """How the samples of a batch of prompts are drawn under the present policy."""
    return partial(
        roll_out,
        run.policy,
        tree=grow(plan),
        plan=plan,
        kernel=choose_kernel(run, settings, plan),
        batch_size=run.config.sampling.batch_size,
        beat=partial(run.loop.advance_or_leave, 0),
        keep=kept_steps(run.config, settings, run.iteration),
    )


def collect(run: DiffusionRun, plan: SamplingPlan, draw: Draw) -> Rollouts:
    """The scored samples of one iteration; trees that share a root are kept in one micro-batch."""
    config, processes = run.config, run.accelerator.num_processes
    return run.collect(
        draw,
        leaves=plan.leaves // plan.roots,
        roots_together=roots_together(config, plan, processes) if plan.splits else None,
    )


def learn(run: DiffusionRun, settings: FlowGRPO, rollouts: Rollouts, plan: SamplingPlan) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    policy, weights, tree = run.policy, run.weights, grow(plan)

    # 3. Estimate.
    meter = Meter()
    edges = estimate(run, settings, rollouts, plan, tree, meter)
    old_log_probs = old_policy(run, settings, rollouts, edges)
    old_means = means_before(run, settings, rollouts, old_log_probs)
    pull = pull_to_best(run, settings, rollouts, tree, edges)

    # 4. Update.
    run.start_training(settings.epochs * sum(len(logs) for logs in old_log_probs.values()))
    for _ in range(settings.epochs):
        for micro_batches, slots in rollouts.updates(settings.updates):
            divisor = float(edges.weight[:, slots].sum())
            pieces = [piece for micro_batch in micro_batches for piece in micro_batch.pieces]
            for piece, i in [(one, step) for one in pieces for step in old_log_probs[id(one)]]:
                with run.loop.fitting():
                    trajectory, old_log_prob = piece.trajectory, old_log_probs[id(piece)][i]
                    batch = judged_under(policy, settings, trajectory.batch)
                    advantage = edges.advantage[i, piece.slots[i]].to(policy.device)
                    weight = edges.weight[i, piece.slots[i]].to(policy.device)
                    reference = None
                    if settings.kl_weight > 0:
                        with torch.no_grad(), weights.reference():
                            reference = policy.replay(trajectory, i, batch)
                    new = trajectory.graphs.pop(i) if settings.keep_graph else policy.replay(trajectory, i, batch)
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
                    loss = loss * moves  # no score, or a group without spread: no update, by its KL neither
                    meter.add("loss", loss, weight)
                    loss = weight * loss
                    given = {} if old_mean is None else {"old_mean": old_mean}
                    given |= {
                        "step": torch.tensor(i),
                        "state": trajectory.states[i],
                        "next_state": next_state,
                        "rows": rows_of(trajectory, i),
                        "advantage": advantage,
                        "weight": weight * moves,
                        "old_log_prob": old_log_prob,
                    }
                    results = {"loss": loss, "model_output": new.model_output, "log_prob": new.log_prob}
                    run.backward(settings, results, Recorded(batch, given), divisor=divisor)
                    meter.add_surrogate(surrogate, advantage, weight)
            meter.add("grad_norm", torch.tensor([run.step()]))
    steps = trained_steps(run.config, settings, run.iteration)
    return meter.result() | {"window/first": float(steps[0]), "window/size": float(len(steps))}


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


def clip_bounds(settings: FlowGRPO, advantage: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """How far below and above 1 the ratio may go."""
    low, high = settings.clip_bounds
    if settings.layer_tuning is None:
        return low, high
    return dynamic_clip_bounds(advantage, low=low, high=high, sensitivity=settings.layer_tuning.sensitivity)


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
