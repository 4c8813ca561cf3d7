"""Whether dreams pay for the right thing, asked before a policy is trained in them.

Play that nobody trained on is dreamed once more: from its first observations, with its own actions, without looking.
Where the table fulfils an instruction the dream should pay for it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.playground.minitable.play import Play, table_of
from genrl.playground.minitable.task import INSTRUCTIONS, Floats, is_success
from genrl.vla.methods.diwa.classifier import RewardClassifier
from genrl.vla.methods.diwa.dreams import as_observation
from genrl.vla.methods.diwa.rssm import Latent, WorldModel


@torch.no_grad()
def calibration(
    world: WorldModel, judge: RewardClassifier, held_out: Play, tasks: Sequence[int], steps: int, seed: int
) -> dict[str, float]:
    """Precision and recall of the reward over the frames of play and the instructions (numbers `tasks`), of what the
    world model sees (`calibration/seen_...`) and of what it dreams in so many steps (`calibration/dreamed_...`)."""
    observations, actions = torch.from_numpy(held_out.observations), torch.from_numpy(held_out.actions)
    seen = dreamed = world.first(observations[:, 0])
    found: dict[str, list[Tensor]] = {"seen": [], "dreamed": []}
    truth = []
    rng = generator(seed, "calibration")
    for t in range(steps):
        noise = torch.randn(dreamed.z.shape, generator=rng)
        seen = world.look(seen, actions[:, t], observations[:, t + 1])
        dreamed = world.imagine(dreamed, actions[:, t], noise)
        truth.append(fulfilled(held_out.observations[:, t + 1], tasks))
        found["seen"].append(_paid(judge, seen, tasks))
        found["dreamed"].append(_paid(judge, dreamed, tasks))
    true, row = torch.stack(truth), {}
    for name, paid in found.items():
        said = torch.stack(paid)
        both = float((said & true).sum())
        row[f"calibration/{name}_precision"] = both / max(1.0, float(said.sum()))
        row[f"calibration/{name}_recall"] = both / max(1.0, float(true.sum()))
    return row


def _paid(judge: RewardClassifier, latent: Latent, tasks: Sequence[int]) -> Tensor:
    """bool [B, tasks]."""
    count = len(latent.h)
    asked = [judge.tokenise([INSTRUCTIONS[number]]).expand(count, -1) for number in tasks]
    return torch.stack([judge.fulfilled(as_observation(latent, tokens)) for tokens in asked], 1)


def fulfilled(shown: Floats, tasks: Sequence[int]) -> Tensor:
    """Of tables as `play.seen` shows them [B, 9], bool [B, tasks]."""
    tables = table_of(shown)
    flags = [is_success(tables._replace(task=np.full(len(shown), number))) for number in tasks]
    return torch.from_numpy(np.stack(flags, 1))
