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

from genrl.config import DiffusionNFT
from genrl.diffusion.forest import Drawn, independent
from genrl.diffusion.metering import Meter
from genrl.diffusion.policy import Batch
from genrl.diffusion.rollout import MicroBatch, Rollouts
from genrl.diffusion.session import Session
from genrl.mdp.noise import generator, keyed_noise
from genrl.objectives.advantages import group_advantages, group_statistics
from genrl.objectives.matching import diffusion_nft_loss, nft_old_policy_decay, nft_reward_weight
from genrl.objectives.policy_losses import kl_velocity

OLD = "old"


def train(session: Session, settings: DiffusionNFT) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    policy, weights, config = session.policy, session.weights, session.config
    if policy.head.parametrisation != "flow":
        raise ValueError(
            f"trainer.algorithm: diffusion_nft needs a flow-matching model; {config.model.path} predicts "
            f"{policy.prediction_type}. Use flow_grpo with kernel: ddim"
        )
    if OLD not in weights.snapshots:  # a resumed run has it
        weights.snapshot(OLD)
    decay = nft_old_policy_decay(session.optimizer_steps, settings.old_policy_decay)

    def draw(batch: Batch, slots: list[int]) -> Drawn:
        with weights.use(OLD):
            return independent(policy.roll_out(batch), slots)

    for _ in session.iterations():
        # 1, 2. Collect and score.
        rollouts = session.collect(draw)
        # Until the first update after a decay of 0 the old policy is the present one: its pass is saved.
        metrics = learn(session, settings, rollouts, on_policy=decay == 0.0)
        del rollouts
        # 5. The policy that samples follows the one that is trained.
        decay = nft_old_policy_decay(session.optimizer_steps, settings.old_policy_decay)
        weights.blend(OLD, decay)
        session.finish(metrics | {"policy/old_decay": decay})


def learn(session: Session, settings: DiffusionNFT, rollouts: Rollouts, *, on_policy: bool) -> dict[str, float]:
    """Steps 3 and 4 of the algorithm on the samples of one iteration; returns its metrics."""
    policy, weights = session.policy, session.weights
    num_draws = settings.timesteps_per_sample or max(1, session.config.sampling.num_inference_steps - 1)

    # 3. Estimate.
    advantages = group_advantages(
        rollouts.total, rollouts.group, scale=settings.advantage_scale, clip=settings.advantage_clip
    )
    reward_weight = nft_reward_weight(advantages, settings.advantage_clip)
    meter = Meter()
    meter.add_groups(group_statistics(rollouts.total, rollouts.group), advantages, settings.advantage_clip)
    meter.add("nft/reward_weight_mean", reward_weight)

    # 4. Update.
    session.start_training(settings.inner_epochs * num_draws * len(rollouts.mine))
    for epoch in range(settings.inner_epochs):
        for micro_batches, slots in rollouts.updates(settings.updates_per_iteration):
            for micro_batch in micro_batches:
                clean, batch = micro_batch.final, micro_batch.batch
                r = reward_weight[micro_batch.slots].to(policy.device)
                counts = (advantages[micro_batch.slots] != 0).to(policy.device)  # no score, no spread: no update
                for sigma, noise in forward_draws(micro_batch, num_draws, epoch):
                    level = sigma.view(-1, *[1] * (clean.dim() - 1))
                    noisy = (1.0 - level) * clean + level * noise
                    old = reference = None
                    if not on_policy:
                        with torch.no_grad(), weights.use(OLD):
                            old = policy.velocity(batch, noisy, sigma)
                    if settings.kl_weight > 0:
                        with torch.no_grad(), weights.reference():
                            reference = policy.velocity(batch, noisy, sigma)
                    new = policy.velocity(batch, noisy, sigma)
                    old = new.detach() if old is None else old
                    loss = diffusion_nft_loss(
                        new, old, noisy, clean, sigma, r,
                        beta=settings.beta, advantage_clip=settings.advantage_clip,
                    )  # fmt: skip
                    if reference is not None:
                        kl = kl_velocity(new, reference)
                        loss = loss + settings.kl_weight * kl
                        meter.add("kl", kl)
                    loss = loss * counts
                    session.backward(
                        loss,
                        batch,
                        {
                            "clean": clean,
                            "noise": noise,
                            "sigma": sigma,
                            "noisy": noisy,
                            "advantage": advantages[micro_batch.slots],
                            "reward_weight": r,
                            "old": old,
                            "new": new,
                        },
                        divisor=len(slots) * num_draws,
                    )
                    meter.add("loss", loss)
                    meter.add("nft/old_deviation", kl_velocity(new, old))
            meter.add("grad_norm", torch.tensor([session.step()]))
            on_policy = False
    return meter.result()


def forward_draws(micro_batch: MicroBatch, count: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """`count` draws of (noise level [B], noise [B, ...]): per sample, distinct levels of its own sampling grid.

    Every number derives from the sample's key, so that the draws of a sample do not depend on its neighbours.
    """
    clean, grid = micro_batch.final, micro_batch.sigmas[:-1]
    keys = micro_batch.batch.keys
    orders = torch.stack(
        [torch.randperm(len(grid), generator=generator(*key, "levels", epoch)) for key in keys]
    )  # [B, T]
    return [
        (
            grid[orders[:, k]].to(clean.device),
            torch.stack([keyed_noise(clean.shape[1:], *key, "forward", epoch, k) for key in keys]).to(clean),
        )
        for k in range(count)
    ]
