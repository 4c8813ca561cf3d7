"""Rollouts of earlier weights as policy gradients learn from them: decoupled PPO (arXiv 2110.00641, eq. 3) with weights
of at most 1."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.objectives.advantages.gae import executed_mask
from genrl.objectives.surrogates.policy_losses import truncated_weight
from genrl.vla.rollout.rollout import ChunkRollout, training_rows
from genrl.vla.update.scores import at_level, context_of
from genrl.vla.update.settings import Update


@torch.no_grad()
def weighed(
    policy: Any, rollout: ChunkRollout, settings: Update, fitting: Callable[[], AbstractContextManager[None]]
) -> ChunkRollout:
    """The rollout with the log-probabilities of valid decisions under the proximal policy, which is the policy before
    the first update, in the place of those under the behaviour policy, which acted; and the importance weights of the
    one to the other, where the settings ask for them. fitting: around every pass of the policy; `check_stop` comes
    next."""
    index = rollout.valid.flatten().nonzero()[:, 0]
    size, ratios = rollout.rewards.shape[-1], rollout.log_prob.shape[2]
    proximal, executed = rollout.log_prob.flatten(0, 1).clone(), rollout.n_executed.flatten()
    for part in index.split(settings.microbatch or settings.minibatch):
        rows = training_rows(rollout, part)
        with fitting():
            context = context_of(policy, rows.observation, rows.context)
            again = rollout.sampler.replay(policy, context, rows.states, rows.next_states, rows.step_index)
        proximal[part] = again.log_prob.cpu()
    now = rollout._replace(log_prob=proximal.view(rollout.log_prob.shape))
    if settings.importance == "none":
        return now

    def leveled(log_prob: Tensor) -> Tensor:
        each = [at_level(log_prob[:, n], executed, size, rollout.action_dim, settings) for n in range(ratios)]
        return torch.stack(each, 1)

    importance = truncated_weight(leveled(proximal), leveled(rollout.log_prob.flatten(0, 1)))
    return now._replace(importance=importance.view(*rollout.valid.shape, *importance.shape[1:]))


def importance_figures(rollout: ChunkRollout) -> dict[str, float]:
    """What the weights of the valid decisions are like, in all processes."""
    assert rollout.importance is not None
    weights = rollout.importance[rollout.valid]
    if weights.dim() > 2:  # of actions, or their numbers: those that were executed
        weights = weights.transpose(1, 2)[executed_mask(rollout.n_executed[rollout.valid], weights.shape[2])]
    every: list[Tensor] = gather_object([weights.flatten().double()])
    weights = torch.cat(every)
    if not len(weights):
        return {}
    return {
        "importance/mean": float(weights.mean()),
        "importance/max_abs_dev": float((weights - 1.0).abs().max()),
    }
