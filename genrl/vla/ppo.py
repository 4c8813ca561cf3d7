"""PPO on action chunks: pi_RL (Flow-SDE, Flow-Noise; arXiv 2510.25889), DPPO (2409.00588) and ReinFlow (2505.22094).

What differs between them is the transition (`sampling`) and a few settings: a decision is one drawn denoising step of a
chunk, or the whole chain. All decisions of a chunk have the advantage of its environment step.
"""

from __future__ import annotations

from torch import Tensor

from genrl.config.vla import PPO
from genrl.objectives.episodes import informative_groups
from genrl.objectives.gae import Estimate, chunk_gae
from genrl.vla.rollout import ChunkRollout, episode_returns
from genrl.vla.scores import decisions
from genrl.vla.session import Session
from genrl.vla.update import Figures, learn


def train(session: Session, settings: PPO) -> None:
    """Iterations of acting, estimating and updating."""
    for iteration in session.loop.iterations():
        rollout = session.collect(settings)
        found = estimate(rollout, settings)
        kept = filtered(rollout, settings)
        normalised = session.normalised(found.advantages, kept)
        chosen = decisions(rollout._replace(valid=kept), normalised, found.returns, weights(rollout, settings))
        figures = Figures()
        trains_policy = iteration >= settings.critic_warmup
        learn(session, rollout, chosen, settings, figures, policy=trains_policy, critic=True)
        session.finish(rollout, figures, explained_variance(rollout, found, kept))


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


def filtered(rollout: ChunkRollout, settings: PPO) -> Tensor:
    """Which rows are trained on, bool [T, B]: those of groups that neither always nor never succeed, where asked."""
    if settings.success_filter is None:
        return rollout.valid
    low, high = settings.success_filter
    return rollout.valid & informative_groups(episode_returns(rollout), rollout.group, low=low, high=high)


def weights(rollout: ChunkRollout, settings: PPO) -> Tensor:
    """[T, B]: 1, or the inverse of the episode's length, with a mean of 1 over the valid rows (pi_RL, with a mask)."""
    valid = rollout.valid.double()
    if settings.weighting == "decisions":
        return valid
    inverse = valid / valid.sum(0).clamp(min=1)
    return inverse / (inverse.sum() / valid.sum().clamp(min=1))


def explained_variance(rollout: ChunkRollout, found: Estimate, kept: Tensor) -> dict[str, float]:
    """`1 - var(R - V) / var(R)` of the critic that acted."""
    assert rollout.values is not None
    returns, values = found.returns[kept], rollout.values.double()[kept]
    spread = float(returns.var(correction=0)) if len(returns) else 0.0
    unexplained = float((returns - values).var(correction=0)) if len(returns) else 0.0
    return {"critic/explained_variance": 1.0 - unexplained / spread if spread > 0 else 0.0}
