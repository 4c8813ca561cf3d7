"""GRPO on action chunks: groups of episodes that begin in the same state, no critic (SimpleVLA-RL, arXiv 2509.09674).

The advantage of an episode is its return within its group; all its decisions have it.
"""

from __future__ import annotations

import math

from torch import Tensor

from genrl.objectives.episodes import episode_group_advantages
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.vla.methods.grpo.settings import GRPO
from genrl.vla.methods.ppo.train import learn
from genrl.vla.rollout.collect import episode_returns
from genrl.vla.rollout.sampling import Acting
from genrl.vla.rollout.scores import actor_loss, decisions, filtered, score
from genrl.vla.run import VLARun


def loss(settings: GRPO, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's share of the update's loss, [], and sums of figures."""
    actor = actor_loss(settings, score(settings, acting, given), given)
    return {"loss": actor.loss, **actor.sums}


def train(run: VLARun, settings: GRPO) -> None:
    """Iterations of acting, comparing and updating."""
    for _ in run.loop.iterations():
        rollout = run.collect(settings)
        returns = episode_returns(rollout)
        returns[~rollout.valid.any(0)] = math.nan  # an episode that was lost with its simulator compares with none
        advantage = episode_group_advantages(returns, rollout.group)
        # Without an advantage there is no gradient, and there is no KL here to be counted.
        trained = rollout.valid & filtered(rollout, settings) & (advantage != 0)
        rows = advantage.expand(rollout.valid.shape)
        chosen = decisions(rollout._replace(valid=trained), rows, rows, rows.new_ones(rows.shape))
        figures = Meter()
        learn(run, rollout, chosen, settings, figures, loss, policy=True, critic=False)
        run.finish(rollout, figures.result())
