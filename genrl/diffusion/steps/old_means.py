"""Means of trained transitions before the first update, for losses that ask how far the policy has moved since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.settings import PolicyGradient
from genrl.diffusion.steps.transitions import Action, Actions, replayed_before, step_of
from genrl.runtime.loop.updating import Results


@dataclass(frozen=True)
class OldMeans:
    """Number of a transition -> its mean before the first update, [B, ...]."""

    means: dict[int, Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, run: DiffusionRun, settings: PolicyGradient, rollouts: Rollouts, actions: Actions) -> Self:
        """Means of all transitions but those of the first update, whose own evaluation is that."""
        # In the first update the policy is still the one that sampled, so its loss pass yields these means for free
        # (`note`).
        later = [m for micro_batches, _ in list(rollouts.updates(settings.updates))[1:] for m in micro_batches]
        every = [action for micro_batch in later for action in actions[micro_batch.slots[0]]]
        steps = {action_of.number: step_of(run, settings, action_of.piece, action_of.step) for action_of in every}
        return cls({number: replayed_before(run, step).mean for number, step in steps.items()})

    def known(self, action: Action) -> dict[str, Tensor]:
        """What a loss reads of the policy that sampled; nothing in the first update."""
        return {"old_mean": self.means[action.number]} if action.number in self.means else {}

    def note(self, action: Action, results: Results) -> None:
        """Keep the evaluation of the first update for the epochs that follow."""
        self.means.setdefault(action.number, results["mean"].detach())
