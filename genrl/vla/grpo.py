"""GRPO on action chunks: groups of episodes that begin in the same state, no critic (SimpleVLA-RL, arXiv 2509.09674).

The advantage of an episode is its return within its group; all its decisions have it.
"""

from __future__ import annotations

from torch import Tensor

from genrl.config.vla import GRPO
from genrl.objectives.episodes import episode_group_advantages, informative_groups
from genrl.vla.rollout import ChunkRollout, episode_returns
from genrl.vla.scores import decisions
from genrl.vla.session import Session
from genrl.vla.update import Figures, learn


def train(session: Session, settings: GRPO) -> None:
    """Iterations of acting, comparing and updating."""
    for _ in session.loop.iterations():
        rollout = session.collect(settings)
        returns = episode_returns(rollout)
        advantage = episode_group_advantages(returns, rollout.group)
        kept = rollout.valid & filtered(returns, rollout, settings) & (advantage != 0)
        rows = advantage.expand(rollout.valid.shape)
        chosen = decisions(rollout._replace(valid=kept), rows, rows, rows.new_ones(rows.shape))
        figures = Figures()
        learn(session, rollout, chosen, settings, figures, policy=True, critic=False)
        session.finish(rollout, figures, {})


def filtered(returns: Tensor, rollout: ChunkRollout, settings: GRPO) -> Tensor:
    """Which slots are trained on, bool [B]."""
    if settings.success_filter is None:
        return rollout.valid.any(0)
    low, high = settings.success_filter
    return informative_groups(returns, rollout.group, low=low, high=high)
