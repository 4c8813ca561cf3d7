"""PRDP: proximal reward difference prediction (arXiv 2402.08714), online.

One iteration, with the paper's symbols:

1. collect   B samples x_0 of each prompt c from pi_old, every step but the last drawn from N(mu, s^2 I)
2. score     r(x_0, c)
3. update    K gradient steps on all pairs (a, b) of every prompt:
             l = (dr_hat - (r_a - r_b) / beta)^2,  dr_hat = sum_t (log rho_a,t - log rho_b,t),  rho = pi_theta / pi_ref;
             the mean of max(l, l_clip), in l_clip each log rho kept within clip_range of the old policy's

At the minimum pi_theta is the optimum of E r - beta KL(pi_theta || pi_ref): a regression, no policy gradient, and no
baseline that a prompt's history would have to give. The loss couples all samples of a prompt and all their steps, which
one graph cannot hold; the gradient is that of sum c log pi_theta with c = d loss / d log pi_theta, a small table. So a
gradient step evaluates every log-probability without gradients (in the first one they are those recorded), then each
again with its coefficient. docs/prdp.md has metrics and figures.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.diffusion.methods.prdp.settings import PRDP
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import every_step
from genrl.diffusion.steps.transitions import Tensors, check_on_policy, evidence, replayed
from genrl.objectives.groups import group_statistics
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.running import filled
from genrl.runtime.loop.updating import Meter, descend


def train(run: DiffusionRun, settings: PRDP) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    steps, draw = every_step(run, settings)
    for _ in run.iterations():
        # 1, 2. Collect and score.
        rollouts = run.collect(draw)
        check_on_policy(run, rollouts, clip=settings.clip_range)
        # 3. Update.
        metrics = learn(run, settings, rollouts, num_steps=len(steps))
        del rollouts
        run.finish(metrics)


def learn(run: DiffusionRun, settings: PRDP, rollouts: Rollouts, *, num_steps: int) -> dict[str, float]:
    """Step 3 of the algorithm on the samples of one iteration; returns its metrics."""
    meter = Meter()
    meter.add_spread(group_statistics(rollouts.total, rollouts.group))
    empty = torch.full((num_steps, rollouts.num_samples), torch.nan, dtype=torch.float64)
    run.start_training(settings.inner_epochs * num_steps * len(rollouts.mine))
    sampled = [(i, m.slots, log) for m in rollouts.mine.values() for i, log in m.pieces[0].trajectory.log_probs.items()]
    old = filled(empty.clone(), sampled)
    with run.weights.reference():
        reference = evaluated(run, rollouts, empty)
    rewards = rollouts.total.view(-1, run.config.sampling.group_size)
    for epoch in range(settings.inner_epochs):
        new = old if epoch == 0 else evaluated(run, rollouts, empty)
        now, start, before = (table.T.reshape(*rewards.shape, num_steps) for table in (new, reference, old))
        out, gradient = prdp_gradient(now, start, before, rewards, beta=settings.beta, clip=settings.clip_range)
        coefficients = gradient.flatten(0, 1).T.float()
        parts = [(m, i) for m in rollouts.mine.values() for i in m.pieces[0].trajectory.log_probs]
        # The coefficients are of a mean over the pairs of all processes, so nothing is left to divide by.
        norms = descend(run.loop, settings, run.policy, parts, partial(recorded_of, run, coefficients), loss)
        meter.note({"grad_norm": norms["policy"]})
        if out.num_pairs > 0:
            meter.add("loss", out.loss)
            meter.add("prdp/clip_frac", torch.tensor([out.clipped]))
            for name, value in fit(now - start, rewards, settings).items():
                meter.add(name, value)
        meter.add("prdp/pairs", torch.tensor([float(out.num_pairs)]))
    return meter.result()


def recorded_of(run: DiffusionRun, coefficients: Tensor, part: tuple[MicroBatch, int]) -> Recorded | None:
    """Step i of a micro-batch with its coefficients, of those [T', N]; None where all of them are 0."""
    micro_batch, i = part
    coefficient = coefficients[i, micro_batch.slots].to(run.policy.device)
    # A sharded model is evaluated by all processes together: each as often as the others.
    if not run.weights.in_step and not bool(coefficient.any()):
        return None
    step = micro_batch.pieces[0].trajectory.step(i)
    return Recorded(step.batch, step.tensors() | {"coefficient": coefficient})


def loss(settings: PRDP, policy: Policy, given: Recorded) -> Tensors:
    """The gradient of the regression as a loss of each sample at one step, [B]: coefficient times log-probability."""
    new = replayed(settings, policy, given)
    return {"loss": given["coefficient"] * new.log_prob, **evidence(new)}


def fit(log_ratio: Tensor, rewards: Tensor, settings: PRDP) -> Tensors:
    """How well log-ratios [P, B, T'] predict differences of rewards [P, B], over the pairs of different rewards."""
    total = log_ratio.mean(2)
    above = rewards[:, :, None] > rewards[:, None, :]
    predicted = (total[:, :, None] - total[:, None, :])[above]
    target = (rewards[:, :, None] - rewards[:, None, :])[above] / settings.beta
    if len(target) == 0:
        return {}
    unexplained = (predicted - target).square().mean() / target.square().mean()
    return {"prdp/unexplained": unexplained, "prdp/correct": predicted > 0}


@torch.no_grad()
def evaluated(run: DiffusionRun, rollouts: Rollouts, table: Tensor) -> Tensor:
    """The log-probabilities of all recorded steps under the present weights, in a copy of `table` [T', N]."""
    with run.loop.fitting():
        log_ratios = [
            (i, micro_batch.slots, run.policy.replay(micro_batch.pieces[0].trajectory.step(i)).log_prob)
            for micro_batch in rollouts.mine.values()
            for i in micro_batch.pieces[0].trajectory.log_probs
        ]
    run.loop.check_stop()
    return filled(table.clone(), log_ratios)


# PRDP: proximal reward difference prediction (arXiv 2402.08714), a regression over pairs of samples of one prompt.
#
# The policy that maximises `E r - beta KL(p_theta(x_0:T) || p_ref(x_0:T))` has, for any two samples a and b of a
# prompt, `log p/p_ref (a) - log p/p_ref (b) = (r_a - r_b) / beta`. PRDP regresses the left side, the predicted reward
# difference, on the right one. Shapes: log-probabilities [N, B, T] (prompts, samples of each, steps), rewards [N, B].
# Computed in float64 on the host, where results are.


class PairErrors(NamedTuple):
    """Per pair (a, b) of samples of one prompt: where it stands, and its squared errors."""

    pairs: Tensor
    """int64 [P, 3]: prompt, sample a, sample b."""
    unclipped: Tensor
    """`l = (dr_hat - dr / beta)^2`, float64 [P]."""
    clipped: Tensor
    """The same of the log-ratios clipped around the old policy's, float64 [P]."""


class PRDPOutput(NamedTuple):
    """loss [] (float64), the share of pairs whose clipped error is the larger one, and the number of pairs."""

    loss: Tensor
    clipped: float
    num_pairs: int


def pair_errors(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor,
    rewards: Tensor,
    *,
    beta: float,
    clip: float,
) -> PairErrors:
    """The squared prediction errors of every pair, plain and proximal.

    Per step the log-ratio `log p_theta / p_ref` is kept within clip of the old policy's (the snapshot that sampled);
    the proximal error uses those. Log-ratios are averaged over the steps (the listing in the paper's appendix; its
    equations have the sum): beta is in units of 1 / T, and of 1 / D where log-probabilities are element means: its
    table's 3e-5 belongs to that. Pairs are all a < b, ties too; samples without a score (NaN) are in none.
    Gradient through `log_prob` only.
    Raises ValueError for shapes that do not belong together, beta <= 0 or clip < 0.
    """
    if beta <= 0 or clip < 0:
        raise ValueError(f"beta must be positive and the clip range not negative, got {beta} and {clip}")
    if log_prob.dim() != 3 or rewards.shape != log_prob.shape[:2]:
        raise ValueError(
            "log-probabilities are [prompts, samples, steps] and rewards [prompts, samples]; got "
            f"{list(log_prob.shape)} and {list(rewards.shape)}"
        )
    if not log_prob.shape == ref_log_prob.shape == old_log_prob.shape:
        raise ValueError(
            "new, reference and old log-probabilities must have one shape; got "
            f"{list(log_prob.shape)}, {list(ref_log_prob.shape)} and {list(old_log_prob.shape)}"
        )
    new, reference, old = (value.cpu().double() for value in (log_prob, ref_log_prob.detach(), old_log_prob.detach()))
    scores = rewards.detach().cpu().double()
    missing = scores.isnan()
    mates = ~missing[:, :, None] & ~missing[:, None, :]
    index = mates.triu(diagonal=1).nonzero()  # in the order (prompt, a, b)
    prompt, a, b = index.unbind(dim=1)
    target = (scores[prompt, a] - scores[prompt, b]) / beta
    drift = new - old
    proximal = (old - reference) + drift.clamp(-clip, clip)
    errors = []
    for log_ratio in ((old - reference) + drift, proximal):
        total = log_ratio.mean(dim=2)
        errors.append((total[prompt, a] - total[prompt, b] - target).square())
    return PairErrors(index, errors[0], errors[1])


def prdp_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor,
    rewards: Tensor,
    *,
    beta: float,
    clip: float,
) -> PRDPOutput:
    """Mean over pairs of `max(l, l_clip)`; 0, with a gradient of 0, where there is no pair. Arguments as `pair_errors`:
    log-probabilities [N, B, T], rewards [N, B]."""
    errors = pair_errors(log_prob, ref_log_prob, old_log_prob, rewards, beta=beta, clip=clip)
    count = errors.pairs.shape[0]
    loss = torch.maximum(errors.unclipped, errors.clipped).sum() / max(count, 1)
    clipped = int((errors.clipped > errors.unclipped).sum()) / max(count, 1)
    return PRDPOutput(loss, clipped, count)


def prdp_gradient(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor,
    rewards: Tensor,
    *,
    beta: float,
    clip: float,
) -> tuple[PRDPOutput, Tensor]:
    """The loss, and its derivative c = d loss / d log_prob, float64 [N, B, T], without a graph.

    The loss couples all samples and steps of a prompt; the network's gradient is that of `sum(c log p_theta)` all the
    same, which can be gathered step by step and micro-batch by micro-batch: evaluate all log-probabilities without
    gradients (in the first update they are the recorded ones), then replay each with its coefficient.
    """
    with torch.enable_grad():
        leaf = log_prob.detach().cpu().double().requires_grad_()
        output = prdp_loss(leaf, ref_log_prob, old_log_prob, rewards, beta=beta, clip=clip)
        (gradient,) = torch.autograd.grad(output.loss, leaf)
    return output._replace(loss=output.loss.detach()), gradient
