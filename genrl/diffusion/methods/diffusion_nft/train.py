"""DiffusionNFT: learn from good and bad samples on the forward process (arXiv 2509.16117).

One iteration, with the paper's symbols (sigma is its t):

1. collect   x_0 of each prompt from the old policy v_old, by any solver; no log-probabilities
2. score     R(x_0, c)
3. estimate  r = clip(A / 5, -1, 1) / 2 + 1/2, the probability that x_0 is a positive sample
4. update    x_t = (1 - t) x_0 + t eps;  v+ = (1 - beta) v_old + beta v_theta,  v- = (1 + beta) v_old - beta v_theta
             minimise  r |x_0(v+) - x_0|^2 + (1 - r) |x_0(v-) - x_0|^2, self-normalised                 (alg. 1)
5. follow    v_old <- d v_old + (1 - d) v_theta

docs/diffusion_nft.md has the equations, metrics and curves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from genrl.diffusion.forward import noising
from genrl.diffusion.forward.noising import REFERENCE, Tensors, noised, under, update
from genrl.diffusion.methods.diffusion_nft.settings import DiffusionNFT
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator
from genrl.objectives.groups import informative
from genrl.objectives.matching import diffusion_nft_loss, nft_old_policy_decay, nft_reward_weight
from genrl.objectives.policy_losses import kl_velocity
from genrl.runtime.loop.recorded import Recorded

OLD = "old"


def train(run: DiffusionRun, settings: DiffusionNFT) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    weights = run.weights
    noising.require_flow(run)
    if OLD not in weights.snapshots:  # a resumed run has it
        weights.snapshot(OLD)
    decay = nft_old_policy_decay(run.loop.optimizer_steps, settings.old_policy_decay)

    for _ in run.iterations():
        # 1, 2. Collect and score.
        rollouts = run.collect(noising.solved, under=OLD)
        # Until the first update after a decay of 0 the old policy is the present one: its pass is saved.
        metrics = learn(run, settings, rollouts, on_policy=decay == 0.0)
        del rollouts
        # 5. The policy that samples follows the one that is trained.
        decay = nft_old_policy_decay(run.loop.optimizer_steps, settings.old_policy_decay)
        weights.blend(OLD, decay)
        run.finish(metrics | {"policy/old_decay": decay})


def learn(run: DiffusionRun, settings: DiffusionNFT, rollouts: Rollouts, *, on_policy: bool) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    num_draws = settings.timesteps_per_sample or max(1, run.config.sampling.num_inference_steps - 1)

    # 3. Estimate.
    advantages, meter = noising.estimate(settings, rollouts)
    reward_weight = nft_reward_weight(advantages, settings.advantage_clip)
    meter.add("nft/reward_weight_mean", reward_weight)
    trained = informative(rollouts.total, rollouts.group)

    # 4. Update.
    def prepare(micro_batch: MicroBatch, epoch: int, k: int) -> tuple[Batch, Tensors]:
        clean, batch, slots = micro_batch.final, micro_batch.batch, micro_batch.slots
        sigma = levels(micro_batch, epoch)[k].to(clean.device)
        tensors = noised(clean, noising.own_noise(micro_batch, epoch, k), sigma) | {"clean": clean}
        tensors |= {
            "trained": trained[slots].to(clean.device),
            "reward_weight": reward_weight[slots].to(clean.device),
        }
        if not on_policy or run.loop.updates > 0:
            tensors["old"] = under(run, OLD, batch, tensors["noisy"], sigma)
        if settings.kl_weight > 0:
            tensors["reference"] = under(run, REFERENCE, batch, tensors["noisy"], sigma)
        return batch, tensors

    update(run, settings, rollouts, num_draws, prepare, loss, meter)
    return meter.result()


def levels(micro_batch: MicroBatch, epoch: int) -> Tensor:
    """The levels of the sampling grid, [T, B], for each sample in an order of its own, by its key alone."""
    grid = micro_batch.sigmas[:-1]
    orders = [torch.randperm(len(grid), generator=generator(*key, "levels", epoch)) for key in micro_batch.batch.keys]
    return grid[torch.stack(orders, dim=1)]


def loss(settings: DiffusionNFT, policy: Policy, given: Recorded) -> Tensors:
    """The loss of each sample, [B], and metrics. Without an old policy's velocity the present one is it."""
    velocity = policy.velocity(given.batch, given["noisy"], given["sigma"])
    old = given["old"] if "old" in given else velocity.detach()
    value = diffusion_nft_loss(
        velocity, old, given["noisy"], given["clean"], given["sigma"], given["reward_weight"],
        beta=settings.beta, advantage_clip=settings.advantage_clip,
    )  # fmt: skip
    terms = {"nft/old_deviation": kl_velocity(velocity, old)}
    if settings.kl_weight > 0:
        terms["kl"] = kl_velocity(velocity, given["reference"])
        value = value + settings.kl_weight * terms["kl"]
    # No score, or a group without spread: no update, by its KL neither.
    return terms | {"loss": value * given["trained"], "model_output": velocity}
