"""PPO on action chunks: pi_RL (Flow-SDE, Flow-Noise; arXiv 2510.25889), DPPO (2409.00588) and ReinFlow (2505.22094).

What differs between them is the transition (`sampling`) and a few settings: a decision is one drawn denoising step of a
chunk, or the whole chain. All decisions of a chunk have the advantage of its environment step.
"""

from __future__ import annotations

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.config.vla import PPO
from genrl.objectives.gae import Estimate, chunk_gae
from genrl.vla.rollout import ChunkRollout
from genrl.vla.scores import decisions, filtered
from genrl.vla.session import Session
from genrl.vla.update import Figures, learn


def train(session: Session, settings: PPO) -> None:
    """Iterations of acting, estimating and updating."""
    for iteration in session.loop.iterations():
        rollout = session.collect(settings)
        found = estimate(rollout, settings)
        kept = rollout.valid & filtered(rollout, settings)
        normalised = session.normalised(found.advantages, kept)
        weight = weights(rollout, kept, settings)
        mean = session.summed({"weight": weight.sum(), "rows": kept.sum()})
        weight = weight * max(1.0, mean["rows"]) / max(mean["weight"], 1e-9)
        chosen = decisions(rollout._replace(valid=kept), normalised, found.returns, weight)
        figures = Figures()
        trains_policy = iteration >= settings.critic_warmup
        learn(session, rollout, chosen, settings, figures, policy=trains_policy, critic=True)
        session.finish(rollout, figures, explained_variance(session, rollout, found, kept))


def estimate(rollout: ChunkRollout, settings: PPO) -> Estimate:
    """Advantages and returns [T, B]; a truncated episode is bootstrapped from its final observation."""
    assert rollout.values is not None and rollout.next_values is not None
    return chunk_gae(
        rollout.rewards,
        rollout.n_executed,
        rollout.terminated,
        rollout.truncated,
        rollout.values,
        rollout.next_values,
        gamma=settings.gamma,
        lam=settings.lam,
        mode=settings.discount,
    )


def weights(rollout: ChunkRollout, kept: Tensor, settings: PPO) -> Tensor:
    """[T, B]: 1, or the inverse of the episode's length (pi_RL, with a mask), and 0 for rows that are not kept."""
    if settings.weighting == "decisions":
        return kept.double()
    return kept.double() / rollout.valid.sum(0).clamp(min=1)


def explained_variance(session: Session, rollout: ChunkRollout, found: Estimate, kept: Tensor) -> dict[str, float]:
    """`1 - var(R - V) / var(R)` of the critic that acted, over the decisions of all processes."""
    assert rollout.values is not None
    own = torch.stack([found.returns[kept], rollout.values.double()[kept]])
    returns, values = torch.cat(gather_object([own]), 1)
    spread = float(returns.var(correction=0)) if len(returns) else 0.0
    unexplained = float((returns - values).var(correction=0)) if len(returns) else 0.0
    return {"critic/explained_variance": 1.0 - unexplained / spread if spread > 0 else 0.0}
