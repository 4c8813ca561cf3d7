"""Whether dreams pay for the right thing, asked before a policy is trained in them.

Play that nobody trained on is dreamed once more: from its first observations, with its own actions, without looking.
Where the table fulfils an instruction the dream should pay for it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.vla.data.demonstrations import World
from genrl.vla.methods.diwa.classifier import RewardClassifier
from genrl.vla.methods.diwa.dreams import as_observation
from genrl.vla.methods.diwa.rssm import Latent, WorldModel


@torch.no_grad()
def calibration(
    model: WorldModel, judge: RewardClassifier, held_out: Any, world: World, steps: int, seed: int
) -> dict[str, float]:
    """Precision and recall of the reward over the frames of play (`World.play`) and the world's instructions: of what
    the model sees (`calibration/seen_...`), and of what it dreams in so many steps (`calibration/dreamed_...`)."""
    observations, actions = torch.from_numpy(held_out.observations), torch.from_numpy(held_out.actions)
    seen = dreamed = model.first(observations[:, 0])
    found: dict[str, list[Tensor]] = {"seen": [], "dreamed": []}
    truth = []
    rng = generator(seed, "calibration")
    for t in range(steps):
        noise = torch.randn(dreamed.z.shape, generator=rng)
        seen = model.look(seen, actions[:, t], observations[:, t + 1])
        dreamed = model.imagine(dreamed, actions[:, t], noise)
        truth.append(world.fulfilled(held_out.observations[:, t + 1]))
        found["seen"].append(_paid(judge, seen, world.lines))
        found["dreamed"].append(_paid(judge, dreamed, world.lines))
    true, row = torch.stack(truth), {}
    for name, paid in found.items():
        said = torch.stack(paid)
        both = float((said & true).sum())
        row[f"calibration/{name}_precision"] = both / max(1.0, float(said.sum()))
        row[f"calibration/{name}_recall"] = both / max(1.0, float(true.sum()))
    return row


def _paid(judge: RewardClassifier, latent: Latent, lines: Sequence[str]) -> Tensor:
    """bool [B, lines]."""
    count = len(latent.h)
    asked = [judge.tokenise([line]).expand(count, -1) for line in lines]
    return torch.stack([judge.fulfilled(as_observation(latent, tokens)) for tokens in asked], 1)
