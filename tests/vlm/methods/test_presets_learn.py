"""Every preset without a critic or a diffusion model teaches a tabular policy: the signs and the plumbing agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from genrl.vlm.methods.estimate import estimate
from genrl.vlm.methods.policy_loss import policy_loss
from genrl.vlm.recipe.advantages import CriticAdvantage
from genrl.vlm.recipe.preset import Preset
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.recipe.surrogates import Cispo, LinearBound
from genrl.vlm.rollout.token_batch import TokenBatch, micro_batches

PROMPTS, SIZE, LENGTH, WORDS = 4, 8, 3, 6
LEARN = [
    name
    for name, preset in PRESETS.items()
    if not isinstance(preset.advantage, CriticAdvantage) and not isinstance(preset.surrogate, LinearBound)
]


def rewards_while_learning(preset: Preset, steps: int) -> list[float]:
    """Mean share of right words at each step, two updates per rollout in micro-batches of two groups."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(PROMPTS, LENGTH, WORDS, requires_grad=True)
    reference = logits.detach().log_softmax(-1)
    target = torch.randint(WORDS, (PROMPTS, LENGTH), generator=generator)
    group = torch.arange(PROMPTS).repeat_interleave(SIZE)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    visits, curve = {}, []
    for _ in range(steps):
        with torch.no_grad():
            rows = logits.log_softmax(-1)
            drawn = rows.exp().flatten(0, 1)[:, None].expand(-1, SIZE, -1).flatten(0, 1)
            words = torch.multinomial(drawn, 1, generator=generator).view(PROMPTS, LENGTH, SIZE)
            ids = words.transpose(1, 2).reshape(-1, LENGTH)

            def chosen(table: Tensor, ids: Tensor = ids) -> Tensor:
                return table[group].gather(-1, ids[..., None])[..., 0]

            right, second = (ids == target[group]).float(), torch.arange(LENGTH) >= 1
            curve.append(float(right.mean()))
            entropy = -(rows.exp() * rows).sum(-1)[group]
            noise = torch.randn(len(group), LENGTH, generator=generator)
            extra = {
                "entropy": entropy,
                "divergence": entropy,
                "greedy": (rows.argmax(-1) == target).float().mean(1)[group],
                "draw": noise.sigmoid(),
                "masked_image": chosen(reference) + 0.5 * noise,
                "degraded": chosen(reference),
                "ema": chosen(rows),
                "answer_mask": torch.ones(len(group), LENGTH),
                "accuracy": right.mean(1),
                "scores": 3.0 + noise[:, 0],
                "components": right[:, :2],
                "high": right[:, 0],
                "low": right[:, 1:].mean(1),
                "step": second.long().expand(len(group), -1),
                "turn": second.long().expand(len(group), -1),
                "turn_reward": torch.where(second, right[:, 1:].mean(1, keepdim=True), right[:, :1]),
                "matched": torch.ones(len(group), LENGTH, dtype=torch.bool),
            }
            batch = TokenBatch(
                mask=torch.ones(len(group), LENGTH),
                group=group,
                rewards=right.mean(1),
                old_log_prob=chosen(rows),
                ref_log_prob=chosen(reference),
                sampler_log_prob=chosen(rows),
                extra=extra,
            )
        ready, visits, _ = estimate(preset, batch, prompts=[str(k) for k in range(PROMPTS)], visits=visits)
        for _ in range(2):
            optimizer.zero_grad()
            losses = [
                policy_loss(preset, part).loss
                for part in micro_batches(
                    ready.with_log_prob(chosen(logits.log_softmax(-1))),
                    2 * SIZE,
                    whole_groups=preset.group_loss is not None,
                )
            ]
            torch.stack(losses).sum().backward()
            torch.nn.utils.clip_grad_norm_([logits], 1.0)  # Reg-GRPO's first gradient is 1 / epsilon
            optimizer.step()
    return curve


@pytest.mark.parametrize("name", LEARN)
def test_it_raises_the_reward(name: str) -> None:
    preset = PRESETS[name]
    if preset.aggregation == "const":
        preset = replace(preset, length=LENGTH)
    curve = rewards_while_learning(preset, 15)
    # from 1/6; the entropy masks update a fifth to a third of the tokens, DMPO aims at a soft distribution
    slow = name in ("forking_tokens", "spine", "vppo", "dmpo", "dpo")  # DPO: two rows of a group
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + (0.05 if slow else 0.15), curve


def test_without_a_gradient_nothing_is_learnt() -> None:
    forgets = replace(PRESETS["dapo"], surrogate=Cispo(highest=0.0))  # every weight is 0
    assert max(rewards_while_learning(forgets, 15)) < 0.3
