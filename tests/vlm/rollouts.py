"""Small rollout batches with everything that any preset reads."""

from dataclasses import replace

import torch
from torch import Tensor

from genrl.vlm.recipe.advantages import CriticAdvantage
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.rollout.token_batch import TokenBatch

GROUPS, SIZE, LENGTH = 3, 4, 7
PROMPTS = [f"prompt {k}" for k in range(GROUPS)]


def preset(name: str) -> Preset:
    """A preset that runs as it stands: the two that leave a constant to the user get one."""
    chosen = PRESETS[name]
    return replace(chosen, length=LENGTH + 2) if chosen.aggregation == "const" else chosen


def rollout(seed: int = 0, *, junk: float = 0.0, pad: int = 0, masked: bool = True) -> TokenBatch:
    """Rows of 2 to LENGTH tokens. junk: what stands where the mask is 0; pad: further masked columns."""
    generator = torch.Generator().manual_seed(seed)
    rows = GROUPS * SIZE

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(2, LENGTH + 1, (rows,), generator=generator)
    mask = torch.arange(LENGTH) < lengths[:, None] if masked else torch.ones(rows, LENGTH, dtype=torch.bool)

    def tokens(values: Tensor) -> Tensor:
        values = torch.where(mask, values, torch.full_like(values, junk))
        return torch.cat([values, torch.full((rows, pad), junk, dtype=values.dtype)], dim=1)

    old = -draw(rows, LENGTH).abs() - 0.05
    near = {name: old + 0.3 * draw(rows, LENGTH) for name in ("log_prob", "sampler", "ref", "masked_image", "ema")}
    group = torch.arange(GROUPS).repeat_interleave(SIZE)
    extra = {
        "masked_image": near["masked_image"],
        "degraded": old + 0.2 * draw(rows, LENGTH),
        "ema": near["ema"],
        "entropy": draw(rows, LENGTH).abs(),
        "old_value": 0.5 * draw(rows, LENGTH),
        "returns": draw(rows, LENGTH),
    }
    divergence = draw(GROUPS, LENGTH).abs() + 0.1
    second = torch.arange(LENGTH + pad) >= 2  # tokens of a second step, or turn
    accuracy = torch.randint(0, 2, (rows,), generator=generator).double()
    rewards = accuracy + 0.2 * draw(rows)
    return TokenBatch(
        mask=torch.cat([mask, torch.zeros(rows, pad, dtype=torch.bool)], dim=1),
        group=group,
        rewards=rewards,
        log_prob=tokens(near["log_prob"]),
        old_log_prob=tokens(old),
        sampler_log_prob=tokens(near["sampler"]),
        ref_log_prob=tokens(near["ref"]),
        extra={
            **{name: tokens(values) for name, values in extra.items()},
            "answer_mask": torch.cat([mask & (torch.arange(LENGTH) > 0), torch.zeros(rows, pad).bool()], dim=1),
            "divergence": torch.nn.functional.pad(divergence, (0, pad))[group],  # of the group, not of a row's tokens
            "value": tokens(0.5 * draw(rows, LENGTH)),
            "accuracy": accuracy,
            "right": accuracy,
            "proxy": tokens(old + 0.2),
            "reference_probability": torch.linspace(0.1, 0.9, 2 * rows, dtype=torch.float64).view(2, rows).T.flip(1),
            "scores": 3.0 + draw(rows),
            "task": group % 2,
            "components": draw(rows, 2),
            "greedy": draw(GROUPS)[group],
            "draw": tokens(torch.rand(rows, LENGTH, generator=generator, dtype=torch.float64)),
            "credit": draw(rows),
            "high": draw(rows),
            "low": draw(rows),
            "step": second.long().expand(rows, -1),
            "turn": second.long().expand(rows, -1),
            "turn_reward": torch.where(second, draw(rows, 1), draw(rows, 1)),
            "matched": torch.where(second, True, accuracy[:, None] > 0),
            "policy_entropy": tokens(draw(rows, LENGTH).abs()),
            "ids": tokens(torch.randint(0, 2, (rows, LENGTH), generator=generator).double()),
        },
    )


def for_preset(name: str, batch: TokenBatch) -> TokenBatch:
    """What a preset reads in another shape: credit and values per token or per row, ELBO samples."""
    chosen, extra = PRESETS[name], dict(batch.extra)
    if isinstance(chosen.advantage, CriticAdvantage):
        if chosen.advantage.level == "token":
            extra["credit"] = extra["returns"]
        else:
            extra |= {key: extra[key][:, 0] for key in ("value", "old_value", "returns")}
    return replace(batch, extra=extra)
