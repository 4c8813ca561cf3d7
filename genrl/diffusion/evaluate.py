"""Evaluation: held-out prompts, fixed noise, the pipeline's own deterministic solver, the training scorers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

import rewards
from genrl.diffusion.policy import Batch, Policy
from genrl.diffusion.rollout import Scored, score
from genrl.prompts import Prompt


@dataclass(frozen=True)
class Evaluated:
    """Scores of every prompt, and the pictures of the first few."""

    scored: Scored
    total: Tensor
    """Weighted sum, float64 [N]."""
    prompts: list[str]
    images: list[Tensor]
    """Of the first `num_pictures` prompts: float32 in [0, 1], [3, H, W] (video [F, 3, H, W]); on every process."""

    @property
    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {"eval/total_mean": float(self.total.nanmean())}
        for label, values in self.scored.values.items():
            kept = values[~values.isnan()]
            found[f"eval/{label}_mean"] = float(kept.mean())
            found[f"eval/{label}_std"] = float(kept.std(correction=0))
            found[f"eval/{label}_failed"] = float(len(values) - len(kept))
        return found | {f"eval/{name}_mean": float(v.nanmean()) for name, v in self.scored.parts.items()}


@torch.no_grad()
def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    scorers: Mapping[str, rewards.Reward],
    weights: Mapping[str, float],
    sampling: Mapping[str, Any],
    *,
    batch_size: int,
    seed: int,
    num_pictures: int,
    process: int = 0,
    num_processes: int = 1,
    advance: Callable[[int], None] = lambda images: None,
) -> Evaluated:
    """Draw one picture per prompt from noise that depends on (seed, row) alone, and score it.

    sampling: arguments of the pipeline call. `advance` is told of pictures drawn, by all processes as often. All
    processes return the same scores.
    """
    pieces: list[tuple[list[int], Tensor]] = []
    starts = range(0, len(prompts), batch_size)
    for round_ in range(-(-len(starts) // num_processes)):
        k = round_ * num_processes + process
        start = starts[min(k, len(starts) - 1)]  # one too many is drawn and dropped: sharded models draw in step
        rows = list(range(start, min(start + batch_size, len(prompts))))
        batch = Batch([prompts[r].text for r in rows], [("evaluation", seed, r) for r in rows], sampling)
        images = policy.decode(batch, policy.generate(batch)).cpu()
        if k < len(starts):
            pieces.append((rows, images))
        advance(len(rows) * num_processes)
    scored = score(scorers, pieces, prompts, list(range(len(prompts))))
    by_label = {label: values.tolist() for label, values in scored.values.items()}
    total = torch.tensor(rewards.weighted_sum(by_label, weights), dtype=torch.float64)
    shown = [(r, _to_bytes(image)) for rows, images in pieces for r, image in zip(rows, images, strict=True)]
    gathered = sorted(gather_object([(r, image) for r, image in shown if r < num_pictures]), key=lambda item: item[0])
    return Evaluated(scored, total, [p.text for p in prompts], [image.float() / 255 for _, image in gathered])


def _to_bytes(image: Tensor) -> Tensor:
    return (image * 255).round().clamp(0, 255).to(torch.uint8)
